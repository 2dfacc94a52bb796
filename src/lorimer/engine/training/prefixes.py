"""Common beginnings of sequences, which a pass computes once.

Sequences of one run that begin with the same tokens (and images) form a trie: a ``Forest`` cuts each sequence into
segments, and a segment that several sequences have stands once on the token axis of a pass. Its tokens see those of the
segments before it on its path and themselves, at the positions that they have in each sequence alone. Everything here
happens on the host. ``batch.py`` cuts a forest into passes; ``model/attention.py`` attends along the paths.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

MIN_SHARED = 16
"""Shorter common pieces are computed for each sequence: one more attention group takes as long as a few tokens."""

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Segment:
    """Tokens ``position : position + length`` of every sequence that has this segment on its path."""

    position: int
    length: int


@dataclass(frozen=True)
class Node:
    """A piece of the token axis of a pass: tokens ``start:stop``, which are at ``position`` of their sequences."""

    start: int
    stop: int
    position: int
    past: tuple[slice, ...]
    """Pieces of the axis with the tokens before it, from position 0."""
    sequence: int
    """A sequence that has these tokens: the first in the order of the pass."""
    num_sequences: int
    """Sequences of the pass that have them."""


@dataclass(frozen=True)
class Layout:
    """The token axis of a pass."""

    nodes: list[Node]
    """In the order of the axis, a node before those that follow it in a sequence."""
    pieces: dict[int, list[slice]]
    """The tokens of each sequence, from its first to its last, on the axis."""

    @property
    def num_tokens(self) -> int:
        return self.nodes[-1].stop

    def rows(self, sequence: int) -> Tokens:
        """Return where the tokens of a sequence are on the axis."""
        return np.concatenate([np.arange(piece.start, piece.stop) for piece in self.pieces[sequence]])


@dataclass
class Forest:
    """Sequences, numbered in the order they were added, as paths of segments."""

    min_shared: int = MIN_SHARED
    segments: list[Segment] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    """The segments of each sequence."""
    trees: list[list[int]] = field(default_factory=list)
    """Sequences with a common beginning, depth first; a sequence that shares nothing is a tree by itself."""

    def add(self, sequences: Sequence[Tokens]) -> None:
        """Add the sequences of one run; they share nothing with those of other runs.

        Equal numbers mean equal inputs of the model, images included.
        """
        first = len(self.paths)
        self.paths += [[] for _ in sequences]
        names = [tokens.tobytes() for tokens in sequences]
        # Any order of the bytes puts sequences with a common beginning side by side, a prefix before what continues it.
        order = sorted(range(len(sequences)), key=lambda i: (names[i], i))
        common = [0, *(_common_length(sequences[a], sequences[b]) for a, b in pairwise(order))]
        lengths = [len(sequences[i]) for i in order]
        self._divide([first + i for i in order], lengths, common)
        trees: dict[int, list[int]] = {}
        for i in order:
            trees.setdefault(self.paths[first + i][0], []).append(first + i)
        self.trees += sorted(trees.values(), key=min)

    def _divide(self, names: list[int], lengths: list[int], common: list[int]) -> None:
        """Divide sorted sequences into segments; ``common[i]`` is what sequence i shares with the one before."""
        ranges = [(0, len(names), 0)]
        while ranges:
            low, high, position = ranges.pop()
            shared = min(common[low + 1 : high], default=lengths[low])
            if high - low == 1 or shared - position >= self.min_shared:
                self._append(names[low:high], position, shared - position)
                position = shared
                if high - low == 1:
                    continue
                while low < high and lengths[low] == shared:
                    low += 1  # ends here
            borders = [low, *(i for i in range(low + 1, high) if common[i] == shared), high]
            ranges += [(a, b, position) for a, b in pairwise(borders) if a < b]

    def _append(self, sequences: list[int], position: int, length: int) -> None:
        self.segments.append(Segment(position, length))
        for sequence in sequences:
            self.paths[sequence].append(len(self.segments) - 1)

    def size(self, sequences: Iterable[int]) -> int:
        """Return the tokens that these sequences have on the axis of one pass."""
        return sum(self.segments[i].length for i in {i for sequence in sequences for i in self.paths[sequence]})

    def split(self, tree: list[int], limit: int) -> list[list[int]]:
        """Split a tree, in order, into parts of at most ``limit`` tokens.

        A sequence that is longer takes along as many tokens of others as ``limit`` allows: computing a long prefix once
        matters more than a pass of equal size.
        """
        parts: list[list[int]] = []
        used: set[int] = set()
        room = 0
        for sequence in tree:
            new = sum(self.segments[i].length for i in self.paths[sequence] if i not in used)
            if not parts or new > room:
                parts.append([])
                used.clear()
                new = sum(self.segments[i].length for i in self.paths[sequence])
                room = limit if new <= limit else new + limit
            parts[-1].append(sequence)
            used.update(self.paths[sequence])
            room -= new
        return parts

    def lay_out(self, sequences: Sequence[int]) -> Layout:
        """Place the segments of the sequences on the axis of a pass, in that order."""
        counts = Counter(i for sequence in sequences for i in self.paths[sequence])
        nodes: list[Node] = []
        pieces: dict[int, list[slice]] = {}
        placed: dict[int, slice] = {}
        stop = 0
        for sequence in sequences:
            own: list[slice] = []
            # Neighbours on a path that equally many sequences have belong to the same sequences: they are one node.
            for count, members in groupby(self.paths[sequence], key=counts.__getitem__):
                chain = list(members)
                if chain[0] not in placed:
                    start, stop = stop, stop + sum(self.segments[i].length for i in chain)
                    placed[chain[0]] = slice(start, stop)
                    nodes.append(Node(start, stop, self.segments[chain[0]].position, tuple(own), sequence, count))
                own.append(placed[chain[0]])
            pieces[sequence] = own
        return Layout(nodes, pieces)


def _common_length(a: Tokens, b: Tokens) -> int:
    length = min(len(a), len(b))
    if length == 0 or a[0] != b[0]:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length
