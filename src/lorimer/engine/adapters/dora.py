"""DoRA: the norm of each row of an adapted weight is trained apart from its direction, as PEFT defines it.

With a magnitude m for each row, a layer computes ``m / norm(W + s B A) * (W x + s B A x) + bias``, and the norm counts
as a constant in the gradient. It is computed when a pass first needs it after the weights of an adapter have changed:
where ranks share the base, a weight is whole only within a pass. ``model/linear.py`` applies the result.

Shape letters: R rank, I input features, O output features.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lorimer.engine.adapters.lora import LoraTarget

_CHUNK = 1 << 22
"""Weights that are dense, or in a wider dtype, together."""
_CONDITION = 16.0
"""A sum that is smaller than its terms by more than this has lost digits, and is computed from the row itself."""


class BaseWeight(Protocol):
    """A frozen weight, of which rows can be read."""

    def dense_rows(self, rows: slice | Tensor) -> Tensor: ...


@dataclass
class BaseRows:
    """The rows of a frozen weight that a target adapts."""

    weight: BaseWeight
    first: int
    stop: int
    in_features: int
    _squares_O: Tensor | None = field(default=None, repr=False)

    @classmethod
    def of(cls, weight: BaseWeight, target: LoraTarget) -> "BaseRows":
        return cls(weight, target.row_offset, target.row_offset + target.out_features, target.in_features)

    @property
    def squares_O(self) -> Tensor:
        """The squared norms of the rows, in the widest dtype of the device; computed once."""
        if self._squares_O is None:
            self._squares_O = torch.cat([_widen(part_OI).square_().sum(1) for part_OI in self._parts()])
        return self._squares_O

    def keep_squares(self, device: torch.device) -> None:
        """Compute the squared norms while the weight is whole, and keep them on the device that it will be on."""
        self._squares_O = _widen(self.squares_O.to(device))

    def norms(self, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
        """Return the float32 norms ``(O,)`` of the rows of the weight plus ``scale * B @ A``.

        norm(w + s b A)^2 = norm(w)^2 + 2 s b . (A w) + s^2 b (A A^T) b^T, so it costs no more than R tokens. The
        products with the weight are float32, their sum is wider.
        """
        inner_OR = _widen(torch.cat([part_OI.float() @ a_RI.t() for part_OI in self._parts()]))
        a_RI, b_OR = _widen(a_RI), _widen(b_OR)
        own_OR = scale**2 * (b_OR @ (a_RI @ a_RI.t()))
        squares_O = self.squares_O + (b_OR * (own_OR + 2 * scale * inner_OR)).sum(1)
        terms_O = self.squares_O + (b_OR * own_OR).sum(1)
        doubtful = (_CONDITION * squares_O < terms_O).nonzero()[:, 0]
        if len(doubtful):
            for part in doubtful.split(max(1, _CHUNK // self.in_features)):
                rows_OI = _widen(self.weight.dense_rows(part + self.first))
                squares_O[part] = rows_OI.addmm_(b_OR[part], a_RI, alpha=scale).square_().sum(1)
        return squares_O.sqrt_().float()

    def _parts(self) -> Iterator[Tensor]:
        step = max(1, _CHUNK // self.in_features)
        for start in range(self.first, self.stop, step):
            yield self.weight.dense_rows(slice(start, min(start + step, self.stop)))


def _widen(tensor: Tensor) -> Tensor:
    """Return a copy in float64, or in float32 on Apple's GPUs, which have nothing wider."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64, copy=True)


@dataclass(frozen=True)
class RowScale:
    """What a target's rows are multiplied with, for the weights that an adapter has now."""

    factors_O: Tensor
    """Magnitudes over norms."""
    inverses_O: Tensor
    """One over the norms; like the factor zero for a row of zeros, which has no direction and stays zero."""


class RowScales:
    """The row scales of an adapter, by the name of the target; each is computed when it is first needed."""

    def __init__(self, base: Mapping[str, BaseRows], weights: Mapping[str, tuple[Tensor, ...]], scale: float) -> None:
        self._base, self._weights, self._scale = base, weights, scale
        self._found: dict[str, RowScale] = {}

    @torch.no_grad()
    def of(self, name: str) -> RowScale:
        if name not in self._found:
            a_RI, b_OR, magnitudes_O = self._weights[name]
            norms_O = self._base[name].norms(a_RI, b_OR, self._scale)
            is_zero = norms_O == 0
            self._found[name] = RowScale(
                torch.where(is_zero, 0.0, magnitudes_O / norms_O), torch.where(is_zero, 0.0, 1 / norms_O)
            )
        return self._found[name]


@torch.no_grad()
def initial_magnitudes(base: Mapping[str, BaseRows], names: Iterable[str]) -> dict[str, Tensor]:
    """Return the norms of the base's own rows: with a B of zeros every factor is then exactly one."""
    return {name: base[name].squares_O.sqrt().float() for name in names}
