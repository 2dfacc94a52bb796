"""Base weights with one adapter added to them, for decoding with that adapter alone.

Decoding computes few rows, so the many small products of an adapter take nearly as long as the base's. Where one
adapter has decoded alone for a while (a policy that is sampled), its pairs are added to a packed copy of the weights
once, and its steps then cost what the base's do. Only in float32, where the sum is exact to rounding, and not of a
quantised base, of which this would be a dense copy; only one adapter at a time, within a limit of memory; with
anything else in the batch the pairs are applied as always.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lorimer.engine.adapters.adapters import FrozenAdapter
from lorimer.engine.adapters.lora import LoraTarget
from lorimer.engine.model.base_model import BaseModel
from lorimer.engine.model.linear import FrozenLinear, FrozenMatrix, pack
from lorimer.engine.training.batch import AdapterSlice, MergedMatrices

PATIENCE = 16
"""Steps an adapter decodes alone before it is merged: about what merging costs, so at worst the cost doubles."""


class MergedAdapter:
    """The adapter that is currently merged, if any."""

    def __init__(self, model: BaseModel, limit_bytes: int) -> None:
        is_exact = model.device.dtype == torch.float32 and model.quantize == "none" and model.head.is_packed
        self._parts = _parts(model) if is_exact else []
        self.memory_bytes = sum(4 * weight.numel() for _, weights, _ in self._parts for weight in weights)
        self.is_possible = (
            is_exact and self.memory_bytes <= limit_bytes and not any(t.num_experts for t in model.targets)
        )
        self._weights = ""
        self._num_steps = 0
        self._matrices: MergedMatrices | None = None

    def apply(self, weights: str, adapter: FrozenAdapter, slices: list[AdapterSlice]) -> list[AdapterSlice]:
        """Return the slices of a decoding pass that belongs to one adapter, with its merged matrices if it has them."""
        if not self.is_possible:
            return slices
        if weights != self._weights:
            self._weights, self._num_steps, self._matrices = weights, 0, None
        self._num_steps += 1
        if self._num_steps > PATIENCE:
            if self._matrices is None:
                self._matrices = self._merge(adapter)
            (only,) = slices
            return [replace(only, merged=self._matrices)]
        return slices

    def _merge(self, adapter: FrozenAdapter) -> MergedMatrices:
        merged = {}
        for matrix, weights, targets in self._parts:
            pairs = [(target, adapter.weights[target.name]) for target in targets if target.name in adapter.weights]
            if pairs:
                dense = torch.cat(weights)
                for target, (a, b, *_) in pairs:
                    rows = dense[target.rows].addmm_(b, a, alpha=adapter.scale)
                    if adapter.row_scales is not None:
                        rows.mul_(adapter.row_scales.of(target.name).factors_O[:, None])
                merged[id(matrix)] = pack(dense)
        return merged


Part = tuple[FrozenMatrix, list[Tensor], list[LoraTarget]]


def _parts(model: BaseModel) -> list[Part]:
    """Return every matrix that decoding multiplies with, its weights and the targets on its rows."""
    parts: dict[int, Part] = {id(model.head): (model.head, [model.head.weight], [model.head_target])}
    for layer in model.decoder.modules():
        if isinstance(layer, FrozenLinear):
            siblings = layer.siblings
            if siblings is None:
                parts[id(layer.matrix)] = layer.matrix, [layer.matrix.weight], layer.targets
            else:
                weights = [member.matrix.weight for member in siblings.layers]
                parts[id(siblings.matrix)] = siblings.matrix, weights, siblings.targets
    return list(parts.values())
