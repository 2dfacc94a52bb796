"""Low-rank products of many adapters as grouped matrix products: two calls for all slices instead of two for each.

A GPU spends more time on starting many small products than on computing them. The pairs of all adapters of a pass are
stacked, ranks padded with zeros, and multiplied with their slices by one grouped product. ``linear.py`` has those of
each slice, the reference: grouped ones are taken where they gave the same numbers in less time, never on a CPU.

Legend: G groups, T rows up to the end of the last slice, R the largest rank, I input features, O output features.
"""

import time
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lorimer.engine.adapters.adapters import Pairs
from lorimer.engine.adapters.lora import LoraTarget
from lorimer.engine.model.device import describe_failure, upload
from lorimer.engine.training.batch import AdapterSlice

_STEP = 8
"""Grouped products read rows in vectors of 16 bytes, so sizes are multiples of this."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
_PROBE_RANKS = (4, 8, 32, 8, 16, 64, 8, 32)


class GroupedSlices(list[AdapterSlice]):
    """The slices of a pass, in order, with what grouped products need; rows between slices are a group too."""

    def __init__(self, slices: Iterable[AdapterSlice], device: torch.device) -> None:
        super().__init__(slices)
        self.owners: list[AdapterSlice | None] = []
        ends: list[int] = []
        stop = 0
        for part in self:
            if part.start > stop:
                self.owners.append(None)
                ends.append(part.start)
            self.owners.append(part)
            ends.append(part.stop)
            stop = part.stop
        self.num_rows = stop
        (self.ends_G,) = upload([np.array(ends, np.int32)], device)

    def pairs(self, target: LoraTarget) -> list[tuple[int, AdapterSlice, Tensor, Tensor]]:
        """Return the groups that have a pair for the target: number, slice, A and B; DoRA runs stand alone."""
        found = []
        for number, part in enumerate(self.owners):
            if part is not None and part.row_scales is None and target.name in part.weights:
                a, b = part.weights[target.name]
                found.append((number, part, a, b))
        return found

    def stacks(self, target: LoraTarget, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return A ``(G, R, I)`` and B ``(G, O, R)`` times its scale, zero where a group has none; ``None`` for all."""
        pairs = self.pairs(target)
        if not pairs:
            return None
        like = pairs[0][2]
        rank = -(-max(len(a) for _, _, a, _ in pairs) // _STEP) * _STEP
        a_GRI = like.new_zeros(len(self.owners), rank, target.in_features, dtype=dtype)
        b_GOR = like.new_zeros(len(self.owners), target.out_features, rank, dtype=dtype)
        torch._foreach_copy_([a_GRI[i, : len(a)] for i, _, a, _ in pairs], [a for _, _, a, _ in pairs])
        scaled = torch._foreach_mul([b for *_, b in pairs], [part.scale for _, part, _, _ in pairs])
        torch._foreach_copy_([b_GOR[i, :, : b.shape[1]] for i, _, _, b in pairs], scaled)
        return a_GRI, b_GOR


def accepts(target: LoraTarget) -> bool:
    """Return whether the sizes of a target allow grouped products."""
    return target.in_features % _STEP == target.out_features % _STEP == 0


def multiply(x: Tensor, y: Tensor, target: LoraTarget, slices: GroupedSlices) -> Tensor | None:
    """Add the products of all slices to ``y``; return the inner products ``A @ x``, ``(T, R)``, if there are any."""
    stacks = slices.stacks(target, x.dtype)
    if stacks is None:
        return None
    a_GRI, b_GOR = stacks
    inner_TR = F.grouped_mm(x[: slices.num_rows], a_GRI.transpose(1, 2), offs=slices.ends_G)
    y[: slices.num_rows, target.rows] += F.grouped_mm(inner_TR, b_GOR.transpose(1, 2), offs=slices.ends_G)
    return inner_TR


def backpropagate(
    x: Tensor, d_y: Tensor, inner_TR: Tensor, target: LoraTarget, slices: GroupedSlices, d_x: Tensor | None
) -> None:
    """Add the adapters' part to ``d_x`` and their own gradients to the buffers of their slices."""
    stacks = slices.stacks(target, x.dtype)
    assert stacks is not None
    a_GRI, b_GOR = stacks
    x_TI, d_y_TO = x[: slices.num_rows], d_y[: slices.num_rows, target.rows].contiguous()
    d_inner_TR = F.grouped_mm(d_y_TO, b_GOR, offs=slices.ends_G)
    if d_x is not None:
        d_x[: slices.num_rows] += F.grouped_mm(d_inner_TR, a_GRI, offs=slices.ends_G)
    # Slice by slice: a grouped product of bfloat16 rounds its result, and gradients are summed in float32.
    x_TI, d_y_TO, inner_TR, d_inner_TR = (tensor.float() for tensor in (x_TI, d_y_TO, inner_TR, d_inner_TR))
    for _, part, a, _ in slices.pairs(target):
        if part.grads is not None:
            rows, (d_a, d_b) = slice(part.start, part.stop), part.grads[target.name]
            d_a.addmm_(d_inner_TR[rows, : len(a)].t(), x_TI[rows])
            d_b.addmm_(d_y_TO[rows].t(), inner_TR[rows, : len(a)], alpha=part.scale)


# ── the choice ────────────────────────────────────────────────────────────────────────────────────────

Products = Callable[[Tensor, LoraTarget, list[AdapterSlice]], None]
"""Adds the products of slices to a layer's output, and computes their gradients."""


def compare(device: torch.device, dtype: torch.dtype, size: int, alone: Products) -> tuple[bool, str]:
    """Return whether grouped products equal those of each slice, in less time, and what was measured."""
    target = LoraTarget("probe", "probe", "attn", size, size)
    x = torch.linspace(-1, 1, 512 * size, device=device).view(512, size).to(dtype)
    slices = probe_slices(target, len(x), device)
    try:
        expected, found = _gradients(alone, x, target, slices), _gradients(_run, x, target, slices)
        errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(found, expected, strict=True)]
        error = torch.stack(errors).max().item()
        if not error <= _TOLERANCE[dtype]:
            return False, f"grouped ones differ by {error:.1e} of the largest value"
        speedup = _seconds(alone, x, target, slices) / _seconds(_run, x, target, slices)
    except Exception as failure:  # whatever torch raises where it has no such product: the others are there
        return False, f"grouped ones fail: {describe_failure(failure)}"
    return speedup > 1, f"grouped ones are {speedup:.1f} times as fast"


