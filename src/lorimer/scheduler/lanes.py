"""The order of one run: operations come in any order and leave in the order of their numbers.

A number that has not arrived holds back those after it. One that was refused, or given up, counts as gone by.
"""

from collections import deque
from collections.abc import Iterable

from lorimer.scheduler.operation import Operation


class Lane:
    def __init__(self, next_seq: int = 1) -> None:
        self.next_seq = next_seq
        """The lowest number that has not arrived."""
        self.ready: deque[Operation] = deque()
        """In order, with nothing missing before them."""
        self._held: dict[int, Operation] = {}
        self._skipped: dict[int, int] = {}
        """Numbers gone by behind a missing one: the first of each range, and the last."""

    def add(self, operation: Operation) -> None:
        """Take an operation whose number has neither arrived nor gone by."""
        if self.has_passed(operation.seq_id):
            raise ValueError(f"operation {operation.seq_id} has already arrived")
        self._held[operation.seq_id] = operation
        self._release()

    def skip(self, first: int, last: int | None = None) -> None:
        """Let numbers go by that have no operation."""
        last = first if last is None else last
        if last >= self.next_seq and first not in self._held:
            start = max(first, self.next_seq)
            self._skipped[start] = max(last, self._skipped.get(start, last))
            self._release()

    def has_passed(self, seq_id: int) -> bool:
        is_known = seq_id < self.next_seq or seq_id in self._held
        return is_known or any(first <= seq_id <= last for first, last in self._skipped.items())

    def _release(self) -> None:
        while True:
            if (operation := self._held.pop(self.next_seq, None)) is not None:
                self.ready.append(operation)
                self.next_seq += 1
            elif (last := self._skipped.pop(self.next_seq, None)) is not None:
                self.next_seq = last + 1
            else:
                return

    @property
    def missing(self) -> int | None:
        """The number that later operations wait for, if there are any."""
        return self.next_seq if self._held else None

    def gaps(self) -> list[tuple[int, int]]:
        """The first and last number of every gap before the last operation that waits."""
        gone_by = sorted([*((seq, seq) for seq in self._held), *self._skipped.items()])
        found, expected = [], self.next_seq
        for first, last in gone_by:
            if first > max(self._held, default=0):
                break
            if first > expected:
                found.append((expected, first - 1))
            expected = max(expected, last + 1)
        return found

    def held(self) -> list[Operation]:
        """Operations behind a missing number, in order."""
        return [self._held[seq] for seq in sorted(self._held)]

    def give_up(self, gaps: Iterable[tuple[int, int]], operations: Iterable[Operation]) -> None:
        """Let the numbers of these gaps go by, and the operations that waited for them."""
        for operation in operations:
            if self._held.get(operation.seq_id) is operation:
                del self._held[operation.seq_id]
                self._skipped[operation.seq_id] = operation.seq_id
        for first, last in gaps:
            self.skip(first, last)
