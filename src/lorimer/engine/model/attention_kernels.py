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
from lorimer.engine.model.device import describe_failure, upload

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
    refuses: Callable[[Shape, int, torch.dtype, torch.device], str]
    """Why it does not compute layers of a shape and head size in a dtype on a device; empty if it does."""
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


def _refuses_sdpa(shape: Shape, size: int, dtype: torch.dtype, device: torch.device) -> str:
    if device.type not in ("cuda", "mps"):
        return f"not taken on {device.type!r}"
    return "computes neither soft caps nor sinks" if shape.softcap is not None or shape.sinks is not None else ""


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


def _refuses_varlen(shape: Shape, size: int, dtype: torch.dtype, device: torch.device) -> str:
    if device.type != "cuda":
        return f"not taken on {device.type!r}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    return f"computes heads of up to 256, not {size}" if size > 256 else _refuses_sdpa(shape, size, dtype, device)


KERNELS = (
    Kernel(
        "varlen",
        attend_varlen,
        _refuses_varlen,
        lambda shape, groups: True,
    ),
    Kernel(
        "sdpa",
        attend_sdpa,
        _refuses_sdpa,
        lambda shape, groups: all(
            not group.past and (shape.window is None or group.length <= shape.window) for group in groups
        ),
    ),
)


# ── the choice ────────────────────────────────────────────────────────────────────────────────────────


Heads = tuple[int, int, int]
"""H, K and D of a layer."""


@dataclass(frozen=True)
class Choice:
    kernel: Kernel | None
    """The fastest kernel that equals the reference for a layer and is much faster; ``None``: the reference."""
    reasons: dict[str, str]
    """By kernel, how much faster it was, or why it does not compute the layer."""

    def __str__(self) -> str:
        others = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        return f"{self.kernel.name if self.kernel else 'blocks'} ({others})"


def choose(
    shape: Shape, heads: Heads, dtype: torch.dtype, device: torch.device, kernels: Sequence[Kernel] = KERNELS
) -> Choice:
    """Compare kernels with the reference on a layer's shape, and take the fastest."""
    reasons = {kernel.name: kernel.refuses(shape, heads[2], dtype, device) for kernel in kernels}
    kernels = [kernel for kernel in kernels if not reasons[kernel.name]]
    probes = [_Probe(shape, heads, dtype, device, pasts) for pasts in (_ALONE, _CONTINUED) if kernels]
    best, fastest = None, _MIN_SPEEDUP
    for kernel in kernels:
        reasons[kernel.name], speedup = _compare(kernel, probes)
        if speedup > fastest:
            best, fastest = kernel, speedup
    return Choice(best, reasons)


def _compare(kernel: Kernel, probes: Sequence["_Probe"]) -> tuple[str, float]:
    """Return what is to be said of a kernel, and how many times faster it is; 0 if it cannot be taken."""
    accepted = [probe for probe in probes if kernel.accepts_groups(probe.shape, probe.groups)]
    if not accepted:
        return "computes none of the probes", 0.0
    try:
        error = max(probe.error(kernel.attend) for probe in accepted)
        if not error <= _TOLERANCE[accepted[0].dtype]:
            return f"differs from blocks by {error:.1e} of the largest value", 0.0
        speedup = accepted[0].seconds(attend_blocks) / accepted[0].seconds(kernel.attend)
    except Exception as failure:  # whatever torch raises where it has no such kernel: the reference is there
        return describe_failure(failure), 0.0
    enough = "" if speedup > _MIN_SPEEDUP else f", must be {_MIN_SPEEDUP:g}"
    return f"{speedup:.1f} times as fast as blocks{enough}", speedup


class _Probe:
    """Queries, keys and values of a few sequences, and a gradient of the result."""

    def __init__(
        self, shape: Shape, heads: Heads, dtype: torch.dtype, device: torch.device, pasts: Sequence[Past]
    ) -> None:
        num_heads, num_kv, size = heads
        lengths = list(_PROBE_LENGTHS)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        self.shape, self.groups, self.dtype = shape, group_sequences(lengths, starts, device, pasts=pasts), dtype
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

    def error(self, attend: Attend) -> float:
        """Return the largest difference from the reference, as a part of the largest value; NaN if one is."""
        pairs = zip(self.run(attend), self.run(attend_blocks), strict=True)
        errors = [
            (found.float() - expected.float()).abs().max() / expected.float().abs().max() for found, expected in pairs
        ]
        return torch.stack(errors).max().item()

    def seconds(self, attend: Attend) -> float:
        """Return the best of several timings, each until the device has finished."""
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            self.run(attend)[-1].sum().item()
            best = min(best, time.perf_counter() - start)
        return best