def _run(x: Tensor, target: LoraTarget, slices: list[AdapterSlice]) -> None:
    grouped, y = GroupedSlices(slices, x.device), torch.zeros_like(x)
    inner_TR = multiply(x, y, target, grouped)
    assert inner_TR is not None
    backpropagate(x, y, inner_TR, target, grouped, torch.zeros_like(x))


def probe_slices(target: LoraTarget, num_rows: int, device: torch.device) -> list[AdapterSlice]:
    """Return slices of eight adapters of several ranks, with buffers for gradients."""
    generator, slices = torch.Generator().manual_seed(0), []
    for i, rank in enumerate(_PROBE_RANKS):
        pair = (
            torch.randn(rank, target.in_features, generator=generator).to(device),
            torch.randn(target.out_features, rank, generator=generator).to(device),
        )
        grads: Pairs = {target.name: (torch.zeros_like(pair[0]), torch.zeros_like(pair[1]))}
        start, stop = (i * num_rows // len(_PROBE_RANKS), (i + 1) * num_rows // len(_PROBE_RANKS))
        slices.append(AdapterSlice(start, stop, {target.name: pair}, 1 / rank, grads))
    return slices


def _gradients(run: Products, x: Tensor, target: LoraTarget, slices: list[AdapterSlice]) -> list[Tensor]:
    """Return the gradients that ``run`` adds to the buffers, and clear these."""
    buffers = [gradient for part in slices for gradient in _grads(part)[target.name]]
    run(x, target, slices)
    found = [buffer.clone() for buffer in buffers]
    torch._foreach_zero_(buffers)
    return found


def _grads(part: AdapterSlice) -> Pairs:
    assert part.grads is not None
    return part.grads


def _seconds(run: Products, x: Tensor, target: LoraTarget, slices: list[AdapterSlice]) -> float:
    """Return the best of several timings, each until the device has finished."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        run(x, target, slices)
        _grads(slices[-1])[target.name][0].sum().item()
        best = min(best, time.perf_counter() - start)
    return best
