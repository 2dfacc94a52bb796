"""The order of one run: operations arrive in any order and become ready in the order of their seq_ids."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lorimer.scheduler.runs import Operation


@dataclass
class Gap:
    """A missing seq_id that a run waits for. It outlives the lane, which is rebuilt when the run is loaded again."""

    seq_id: int | None = None
    since: float = 0.0
    is_timed: bool = False
    """A timer runs until it is abandoned."""

    def watch(self, missing: int, now: float) -> None:
        """Wait for a seq_id, from now on unless it was waited for before."""
        if self.seq_id != missing:
            self.seq_id, self.since = missing, now
        self.is_timed = True

    def end(self) -> int | None:
        """Stop waiting for the missing seq_id and return it."""
        missing, self.seq_id, self.is_timed = self.seq_id, None, False
        return missing


class Lane:
    """The operations of one run: they arrive in any order and become ``queued`` in the order of their seq_ids.

    A missing seq_id holds back those after it until it arrives, is refused, or is abandoned.
    """

    def __init__(self, next_seq: int = 1) -> None:
        self.next_seq = next_seq
        """The lowest seq_id that has not arrived."""
        self.ready: deque[Operation] = deque()
        """In order, with no missing seq_id before them."""
        self.waiting: dict[int, Operation] = {}
        """By seq_id, those behind a missing one."""
        self._skipped: dict[int, int] = {}
        """Consumed seq_ids behind a missing one: first and last of each range."""

    def add(self, operation: "Operation") -> None:
        """Add an operation whose seq_id has neither arrived nor been consumed."""
        if self.has_passed(operation.seq_id):
            raise ValueError(f"operation {operation.seq_id} has already arrived")
        self.waiting[operation.seq_id] = operation
        self._release()

    def skip(self, first: int, last: int | None = None) -> None:
        """Consume seq_ids that have no operation."""
        last = first if last is None else last
        if last >= self.next_seq and first not in self.waiting:
            start = max(first, self.next_seq)
            self._skipped[start] = max(last, self._skipped.get(start, last))
            self._release()

    def has_passed(self, seq_id: int) -> bool:
        if seq_id < self.next_seq or seq_id in self.waiting:
            return True
        return bool(self._skipped) and any(first <= seq_id <= last for first, last in self._skipped.items())

    def _release(self) -> None:
        while True:
            if (operation := self.waiting.pop(self.next_seq, None)) is not None:
                operation.advance("queued")
                self.ready.append(operation)
                self.next_seq += 1
            elif (last := self._skipped.pop(self.next_seq, None)) is not None:
                self.next_seq = last + 1
            else:
                return

    @property
    def missing(self) -> int | None:
        """The seq_id that later operations wait for, if any."""
        return self.next_seq if self.waiting else None

    def gaps(self) -> list[tuple[int, int]]:
        """Return the first and last seq_id of every gap before the last held operation."""
        consumed = sorted([*((seq, seq) for seq in self.waiting), *self._skipped.items()])
        found, expected = [], self.next_seq
        for first, last in consumed:
            if first > max(self.waiting, default=0):
                break
            if first > expected:
                found.append((expected, first - 1))
            expected = max(expected, last + 1)
        return found

    def held(self) -> "list[Operation]":
        """ "Operation"s behind a missing seq_id, in order."""
        return [self.waiting[seq] for seq in sorted(self.waiting)]

    def give_up(self, gaps: Iterable[tuple[int, int]], operations: "Iterable[Operation]") -> None:
        """Consume the seq_ids of these gaps and of the operations that waited behind them."""
        for operation in operations:
            if self.waiting.get(operation.seq_id) is operation:
                del self.waiting[operation.seq_id]
                self._skipped[operation.seq_id] = operation.seq_id
        for first, last in gaps:
            self.skip(first, last)
