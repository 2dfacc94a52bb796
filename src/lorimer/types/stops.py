"""Finds stop strings in streamed text in constant time per character, however many and long the strings are.

An Aho-Corasick automaton whose states are created when a text first reaches them, so strings that never start cost
nothing. The engine uses it to end sequences, the compatible APIs to cut texts.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class StopState:
    """A state of the automaton: the longest suffix of the text that is a prefix of a stop string."""

    __slots__ = ("_children", "_fallback", "_high", "_low", "depth", "found")

    def __init__(self, low: int, high: int, depth: int) -> None:
        self.depth = depth
        """The length of that suffix."""
        self.found: str | None = None
        """The longest stop string that the text ends with."""
        self._low, self._high = low, high
        """The range of the sorted strings that begin with that suffix."""
        self._children: dict[str, StopState] = {}
        self._fallback: StopState = self
        """The state of the next shorter suffix; the start state refers to itself."""


class StopMatcher:
    """The stop strings of one request. Each text has its own state."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops) - {""})
        self._firsts = {stop[0] for stop in self._stops}
        self.start = StopState(0, len(self._stops), 0)

    def step(self, state: StopState, char: str) -> StopState:
        """Return the state of a text after one more character."""
        while state is not self.start:
            child = state._children.get(char) or self._reach(state, char)
            if child is not None:
                return child
            state = state._fallback
        if char not in self._firsts:
            return state
        return state._children.get(char) or self._reach(state, char) or state

    def _reach(self, state: StopState, char: str) -> StopState | None:
        """Create the state that ``char`` leads to, if a string continues with it, and its fallback states."""
        made: list[StopState] = []
        last = self.start
        while True:
            child = state._children.get(char)
            if child is not None:
                last = child
                break
            child = self._make(state, char)
            if child is not None:
                made.append(child)
                state._children[char] = child
            elif not made:
                return None
            if state is self.start:
                break
            state = state._fallback
        for child in reversed(made):
            child._fallback = last
            whole = self._stops[child._low]
            child.found = whole if len(whole) == child.depth else last.found
            last = child
        return last

    def _make(self, state: StopState, char: str) -> StopState | None:
        depth = state.depth

        def char_at(stop: str) -> str:
            return stop[depth : depth + 1]

        low = bisect_left(self._stops, char, state._low, state._high, key=char_at)
        if low == state._high or char_at(self._stops[low]) != char:
            return None
        high = bisect_right(self._stops, char, low, state._high, key=char_at)
        return StopState(low, high, depth + 1)
