"""Attention over packed sequences, exact and without padding, for every model that uses transformers' interface.

Legend: T tokens of the pass, H query heads, K key/value heads, G = H / K, N sequences, B = K * N, D head size.

``packed_attention`` is what transformers calls instead of its own kernels. In training it goes block by block of
query rows over each sequence (several short ones together) and recomputes the probabilities in the backward pass,
so nothing of size L x L is kept. Sequences that continue the same tokens attend to these in one product. In sampling it
hands over to the key/value cache. Sliding windows, soft-caps and attention sinks are honoured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lorimer.engine.model.device import upload
from lorimer.engine.native.rowwise import Mask, Rowwise, functions_for

QUERY_BLOCK = 128
_MAX_SCORES = 1 << 20
"""Maximum scores of one head in a group of sequences."""

Past = tuple[slice, ...]
"""Pieces of the token axis, in order."""


@dataclass(frozen=True)
class AttentionGroup:
    """Sequences of similar length, computed together as rows of ``length`` positions.

    ``index`` is ``None`` for a single sequence, which is then the slice from ``start``; else it maps ``N * length``
    rows to tokens, padded at the right with the sequence's last token. Causality keeps real queries from padded keys,
    and padded queries have no gradient.
    """

    start: int
    length: int
    num_sequences: int = 1
    index: Tensor | None = None
    kept: Tensor | None = None
    """Rows that are not padding, and ``padding`` those that are; ``None`` if there is no padding."""
    padding: Tensor | None = None
    past: Past = ()
    """Tokens that all of the sequences continue."""


class Groups(list[AttentionGroup]):
    """The sequences of a pass in groups, and on the host where each is and what it continues."""

    def __init__(
        self,
        groups: Iterable[AttentionGroup],
        lengths: Sequence[int],
        starts: Sequence[int],
        pasts: Sequence[Past] | None,
        device: torch.device | None,
    ) -> None:
        super().__init__(groups)
        self.lengths, self.starts, self.device = lengths, starts, device
        self.pasts: Sequence[Past] = pasts or [()] * len(lengths)


def group_sequences(
    lengths: Sequence[int],
    starts: Sequence[int],
    device: torch.device | None = None,
    max_waste: float = 0.2,
    pasts: Sequence[Past] | None = None,
) -> Groups:
    """Group short sequences of similar length: a small model spends more time on kernel calls than on arithmetic.

    ``pasts`` are the tokens that each sequence continues. A group comes after those of its past.
    """
    by_past: dict[tuple[tuple[int, int], ...], list[int]] = {(): []}
    for i in range(len(lengths)):
        past = () if pasts is None else pasts[i]
        by_past.setdefault(tuple((piece.start, piece.stop) for piece in past), []).append(i)
    groups: list[list[int]] = []
    for past_key, members in by_past.items():
        num_past = sum(stop - start for start, stop in past_key)
        group: list[int] = []
        for i in sorted(members, key=lambda i: (-lengths[i], starts[i])):
            if group and not _fits(group, i, lengths, num_past, max_waste):
                groups.append(group)
                group = []
            group.append(i)
        groups += [group] if group else []
    return Groups(_make_groups(groups, lengths, starts, device, pasts), lengths, starts, pasts, device)


def _fits(members: list[int], i: int, lengths: Sequence[int], num_past: int, max_waste: float) -> bool:
    longest, rows = lengths[members[0]], len(members) + 1
    padding = longest * rows - sum(lengths[m] for m in members) - lengths[i]
    is_small = rows * longest <= 4096 and rows * longest * (num_past + longest) <= _MAX_SCORES
    return longest <= 2 * QUERY_BLOCK and is_small and padding <= max_waste * longest * rows


def _make_groups(
    groups: list[list[int]],
    lengths: Sequence[int],
    starts: Sequence[int],
    device: torch.device | None,
    pasts: Sequence[Past] | None,
) -> list[AttentionGroup]:
    indices: list[np.ndarray] = []
    for members in groups:
        if len(members) > 1:
            offsets = np.arange(lengths[members[0]])
            length, start = (np.array([of[m] for m in members])[:, None] for of in (lengths, starts))
            is_kept = (offsets < length).flatten()
            indices += [
                (start + np.minimum(offsets, length - 1)).flatten(),
                *(np.flatnonzero(x) for x in (is_kept, ~is_kept)),
            ]
    parts = iter(upload(indices, device))
    made = []
    for members in groups:
        first = members[0]
        past = () if pasts is None else pasts[first]
        if len(members) == 1:
            made.append(AttentionGroup(starts[first], lengths[first], past=past))
        else:
            index, kept, padding = next(parts), next(parts), next(parts)
            has_padding = len(padding) > 0
            made.append(
                AttentionGroup(
                    0,
                    lengths[first],
                    len(members),
                    index,
                    kept if has_padding else None,
                    padding if has_padding else None,
                    past,
                )
            )
    return made


@dataclass(frozen=True)
class Shape:
    """Options of a layer's attention besides its heads."""

    scale: float
    window: int | None = None
    """Size of the sliding window: a query sees this many keys, itself included."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """Attention sinks ``(H,)``: a logit that takes probability from the keys and adds no value."""
    trained_sinks: Tensor | None = None
    """The parameter of the sinks, whose ``grad`` a full run's backward pass adds to."""


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
        trained_sinks=s_aux if current.trains_base else None,
    )
    q_HTD, k_KTD, v_KTD = query[0], key[0], value[0]
    if not hasattr(module, "lorimer_shape"):
        module.lorimer_shape, module.lorimer_heads = shape, (len(q_HTD), len(k_KTD), q_HTD.shape[2])
    kernel = getattr(module, "lorimer_kernel", None)
    if current.cache is not None:
        out_THD = current.cache.attend(module.lorimer_layer, q_HTD, k_KTD, v_KTD, shape)
    elif kernel is not None and kernel.accepts_groups(shape, current.groups):
        out_THD = kernel.attend(q_HTD, k_KTD, v_KTD, current.groups, shape)
    else:
        out_THD = attend_blocks(q_HTD, k_KTD, v_KTD, current.groups, shape)
    return out_THD.unsqueeze(0), None


