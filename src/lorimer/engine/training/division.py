"""How the weights of a full run, and what its optimiser keeps, are divided between the ranks of an engine.

A rank has its rows of every weight and gradient, and of the tensors that an optimiser keeps in the shape of a weight.
An update that needs a whole weight (orthogonalisation, statistics of rows and columns, blocks of 8-bit numbers) is
computed by one rank, the weight's owner, which alone keeps what the optimiser has for it. Files hold whole tensors, so
that they do not depend on the number of ranks. With one process every part is the whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lorimer.engine.sharding import Shards
from lorimer.engine.training.optimizers import OPTIMIZERS, Optimizer, State


@dataclass(frozen=True)
class Division:
    """The parts of one run, from the place of one rank."""

    shards: Shards
    optimizer: Optimizer
    shapes: Mapping[str, torch.Size]
    """The shape of each trained weight as a whole."""
    groups: Mapping[str, frozenset[str]]

    @classmethod
    def of(
        cls, shards: Shards, optimizer: str, shapes: Mapping[str, torch.Size], groups: Mapping[str, frozenset[str]]
    ) -> "Division":
        return cls(shards, OPTIMIZERS[optimizer], shapes, groups)

    @property
    def num_parameters(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())

    @cached_property
    def owners(self) -> dict[str, int]:
        """The owners of the weights that have one; the largest weights are dealt first, to the rank with the least."""
        if self.shards.is_alone:
            return {}
        loads = [0] * self.shards.size
        found: dict[str, int] = {}
        for name in sorted(self.shapes, key=lambda name: -self.shapes[name].numel()):
            if self.optimizer.needs_whole(torch.empty(self.shapes[name], device="meta"), self.groups[name]):
                found[name] = loads.index(min(loads))
                loads[found[name]] += self.shapes[name].numel()
        return found

    def describe(self, kind: str, name: str) -> Tensor:
        """Return the shape and dtype of a whole tensor: a weight, its gradient, or what the optimiser keeps."""
        weight = torch.empty(self.shapes[name], device="meta")
        return self.optimizer.create_state(weight, self.groups[name]).get(kind, weight)

    def create_state(self, name: str, part: Tensor) -> dict[str, Tensor]:
        """Return what this rank keeps for a weight, of which it has ``part``, before its first step."""
        if name not in self.owners:
            return self.optimizer.create_state(part, self.groups[name])
        if self.owners[name] == self.shards.rank:
            return self.optimizer.create_state(part.new_empty(self.shapes[name]), self.groups[name])
        whole = self.optimizer.create_state(torch.empty(self.shapes[name], device="meta"), self.groups[name])
        return {kind: torch.empty_like(one[:0], device=part.device) for kind, one in whole.items()}

    def cut(self, kind: str, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor."""
        if self.shards.is_alone or kind in self.optimizer.shared:
            return whole
        if name in self.owners and kind not in ("weight", "grad"):
            return whole if self.owners[name] == self.shards.rank else whole[:0]
        return whole[self.shards.rows(len(whole))]

    def collect(self, kind: str, name: str, part: Tensor) -> Tensor | None:
        """Return the whole tensor at rank 0, ``None`` at the others; all ranks do so together."""
        shards = self.shards
        if shards.is_alone or kind in self.optimizer.shared:
            return None if shards.rank else part
        if name not in self.owners or kind in ("weight", "grad"):
            return shards.gather_rows(part, self.shapes[name][0], to=0)
        if (owner := self.owners[name]) and shards.rank == 0:
            part = torch.empty_like(self.describe(kind, name), device=part.device)
        if owner and shards.rank in (0, owner):
            shards.send_to_first(part, owner)
        return None if shards.rank else part

    def counted(self, state: State) -> State:
        """Return what counts as this rank's part of an optimiser's state: what all have is that of rank 0."""
        return {kind: one for kind, one in state.items() if self.shards.rank == 0 or kind not in self.optimizer.shared}
