"""Packing: sequences of any operations and runs on one token axis, and what the layers need to know about it.

A ``Pass`` describes one forward pass. Tokens are ordered by adapter, so that each adapter owns one slice of the
axis and its low-rank products are plain matrix products on that slice. Within an adapter's slice, sequences with a
common prefix have it once (``prefixes.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from lorimer.engine.adapters.adapters import Pairs
from lorimer.engine.adapters.dora import RowScales
from lorimer.engine.model.attention import Groups, Shape
from lorimer.engine.training.prefixes import Forest


class CachedAttention(Protocol):
    """Stores the keys and values of a sampling pass, and attends to them."""

    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, shape: Shape) -> Tensor: ...


@dataclass(frozen=True)
class AdapterSlice:
    """Tokens ``start:stop`` belong to this adapter; gradients, where wanted, are added to ``grads``."""

    start: int
    stop: int
    weights: Pairs
    scale: float
    grads: Pairs | None = None
    row_scales: RowScales | None = None
    """What the rows of the adapted weights are multiplied with, in DoRA."""


@dataclass
class Pass:
    """One forward pass over T tokens."""

    slices: list[AdapterSlice]
    groups: Groups = field(default_factory=lambda: Groups((), (), (), None, None))
    """Sequences to attend within (training)."""
    cache: CachedAttention | None = None
    """Keys and values to attend to (sampling); ``groups`` is then unused."""
    is_checkpointed: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    expert_counts: dict[int, Tensor] = field(default_factory=dict)
    """Tokens per expert of each MoE layer, when ``count_experts`` is set; a layer computed again counts once."""
    count_experts: bool = False
    num_sequences_T: Tensor | None = None
    """Of how many sequences each token is a part, if that is not always one; experts count it as so many."""
    trains_base: bool = False
    """Train the weights of the model itself: layers add their gradients to ``weight.grad`` where that is a buffer."""

    @property
    def is_trained(self) -> bool:
        """Whether anything of the pass can have a gradient."""
        return self.trains_base or bool(self.slices)


class PassSlot:
    """Holds the current pass; layers keep a reference to the slot of their model."""

    def __init__(self, trains_base: bool = False) -> None:
        self.current = Pass([])
        self.trains_base = trains_base
        """Whether the weights of the model change, so that nothing may keep a copy of them."""


def cut_by_budget(forest: Forest, trees: Sequence[list[int]], budget: int) -> list[list[int]]:
    """Divide trees, in order, into parts of at most ``budget`` tokens, each token of a shared prefix counted once.

    A tree is divided only if it does not fit into one part, because its prefixes are then computed once for each part.
    A sequence that is longer than the budget stands alone, or with others of its tree.
    """
    parts: list[list[int]] = []
    room = 0
    for tree in trees:
        for piece in forest.split(tree, budget):
            size = forest.size(piece)
            if not parts or size > room:
                parts.append([])
                room = budget
            parts[-1] += piece
            room -= size
    return parts


def deal(lengths: Sequence[int], loads: list[int]) -> list[list[int]]:
    """Deal parts to ranks, the longest first, each to the rank with the fewest tokens; ``loads`` counts these."""
    hands: list[list[int]] = [[] for _ in loads]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = loads.index(min(loads))
        hands[rank].append(i)
        loads[rank] += lengths[i]
    return hands
