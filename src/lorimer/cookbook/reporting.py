"""The sink ``server``: metrics of a loop on the server that trains its run, where the console shows them.

Training neither waits for it nor fails with it: points gather while a request is under way, the oldest go when there
are too many, and what cannot be reported is spoken of once. Metrics that a server did not take because it was
away follow when it is back.
"""

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Generic, TypeVar

from lorimer.client.metrics import metric_point
from lorimer.client.retries import is_transient
from lorimer.client.training import TrainingClient
from lorimer.cookbook.logs import Metrics
from lorimer.types.metrics import MAX_NAME_CHARS, MetricPoint

log = logging.getLogger("lorimer.cookbook")

Item = TypeVar("Item")

NUM_UPDATES = "optim/num_updates"
"""The metric by which a loop tells how many optimizer steps a step had."""
MAX_POINTS = 1000
"""Steps that wait to be reported."""
MAX_VALUES = 5000
"""Of one request, after which the next one begins."""
PAUSE_SECONDS = 0.5
"""Between two requests: quick steps share them."""
PATIENCE_SECONDS = 20.0
"""For which a server that does not answer is asked again, before its points are given up."""
CLOSE_SECONDS = 5.0


class Reporter(ABC, Generic[Item]):
    """Sends what is put into it on the loop of the SDK, in order, and gives up rather than disturb its caller."""

    what: str
    """That it reports, for its warning."""
    fallback = ""
    """Said after the reason of the warning."""
    is_sent_again = False
    """Whether what a server did not take because it was away waits until it is back: it may then arrive twice."""

    def __init__(self, max_waiting: int) -> None:
        self._client: TrainingClient | None = None
        """None while no run is known, and when its server takes nothing."""
        self._waiting: deque[Item] = deque(maxlen=max_waiting)
        self._lock = threading.Lock()
        self._is_sending = self._is_closing = self._has_warned = False
        self._work: Future[None] | None = None

    @abstractmethod
    async def _deliver(self, client: TrainingClient, items: list[Item]) -> None: ...

    def follow(self, client: TrainingClient) -> None:
        self._client = client

    def _put(self, item: Item) -> None:
        if (client := self._client) is None:
            return
        with self._lock:
            if len(self._waiting) == self._waiting.maxlen:
                self._warn("it is slow to take them, and the oldest are dropped")
            self._waiting.append(item)
            if not self._is_sending:
                self._is_sending = True
                self._work = client.holder.connection.run(self._send_all(client)).future()

    async def _send_all(self, client: TrainingClient) -> None:
        """On the loop of the SDK, until nothing waits."""
        while items := self._take():
            try:
                await self._deliver(client, items)
            except Exception as error:
                self._warn(str(error))
                if not is_transient(error):
                    self._client = None
                    self._waiting.clear()
                elif self.is_sent_again and not self._is_closing:
                    self._put_back(items)
            for _ in range(10):
                if not self._is_closing:
                    await asyncio.sleep(PAUSE_SECONDS / 10)

    def _take(self) -> list[Item]:
        """The first of what waits; after none of them, the next ``_put`` begins anew."""
        items: list[Item] = []
        with self._lock:
            while self._waiting and not self._is_enough(items):
                items.append(self._waiting.popleft())
            self._is_sending = bool(items)
        return items

    def _put_back(self, items: list[Item]) -> None:
        """Send them before those that wait now; of too many, the oldest are dropped."""
        with self._lock:
            room = (self._waiting.maxlen or 0) - len(self._waiting)
            self._waiting.extendleft(reversed(items[-room:] if room else []))

    def _is_enough(self, items: list[Item]) -> bool:
        """Whether these are one request."""
        return bool(items)

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s are not reported to the server: %s%s", self.what, reason, self.fallback)

    def close(self) -> None:
        """Let the rest be reported, for a few seconds at most."""
        self._is_closing = True
        if self._work is not None and wait_for([self._work], CLOSE_SECONDS).not_done:
            self._warn(f"it did not take the last of them within {CLOSE_SECONDS:g} s")
            self._work.cancel()
        self._client = None


class ServerSink(Reporter[MetricPoint]):
    """``total_steps`` bounds the reported progress: a last evaluation is logged under the step after the last."""

    what = "metrics"
    fallback = "; the other logs have them"
    is_sent_again = True

    def __init__(self, total_steps: int | None = None) -> None:
        super().__init__(MAX_POINTS)
        self._total_steps = total_steps
        self._num_updates = 0

    def log(self, metrics: Metrics, step: int) -> None:
        if self._client is not None:
            numbers = {_accepted(name): value for name, value in metrics.items() if not isinstance(value, str)}
            self._put(metric_point(numbers, step, self._count(numbers)))

    def _count(self, numbers: Mapping[str, float]) -> int | None:
        """The optimizer steps up to now, of a loop that reports how many each of its steps has."""
        if (done := numbers.get(NUM_UPDATES)) is None:
            return None
        self._num_updates += int(done)
        return self._num_updates

    async def _deliver(self, client: TrainingClient, items: list[MetricPoint]) -> None:
        await client.reports.send(items, PATIENCE_SECONDS, self._steps_done(items))

    def _is_enough(self, items: list[MetricPoint]) -> bool:
        return sum(len(point.values) for point in items) >= MAX_VALUES

    def _steps_done(self, points: list[MetricPoint]) -> int | None:
        done = points[-1].step + 1
        return None if self._total_steps is None else min(done, self._total_steps)


def _accepted(name: str) -> str:
    """The name as a server takes it."""
    kept = "".join(character if character.isprintable() and character != "," else "_" for character in name)
    return kept[:MAX_NAME_CHARS] or "_"