def attend_blocks(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, groups: Groups, shape: Shape) -> Tensor:
    """Attend within the sequences of a pass; return ``(T, H, D)``. Kernels (``attention_kernels.py``) must equal it."""
    out_THD: Tensor = _PackedAttention.apply(q_HTD, k_KTD, v_KTD, groups, shape)
    return out_THD


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
            _scatter(group, out_THD, attend_rows(q, k, v, k.num_past, shape))
        return out_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q_HTD, k_KTD, v_KTD = ctx.saved_tensors
        d_out_HTD = grads[0].transpose(0, 1)
        d_qkv_THD = [x.new_empty(x.shape[1], x.shape[0], x.shape[2]) for x in (q_HTD, k_KTD, v_KTD)]
        for group in ctx.groups:
            q, k, v = _gather(group, q_HTD, k_KTD, v_KTD)
            d_out = _by_key_head(_take(group, d_out_HTD, zero_padding=True), len(k_KTD))
            d_q, d_k, d_v = _backward_rows(q, k, v, d_out, ctx.shape)
            for d_THD, d in zip(d_qkv_THD, (d_q, d_k.own, d_v.own), strict=True):
                _scatter(group, d_THD, d)
            # The groups of the past came first, and have written their gradients.
            for d_THD, joined in zip(d_qkv_THD[1:], (d_k, d_v), strict=True):
                _add_past(group, d_THD, joined)
        return (*(d.transpose(0, 1) for d in d_qkv_THD), None, None)


class Joined:
    """Keys or values of B sequences that have their first positions in common: ``past`` for all N, then ``own``.

    Matrices with a row for each position, of which ``keys`` selects a range. The past of a key head is one matrix, so
    that products with it are one for all sequences.
    """

    def __init__(self, own_BLD: Tensor, past_KPD: Tensor | None = None) -> None:
        self.own, self.past = own_BLD, past_KPD
        self.num_past = 0 if past_KPD is None else past_KPD.shape[1]

    def zeros_like(self) -> "Joined":
        return Joined(torch.zeros_like(self.own), None if self.past is None else torch.zeros_like(self.past))

    def _parts(self, keys: slice) -> tuple[Tensor, Tensor | None]:
        if self.past is None or keys.start >= self.num_past:
            return self.own[:, keys.start - self.num_past : keys.stop - self.num_past], None
        return self.own[:, : keys.stop - self.num_past], self.past[:, keys.start :]

    def multiply(self, x: Tensor, keys: slice) -> Tensor:
        """Return the products of ``x`` ``(B, rows, D)`` with the selected positions, ``(B, rows, keys)``."""
        own, past = self._parts(keys)
        if past is None:
            return torch.bmm(x, own.transpose(1, 2))
        y = x.new_empty(*x.shape[:2], keys.stop - keys.start)
        _fold(y, past)[..., : past.shape[1]].baddbmm_(_fold(x, past), past.transpose(1, 2), beta=0)
        y[..., past.shape[1] :].baddbmm_(x, own.transpose(1, 2), beta=0)
        return y

    def combine(self, weights: Tensor, keys: slice) -> Tensor:
        """Return the sums of the selected positions with ``weights`` ``(B, rows, keys)``."""
        own, past = self._parts(keys)
        if past is None:
            return torch.bmm(weights, own)
        y = torch.bmm(weights[..., past.shape[1] :], own)
        _fold(y, past).baddbmm_(_fold(weights, past)[..., : past.shape[1]], past)
        return y

    def add_(self, weights: Tensor, x: Tensor, keys: slice) -> None:
        """Add ``x`` ``(B, rows, D)`` to the selected positions, with ``weights`` ``(B, rows, keys)``."""
        own, past = self._parts(keys)
        if past is None:
            own.baddbmm_(weights.transpose(1, 2), x)
            return
        own.baddbmm_(weights[..., past.shape[1] :].transpose(1, 2), x)
        past.baddbmm_(_fold(weights, past)[..., : past.shape[1]].transpose(1, 2), _fold(x, past))


