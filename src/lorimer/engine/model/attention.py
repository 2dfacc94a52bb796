"""Attention over packed sequences, exact and without padding, for every model that uses transformers' interface.

Legend: T tokens of the pass, H query heads, K key/value heads, G = H / K, N sequences, B = N * K, D head size.

``packed_attention`` is what transformers calls instead of its own kernels. In training it goes block by block of
query rows over each sequence (several short ones together) and recomputes the probabilities in the backward pass,
so nothing of size L x L is kept. In sampling it hands over to the key/value cache. Sliding windows, soft-caps and
attention sinks are honoured; anything else a model passes is refused when it is loaded (``base_model.py``).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

QUERY_BLOCK = 128


@dataclass(frozen=True)
class AttentionGroup:
    """Sequences of similar length, computed together as rows of ``length`` positions.

    ``index`` is ``None`` for a single sequence, which is then the slice from ``start``; else it maps ``(N, length)``
    to token positions, padded at the right with the sequence's last position. Causality keeps real queries from
    padded keys, and padded queries have no gradient.
    """

    start: int
    length: int
    num_sequences: int = 1
    index: Tensor | None = None
    valid: Tensor | None = None
    """``(N * length,)``, false at padding."""


def group_sequences(
    lengths: list[int], starts: list[int], device: torch.device | None = None, max_waste: float = 0.2
) -> list[AttentionGroup]:
    """Group short sequences of similar length: a small model spends more time on kernel calls than on arithmetic."""
    groups: list[AttentionGroup] = []
    members: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], starts[i])):
        if members and not _fits(members, i, lengths, max_waste):
            groups.append(_make_group(members, lengths, starts, device))
            members = []
        members.append(i)
    if members:
        groups.append(_make_group(members, lengths, starts, device))
    return groups


def _fits(members: list[int], i: int, lengths: list[int], max_waste: float) -> bool:
    longest, rows = lengths[members[0]], len(members) + 1
    padding = longest * rows - sum(lengths[m] for m in members) - lengths[i]
    return longest <= 2 * QUERY_BLOCK and rows * longest <= 4096 and padding <= max_waste * longest * rows


def _make_group(
    members: list[int], lengths: list[int], starts: list[int], device: torch.device | None
) -> AttentionGroup:
    if len(members) == 1:
        return AttentionGroup(starts[members[0]], lengths[members[0]])
    longest = lengths[members[0]]
    offsets = torch.arange(longest, device=device)
    length = torch.tensor([lengths[m] for m in members], device=device)[:, None]
    index = torch.tensor([starts[m] for m in members], device=device)[:, None] + offsets.minimum(length - 1)
    return AttentionGroup(0, longest, len(members), index, (offsets < length).flatten())


@dataclass(frozen=True)
class Shape:
    """Options of a layer's attention besides its heads."""

    scale: float
    window: int | None = None
    """Size of the sliding window: a query sees this many keys, itself included."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """Attention sinks ``(H,)``: a logit that takes probability from the keys and adds no value."""


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers, which passes ``(1, heads, T, D)`` tensors; return ``(1, T, H, D)``."""
    current = module.lorimer_slot.current
    shape = Shape(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        # A copy, because sharding frees the parameter while the backward pass and later steps still need it.
        sinks=None if s_aux is None else s_aux.detach().to(torch.float32, copy=True),
    )
    if not hasattr(module, "lorimer_shape"):
        module.lorimer_shape = shape
    q_HTD, k_KTD, v_KTD = query[0], key[0], value[0]
    if current.cache is not None:
        out_THD = current.cache.attend(module.lorimer_layer, q_HTD, k_KTD, v_KTD, shape)
    else:
        out_THD = _PackedAttention.apply(q_HTD, k_KTD, v_KTD, current.groups, shape)
    return out_THD.unsqueeze(0), None


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, groups: list[AttentionGroup], shape: Shape
    ) -> Tensor:
        ctx.save_for_backward(q_HTD, k_KTD, v_KTD)
        ctx.groups, ctx.shape = groups, shape
        out_THD = q_HTD.new_empty(q_HTD.shape[1], q_HTD.shape[0], v_KTD.shape[2])
        for group in groups:
            q, k, v = _gather(group, q_HTD, k_KTD, v_KTD)
            _scatter(group, out_THD, attend_rows(q, k, v, 0, shape))
        return out_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q_HTD, k_KTD, v_KTD = ctx.saved_tensors
        d_out_HTD = grads[0].transpose(0, 1)
        d_qkv_THD = [x.new_empty(x.shape[1], x.shape[0], x.shape[2]) for x in (q_HTD, k_KTD, v_KTD)]
        for group in ctx.groups:
            q, k, v = _gather(group, q_HTD, k_KTD, v_KTD)
            d_out = _take(group, d_out_HTD, zero_padding=True).reshape(*q.shape[:3], v.shape[2])
            for d_THD, d in zip(d_qkv_THD, _backward_rows(q, k, v, d_out, ctx.shape), strict=True):
                _scatter(group, d_THD, d)
        return (*(d.transpose(0, 1) for d in d_qkv_THD), None, None)


def _take(group: AttentionGroup, x_HTD: Tensor, zero_padding: bool = False) -> Tensor:
    """Gather the tokens of the group as ``(N, heads, length, D)``."""
    if group.index is None:
        return x_HTD[:, group.start : group.start + group.length].unsqueeze(0)
    assert group.valid is not None
    rows = x_HTD.transpose(0, 1)[group.index.flatten()]
    if zero_padding:
        rows.mul_(group.valid[:, None, None])
    return rows.view(group.num_sequences, group.length, *rows.shape[1:]).transpose(1, 2)


