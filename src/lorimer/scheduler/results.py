"""Delivers results to waiting clients, and caches the newest results in memory."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from lorimer.scheduler.runs import Operation, Outcome
from lorimer.scheduler.samples import Sample
from lorimer.store import futures
from lorimer.store.database import Store

MAX_RECENT = 100_000
CLONE_STRIDE = 1_000_000_000
"""The numbers of the n-th client of a sampling session start at n times this."""


@dataclass(frozen=True)
class Completion:
    request_id: str
    state: Literal["finished", "failed"]
    size: int


@dataclass(eq=False)
class _Log:
    entries: dict[int, Completion] = field(default_factory=dict)
    """By cursor, ascending."""
    cursor: int = 0
    news: "asyncio.Event" = field(default_factory=asyncio.Event)
    asked_at: float = field(default_factory=time.monotonic)

    def append(self, request_id: str, is_done: bool, size: int) -> None:
        self.cursor = max(self.cursor + 1, time.time_ns() // 1000)
        self.entries[self.cursor] = Completion(request_id, "finished" if is_done else "failed", size)
        self.news.set()

    def acknowledge(self, cursor: int) -> None:
        self.cursor = max(self.cursor, cursor)  # also if the clock was set back
        while self.entries and (first := next(iter(self.entries))) <= cursor:
            del self.entries[first]


class FinishedSamples:
    """Which samples of a sampling session have finished, in order, for clients that poll all of theirs in one call.

    The cursor is a unique time in microseconds, so it keeps increasing across restarts. After a restart earlier samples
    are listed once more, and clients skip those they have.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._logs: dict[tuple[str, int], _Log] = {}

    def add(self, operation: Operation, outcome: Outcome) -> None:
        log = self._logs.get((operation.lane, operation.seq_id // CLONE_STRIDE))
        if log is not None:
            log.append(operation.request_id, outcome.state == "done", len(outcome.result))

    async def after(
        self, sampling_session_id: str, clone_id: int, prev_cursor: int, timeout: float
    ) -> tuple[list[Completion], int]:
        """Return the entries after the cursor and the new cursor, waiting for the first entry."""
        key = (sampling_session_id, clone_id)
        log = self._logs.get(key)
        if log is None:
            log = self._logs[key] = _Log(cursor=prev_cursor)
            await self._recall(key, log)
        log.asked_at = time.monotonic()
        log.acknowledge(prev_cursor)
        if not log.entries and timeout > 0:
            log.news.clear()
            waiting = asyncio.ensure_future(log.news.wait())
            try:
                await asyncio.wait([waiting], timeout=timeout)
            finally:
                waiting.cancel()
        found = {cursor: entry for cursor, entry in log.entries.items() if cursor > prev_cursor}
        return list(found.values()), max(found, default=prev_cursor)

    async def _recall(self, key: tuple[str, int], log: _Log) -> None:
        """List the samples that finished before the first poll. Samples that finish meanwhile may be listed twice."""
        sampling_session_id, clone_id = key
        try:
            rows = await self._store.read(futures.journal, sampling_session_id, clone_id * CLONE_STRIDE - 1)
        except BaseException:
            self._logs.pop(key, None)
            raise
        for row in rows:
            assert row.seq_id is not None
            if row.seq_id // CLONE_STRIDE == clone_id and row.state != "queued" and row.fetched_at is None:
                log.append(row.request_id, row.state == "done", row.result_size)

    def forget(self, sampling_session_ids: set[str], asked_before: float) -> None:
        """Drop the logs of these sessions, and logs not polled since ``asked_before``. The next poll rebuilds them."""
        for key, log in list(self._logs.items()):
            if key[0] in sampling_session_ids or log.asked_at < asked_before:
                del self._logs[key]


class Results:
    def __init__(self, finished_samples: FinishedSamples, max_recent_bytes: int) -> None:
        self.open: dict[str, Operation] = {}
        """Every committed request without a result, by request_id."""
        self.finished_samples = finished_samples
        self.on_settled: Callable[[Operation], None] | None = None
        """Called with each request that has ended."""
        self._waiters: dict[str, asyncio.Future[Outcome]] = {}
        self._recent: OrderedDict[str, tuple[str, Outcome]] = OrderedDict()
        """By request_id: the user_id and the outcome."""
        self._recent_bytes, self._max_recent_bytes = 0, max_recent_bytes

    def resolve(self, operation: Operation, outcome: Outcome) -> None:
        """Notify the waiters of an operation whose end is committed."""
        self.open.pop(operation.request_id, None)
        self._recent[operation.request_id] = operation.user_id, outcome
        self._recent_bytes += len(outcome.result)
        while self._recent_bytes > self._max_recent_bytes or len(self._recent) > MAX_RECENT:
            _, (_, oldest) = self._recent.popitem(last=False)
            self._recent_bytes -= len(oldest.result)
        if (waiter := self._waiters.pop(operation.request_id, None)) is not None:
            waiter.set_result(outcome)
        if isinstance(operation, Sample):
            self.finished_samples.add(operation, outcome)
        if self.on_settled is not None:
            self.on_settled(operation)

    async def wait(self, request_id: str, timeout: float) -> Outcome | None:
        """Return the outcome of an open request, or None after ``timeout`` seconds."""
        waiter = self._waiters.get(request_id)
        if waiter is None:
            waiter = self._waiters[request_id] = asyncio.get_running_loop().create_future()
        if timeout > 0:
            await asyncio.wait([waiter], timeout=timeout)
        return waiter.result() if waiter.done() else None

    def owner(self, request_id: str) -> str | None:
        """Return the owner of a request, or None if only the store knows it."""
        if (operation := self.open.get(request_id)) is not None:
            return operation.user_id
        return self._recent[request_id][0] if request_id in self._recent else None

    def recent(self, request_id: str) -> Outcome | None:
        return self._recent[request_id][1] if request_id in self._recent else None

    def forget(self, request_id: str) -> None:
        if request_id in self._recent:
            self._recent_bytes -= len(self._recent.pop(request_id)[1].result)