def _fold(x: Tensor, past: Tensor) -> Tensor:
    """Return a view of ``(B, rows, ...)`` as ``(K, N * rows, ...)``."""
    return x.view(len(past), -1, x.shape[-1])


def _take(group: AttentionGroup, x_HTD: Tensor, zero_padding: bool = False) -> Tensor:
    """Gather the tokens of the group as ``(heads, N, length, D)``."""
    if group.index is None:
        return x_HTD[:, group.start : group.start + group.length].unsqueeze(1)
    rows = x_HTD.transpose(0, 1)[group.index]
    if zero_padding and group.padding is not None:
        rows.index_fill_(0, group.padding, 0)
    return rows.view(group.num_sequences, group.length, *rows.shape[1:]).permute(2, 0, 1, 3)


def _by_key_head(x: Tensor, num_kv: int) -> Tensor:
    """Return ``(H, N, length, D)`` as ``(B, G, length, D)``."""
    heads, num_sequences, length, size = x.shape
    x = x.reshape(num_kv, heads // num_kv, num_sequences, length, size).transpose(1, 2)
    return x.reshape(num_kv * num_sequences, -1, length, size)


def _gather(group: AttentionGroup, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor) -> tuple[Tensor, Joined, Joined]:
    """Return queries ``(B, G, length, D)``, keys and values."""
    q = _by_key_head(_take(group, q_HTD), len(k_KTD))
    k, v = (Joined(_take(group, x).flatten(0, 1), _past(group, x)) for x in (k_KTD, v_KTD))
    return q, k, v


def _past(group: AttentionGroup, x_KTD: Tensor) -> Tensor | None:
    pieces = [x_KTD[:, piece] for piece in group.past]
    return torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0] if pieces else None


def _add_past(group: AttentionGroup, d_TKD: Tensor, d: Joined) -> None:
    if d.past is not None:
        parts = d.past.transpose(0, 1).split([piece.stop - piece.start for piece in group.past])
        for piece, part in zip(group.past, parts, strict=True):
            d_TKD[piece] += part