def _gather(group: AttentionGroup, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries ``(B, G, length, D)``, keys and values ``(B, length, D)``."""
    q, k, v = (_take(group, x) for x in (q_HTD, k_KTD, v_KTD))
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    return q.reshape(len(k), -1, group.length, q.shape[-1]), k, v


def _scatter(group: AttentionGroup, out_THD: Tensor, x: Tensor) -> None:
    """Write ``x``, ``(B, G, length, D)`` or ``(B, length, D)``, back to its tokens."""
    x = x.reshape(group.num_sequences, out_THD.shape[1], group.length, x.shape[-1]).transpose(1, 2)
    if group.index is None:
        out_THD[group.start : group.start + group.length] = x[0]
    else:
        assert group.valid is not None
        out_THD[group.index.flatten()[group.valid]] = x.flatten(0, 1)[group.valid]


def attend_rows(q: Tensor, k: Tensor, v: Tensor, first_position: int, shape: Shape) -> Tensor:
    """Attend from queries ``(B, G, R, D)`` at positions from ``first_position`` to keys ``(B, L, D)`` from 0."""
    batch, group, num_rows, _ = q.shape
    out = q.new_empty(batch, group, num_rows, v.shape[2])
    for block in _blocks(num_rows, first_position, shape):
        p, _, _ = _probabilities(q, k, block, shape)
        values = torch.bmm(p.flatten(1, 2).to(v.dtype), v[:, block.keys])
        out[:, :, block.rows] = values.view(batch, group, -1, v.shape[2])
    return out


def _backward_rows(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for block in _blocks(q.shape[2], 0, shape):
        p, scaled_q, capped = _probabilities(q, k, block, shape)
        p, d_o = p.flatten(1, 2), d_out[:, :, block.rows].flatten(1, 2)
        d_p = torch.bmm(d_o, v[:, block.keys].transpose(1, 2))
        d_v[:, block.keys].baddbmm_(p.to(v.dtype).transpose(1, 2), d_o)
        d_s = torch._softmax_backward_data(d_p.float(), p, -1, torch.float32)
        if shape.softcap is not None:
            d_s *= 1 - (capped.flatten(1, 2) / shape.softcap).square_()
        d_s = d_s.to(q.dtype)
        d_k[:, block.keys].baddbmm_(d_s.transpose(1, 2), scaled_q)
        rows = torch.bmm(d_s, k[:, block.keys]).mul_(shape.scale)
        d_q[:, :, block.rows] = rows.view(*q.shape[:2], -1, q.shape[3])
    return d_q, d_k, d_v


@dataclass(frozen=True)
class _Block:
    rows: slice
    keys: slice
    first_position: int


def _blocks(num_rows: int, first_position: int, shape: Shape) -> list[_Block]:
    """Yield blocks of query rows, each with the range of keys that at least one of its rows sees."""
    blocks = []
    for first in range(0, num_rows, QUERY_BLOCK):
        last = min(num_rows, first + QUERY_BLOCK)
        low = 0 if shape.window is None else max(0, first_position + first - shape.window + 1)
        blocks.append(_Block(slice(first, last), slice(low, first_position + last), first_position + first))
    return blocks


def _probabilities(q: Tensor, k: Tensor, block: _Block, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 probabilities ``(B, G, rows, keys)``, scaled queries ``(B, G * rows, D)`` and capped logits."""
    batch, group = q.shape[:2]
    scaled_q = (q[:, :, block.rows] * shape.scale).flatten(1, 2)
    scores = torch.bmm(scaled_q, k[:, block.keys].transpose(1, 2)).float()
    scores = scores.view(batch, group, -1, scores.shape[-1])
    if shape.softcap is not None:
        scores = scores.div_(shape.softcap).tanh_().mul_(shape.softcap)
        capped, scores = scores, scores.clone()
    else:
        capped = scores
    mask_scores(scores, block.first_position, block.keys.start, shape.window)
    return softmax_with_sinks(scores, shape.sinks), scaled_q, capped


def mask_scores(scores: Tensor, first_position: int, first_key: int, window: int | None) -> None:
    """Mask keys after a query or further back than the window, in place."""
    num_rows, num_keys = scores.shape[-2:]
    position = torch.arange(first_position, first_position + num_rows, device=scores.device)[:, None]
    key = torch.arange(first_key, first_key + num_keys, device=scores.device)[None]
    if window is not None and first_position + num_rows - 1 - first_key >= window:
        scores.masked_fill_((key > position) | (position - key >= window), float("-inf"))
    elif num_rows > 1 or first_key + num_keys > first_position + 1:
        # Only the square on the diagonal has keys to mask.
        square = scores[..., num_keys - num_rows :]
        square.masked_fill_(key[:, num_keys - num_rows :] > position, float("-inf"))


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Compute the softmax over keys of ``(B, G, rows, keys)``; a sink is added as one more key, then dropped."""
    if sinks is None:
        return torch.softmax(scores, -1)
    batch, group, num_rows, _ = scores.shape
    column = sinks.view(1, -1, group, 1, 1).expand(batch * group // len(sinks), -1, -1, num_rows, 1)
    with_sink = torch.cat([scores, column.reshape(batch, group, num_rows, 1)], -1)
    return torch.softmax(with_sink, -1)[..., :-1]
