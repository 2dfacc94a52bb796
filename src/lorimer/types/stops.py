"""Finds stop strings in text that comes piece by piece, in constant time a character however many and long they are.

An Aho-Corasick automaton whose states are made when a text first reaches them, so that strings that never begin cost
nothing. The engine ends sequences with it, the compatible APIs cut texts.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class StopState:
    """What the end of a text has in common with the beginnings of stop strings."""

    __slots__ = ("_children", "_fallback", "_high", "_low", "depth", "found")

    def __init__(self, low: int, high: int, depth: int) -> None:
        self.depth = depth
        """How many characters at the end of the text may begin a stop string."""
        self.found: str | None = None
        """The longest stop string that the text ends with."""
        self._low, self._high = low, high
        """Which of the sorted strings begin with those characters."""
        self._children: dict[str, StopState] = {}
        self._fallback: StopState = self
        """The same for a shorter end of the text; the start has itself."""


class StopMatcher:
    """The stop strings of one request; states of different texts have nothing to do with one another."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops) - {""})
        self._firsts = {stop[0] for stop in self._stops}
        self.start = StopState(0, len(self._stops), 0)

    def step(self, state: StopState, char: str) -> StopState:
        """The state of a text after one more character."""
        while state is not self.start:
            child = state._children.get(char) or self._reach(state, char)
            if child is not None:
                return child
            state = state._fallback
        if char not in self._firsts:
            return state
        return state._children.get(char) or self._reach(state, char) or state

    def _reach(self, state: StopState, char: str) -> StopState | None:
        """Make the state that ``char`` leads to, where strings go on with it, and those that it falls back to."""
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