def _scatter(group: AttentionGroup, out_THD: Tensor, x: Tensor) -> None:
    """Write ``x``, ``(B, G, length, D)`` or ``(B, length, D)``, back to its tokens."""
    x = x.reshape(-1, group.num_sequences, out_THD.shape[1] * group.num_sequences // len(x), group.length, x.shape[-1])
    x = x.permute(1, 3, 0, 2, 4).reshape(-1, *out_THD.shape[1:])
    if group.index is None:
        out_THD[group.start : group.start + group.length] = x
    elif group.kept is None:
        out_THD[group.index] = x
    else:
        out_THD[group.index[group.kept]] = x[group.kept]


def attend_rows(q: Tensor, k: Joined, v: Joined, first_position: int, shape: Shape) -> Tensor:
    """Attend from queries ``(B, G, R, D)`` at positions from ``first_position`` to keys from position 0."""
    batch, group, num_rows, _ = q.shape
    out = q.new_empty(batch, group, num_rows, v.own.shape[2])
    functions = _functions_for(q, shape)
    for block in _blocks(num_rows, first_position, shape):
        if functions is None:
            p = _probabilities(q, k, block, shape)[0].flatten(1, 2).to(v.own.dtype)
        else:
            p = k.multiply(_scaled(q, block, shape), block.keys)
            functions.masked_softmax(p, block.mask(shape))
        values = v.combine(p, block.keys)
        out[:, :, block.rows] = values.view(batch, group, -1, values.shape[2])
    return out


def _backward_rows(q: Tensor, k: Joined, v: Joined, d_out: Tensor, shape: Shape) -> tuple[Tensor, Joined, Joined]:
    d_q, d_k, d_v = torch.empty_like(q), k.zeros_like(), v.zeros_like()
    functions = _functions_for(q, shape)
    for block in _blocks(q.shape[2], k.num_past, shape):
        d_o = d_out[:, :, block.rows].flatten(1, 2)
        if functions is not None:
            scaled_q = _scaled(q, block, shape)
            p, d_s = k.multiply(scaled_q, block.keys), v.multiply(d_o, block.keys)
            functions.masked_softmax_gradient(p, d_s, block.mask(shape))
            d_v.add_(p, d_o, block.keys)
        else:
            p, scaled_q, capped = _probabilities(q, k, block, shape)
            p = p.flatten(1, 2)
            d_p = v.multiply(d_o, block.keys)
            d_v.add_(p.to(d_o.dtype), d_o, block.keys)
            d_s = torch._softmax_backward_data(d_p.float(), p, -1, torch.float32)
            if shape.trained_sinks is not None and shape.trained_sinks.grad is not None:
                _add_sink_gradient(shape.trained_sinks.grad, p, d_p, q.shape[1])
            if shape.softcap is not None:
                d_s *= 1 - (capped.flatten(1, 2) / shape.softcap).square_()
            d_s = d_s.to(q.dtype)
        d_k.add_(d_s, scaled_q, block.keys)
        rows = k.combine(d_s, block.keys).mul_(shape.scale)
        d_q[:, :, block.rows] = rows.view(*q.shape[:2], -1, q.shape[3])
    return d_q, d_k, d_v


def _add_sink_gradient(d_sinks: Tensor, p: Tensor, d_p: Tensor, group: int) -> None:
    """Add the gradient of the sinks, whose probability is what the keys lack, given ``(B, G * rows, keys)``."""
    d_sink = (p.sum(-1) - 1) * (p * d_p).sum(-1)
    d_sinks += d_sink.view(len(d_sinks) // group, -1, group, d_sink.shape[1] // group).sum((1, 3)).flatten()


@dataclass(frozen=True)
class _Block:
    rows: slice
    keys: slice
    first_position: int

    def mask(self, shape: Shape) -> Mask:
        return Mask(self.rows.stop - self.rows.start, self.first_position - self.keys.start, shape.window)


def _blocks(num_rows: int, first_position: int, shape: Shape) -> list[_Block]:
    """Yield blocks of query rows, each with the range of keys that at least one of its rows sees."""
    blocks = []
    for first in range(0, num_rows, QUERY_BLOCK):
        last = min(num_rows, first + QUERY_BLOCK)
        low = 0 if shape.window is None else max(0, first_position + first - shape.window + 1)
        blocks.append(_Block(slice(first, last), slice(low, first_position + last), first_position + first))
    return blocks


def _scaled(q: Tensor, block: _Block, shape: Shape) -> Tensor:
    """Return scaled queries ``(B, G * rows, D)``."""
    return (q[:, :, block.rows] * shape.scale).flatten(1, 2)


def _functions_for(q: Tensor, shape: Shape) -> Rowwise | None:
    """Return the compiled functions for scores, which know neither sinks nor a soft cap."""
    return functions_for(q) if shape.softcap is None and shape.sinks is None else None


def _probabilities(q: Tensor, k: Joined, block: _Block, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 probabilities ``(B, G, rows, keys)``, scaled queries ``(B, G * rows, D)`` and capped logits."""
    batch, group = q.shape[:2]
    scaled_q = _scaled(q, block, shape)
    scores = k.multiply(scaled_q, block.keys).float()
    scores = scores.view(batch, group, -1, scores.shape[-1])
    if shape.softcap is not None:
        scores = scores.div_(shape.softcap).tanh_().mul_(shape.softcap)
        capped, scores = scores, scores.clone()
    else:
        capped = scores
    mask_scores(scores, block.first_position, block.keys.start, shape.window)
    sinks = shape.sinks
    if sinks is not None:
        sinks = sinks.view(-1, group).repeat_interleave(batch * group // len(sinks), 0)
    return softmax_with_sinks(scores, sinks), scaled_q, capped


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


def softmax_with_sinks(scores: Tensor, sinks_BG: Tensor | None) -> Tensor:
    """Compute the softmax over keys of ``(B, G, rows, keys)``; a sink is added as one more key, then dropped."""
    if sinks_BG is None:
        return torch.softmax(scores, -1)
    column = sinks_BG[:, :, None, None].expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
