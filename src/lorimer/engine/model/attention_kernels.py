"""Kernels of torch for packed attention, and the choice between them and the block implementation at start.

``attention.py`` has the reference, which computes every model on every device. A kernel computes some shapes: a layer
gets it if it gave the same values and gradients on a probe in much less time. A CPU keeps the reference: kernels of
torch take 0.7 to 1.1 of its time there, and a choice that differs between starts would give a replayed run other bits.

Legend: T tokens of the pass, H query heads, K key/value heads, N sequences, L their length, D head size.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from lorimer.engine.model.attention import AttentionGroup, Groups, Past, Shape, attend_blocks, group_sequences
from lorimer.engine.model.device import upload

Attend = Callable[[Tensor, Tensor, Tensor, Groups, Shape], Tensor]
"""Maps q ``(H, T, D)``, k and v ``(K, T, D)`` to ``(T, H, D)``, with a gradient."""

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
_MIN_SPEEDUP = 1.5
"""How many times faster than the reference a kernel must be: every start must choose the same."""
_PROBE_LENGTHS = (301, 64, 60, 17, 1, 128, 40, 33)
_ALONE: tuple[Past, ...] = ((),) * len(_PROBE_LENGTHS)
_CONTINUED: tuple[Past, ...] = (*_ALONE[:-2], (slice(0, 301),), (slice(0, 301), slice(301, 365)))


@dataclass(frozen=True)
class Kernel:
    name: str
    attend: Attend
    accepts: Callable[[Shape, int, torch.dtype, torch.device], bool]
    """Whether it computes layers of a shape and head size in a dtype on a device."""
    accepts_groups: Callable[[Shape, Groups], bool]
    """Whether it computes the sequences of a pass; the reference computes the others."""


# ── scaled_dot_product_attention ──────────────────────────────────────────────────────────────────────


def attend_sdpa(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, groups: Groups, shape: Shape) -> Tensor:
    """Compute each group of sequences by one call of torch, which chooses flash attention where it can."""
    out_THD = q_HTD.new_empty(q_HTD.shape[1], q_HTD.shape[0], v_KTD.shape[2])
    for group in groups:
        q, k, v = (_rows(group, x) for x in (q_HTD, k_KTD, v_KTD))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=shape.scale, enable_gqa=True)
        rows = found.transpose(1, 2).flatten(0, 1)
        if group.index is None:
            out_THD[group.start : group.start + group.length] = rows
        elif group.kept is None:
            out_THD[group.index.flatten()] = rows
        else:
            out_THD[group.index.flatten()[group.kept]] = rows[group.kept]
    return out_THD


def _rows(group: AttentionGroup, x_HTD: Tensor) -> Tensor:
    """Gather the tokens of a group as ``(N, heads, L, D)``."""
    if group.index is None:
        return x_HTD[:, group.start : group.start + group.length].unsqueeze(0)
    rows = x_HTD.transpose(0, 1)[group.index.flatten()]
    return rows.view(group.num_sequences, group.length, *rows.shape[1:]).transpose(1, 2)


def _is_plain(shape: Shape) -> bool:
    return shape.softcap is None and shape.sinks is None


# ── varlen ────────────────────────────────────────────────────────────────────────────────────────────


def attend_varlen(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, groups: Groups, shape: Shape) -> Tensor:
    """Compute all sequences by one call of flash attention, which takes where each begins on the token axis."""
    plan = _Varlen.of(groups)
    q_THD, k_TKD, v_TKD = (x.transpose(0, 1) for x in (q_HTD, k_KTD, v_KTD))
    if plan.keys is not None:
        k_TKD, v_TKD = k_TKD[plan.keys], v_TKD[plan.keys]
    is_windowed = shape.window is not None and shape.window < plan.max_keys
    found = varlen_attn(
        q_THD,
        k_TKD,
        v_TKD,
        plan.query_ends,
        plan.key_ends,
        plan.max_queries,
        plan.max_keys,
        scale=shape.scale,
        # Keys before and after a query; the last query of a sequence sees its last key.
        window_size=(shape.window - 1, 0) if is_windowed and shape.window is not None else (-1, 0),
        enable_gqa=True,
    )
    assert isinstance(found, Tensor)
    return found


@dataclass(frozen=True)
class _Varlen:
    """Where sequences begin and end, in the order of the token axis, which they cover."""

    query_ends: Tensor
    """``int32 (N + 1,)``, from 0."""
    key_ends: Tensor
    max_queries: int
    max_keys: int
    keys: Tensor | None
    """The tokens whose keys each sequence sees, one sequence after the other; ``None``: its own."""

    @classmethod
    def of(cls, groups: Groups) -> "_Varlen":
        """Return the plan of a pass; its layers share it."""
        found: _Varlen | None = getattr(groups, "varlen", None)
        if found is None:
            found = groups.varlen = cls._make(groups)  # type: ignore[attr-defined]
        return found

    @classmethod
    def _make(cls, groups: Groups) -> "_Varlen":
        order = sorted(range(len(groups.starts)), key=lambda i: groups.starts[i])
        pieces = [[*groups.pasts[i], slice(groups.starts[i], groups.starts[i] + groups.lengths[i])] for i in order]
        lengths = [groups.lengths[i] for i in order]
        num_keys = [sum(piece.stop - piece.start for piece in parts) for parts in pieces]
        arrays: list[NDArray[Any]] = [np.cumsum([0, *sizes], dtype=np.int32) for sizes in (lengths, num_keys)]
        if num_keys != lengths:
            arrays.append(np.concatenate([np.arange(part.start, part.stop) for parts in pieces for part in parts]))
        query_ends, key_ends, *keys = upload(arrays, groups.device)
        return cls(query_ends, key_ends, max(lengths), max(num_keys), keys[0] if keys else None)


KERNELS = (
    Kernel(
        "varlen",
        attend_varlen,
        lambda shape, size, dtype, device: (
            _is_plain(shape) and device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and size <= 256
        ),
        lambda shape, groups: True,
    ),
    Kernel(
        "sdpa",
        attend_sdpa,
        lambda shape, size, dtype, device: _is_plain(shape) and device.type in ("cuda", "mps"),
        lambda shape, groups: all(
            not group.past and (shape.window is None or group.length <= shape.window) for group in groups
        ),
    ),
)


# ── the choice ────────────────────────────────────────────────────────────────────────────────────────


Heads = tuple[int, int, int]
"""H, K and D of a layer."""


def choose(
    shape: Shape, heads: Heads, dtype: torch.dtype, device: torch.device, kernels: Sequence[Kernel] = KERNELS
) -> Kernel | None:
    """Return the fastest kernel that equals the reference for a layer and is much faster, or ``None``."""
    kernels = [kernel for kernel in kernels if kernel.accepts(shape, heads[2], dtype, device)]
    probes = [_Probe(shape, heads, dtype, device, pasts) for pasts in (_ALONE, _CONTINUED) if kernels]
    best, fastest = None, float("inf")
    for kernel in kernels:
        if _is_equal(kernel, probes):
            probe = next(probe for probe in probes if kernel.accepts_groups(shape, probe.groups))
            share = probe.seconds(kernel.attend) / probe.seconds(attend_blocks)
            if share < min(fastest, 1 / _MIN_SPEEDUP):
                best, fastest = kernel, share
    return best


def _is_equal(kernel: Kernel, probes: Sequence["_Probe"]) -> bool:
    """Return whether the kernel equals the reference on every probe that it accepts, and accepts one."""
    accepted = [probe for probe in probes if kernel.accepts_groups(probe.shape, probe.groups)]
    try:
        return bool(accepted) and all(
            _is_close(found, expected)
            for probe in accepted
            for found, expected in zip(probe.run(kernel.attend), probe.run(attend_blocks), strict=True)
        )
    except (NotImplementedError, RuntimeError, ValueError):
        return False  # torch has no such kernel for this device or these sizes


class _Probe:
    """Queries, keys and values of a few sequences, and a gradient of the result."""

    def __init__(
        self, shape: Shape, heads: Heads, dtype: torch.dtype, device: torch.device, pasts: Sequence[Past]
    ) -> None:
        num_heads, num_kv, size = heads
        lengths = list(_PROBE_LENGTHS)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        self.shape, self.groups = shape, group_sequences(lengths, starts, device, pasts=pasts)
        generator = torch.Generator().manual_seed(0)
        q, k, v, self._d_out = (
            torch.randn(sum(lengths), count, size, generator=generator).to(device, dtype)
            for count in (num_heads, num_kv, num_kv, num_heads)
        )
        self._inputs = [x.transpose(0, 1).requires_grad_() for x in (q, k, v)]

    def run(self, attend: Attend) -> list[Tensor]:
        """Return the values and the gradients of queries, keys and values."""
        q, k, v = self._inputs
        with torch.enable_grad():
            out_THD = attend(q, k, v, self.groups, self.shape)
            return [out_THD.detach(), *torch.autograd.grad(out_THD, self._inputs, self._d_out)]

    def seconds(self, attend: Attend) -> float:
        """Return the best of several timings, each until the device has finished."""
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            self.run(attend)[-1].sum().item()
            best = min(best, time.perf_counter() - start)
        return best


def _is_close(found: Tensor, expected: Tensor) -> bool:
    difference = (found.float() - expected.float()).abs().max()
    return bool(difference <= _TOLERANCE[expected.dtype] * expected.float().abs().max())
