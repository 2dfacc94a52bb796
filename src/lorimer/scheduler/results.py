"""Delivers results to waiting clients, and caches the newest results in memory."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from lorimer.scheduler.finished_samples import FinishedSamples
from lorimer.scheduler.runs import Operation, Outcome
from lorimer.scheduler.samples import Sample

MAX_RECENT = 100_000


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
