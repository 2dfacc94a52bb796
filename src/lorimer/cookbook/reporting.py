"""The sink ``server``: metrics of a loop on the server that trains its run, where the console shows them.

Training neither waits for it nor fails with it: points gather while a request is under way, the oldest go when there
are too many, and what cannot be reported is spoken of once.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

from lorimer.client.metrics import metric_point
from lorimer.client.retries import is_transient
from lorimer.client.training import TrainingClient
from lorimer.cookbook.logs import Metrics
from lorimer.types.metrics import MAX_NAME_CHARS, MetricPoint

log = logging.getLogger("lorimer.cookbook")

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


class ServerSink:
    """``total_steps`` bounds the reported progress: a last evaluation is logged under the step after the last."""

    def __init__(self, total_steps: int | None = None) -> None:
        self._total_steps = total_steps
        self._client: TrainingClient | None = None
        """None while no run is known, and when its server takes no metrics."""
        self._waiting: deque[MetricPoint] = deque(maxlen=MAX_POINTS)
        self._lock = threading.Lock()
        self._is_sending = self._is_closing = self._has_warned = False
        self._work: Future[None] | None = None
        self._num_updates = 0

    def follow(self, client: TrainingClient) -> None:
        self._client = client

    def log(self, metrics: Metrics, step: int) -> None:
        if (client := self._client) is None:
            return
        numbers = {_accepted(name): value for name, value in metrics.items() if not isinstance(value, str)}
        point = metric_point(numbers, step, self._count(numbers))
        with self._lock:
            if len(self._waiting) == MAX_POINTS:
                self._warn("it is slow to take them, and the oldest are dropped")
            self._waiting.append(point)
            if not self._is_sending:
                self._is_sending = True
                self._work = client.holder.connection.run(self._send_all(client)).future()

    def _count(self, numbers: Mapping[str, float]) -> int | None:
        """The optimizer steps up to now, of a loop that reports how many each of its steps has."""
        if (done := numbers.get(NUM_UPDATES)) is None:
            return None
        self._num_updates += int(done)
        return self._num_updates

    async def _send_all(self, client: TrainingClient) -> None:
        """On the loop of the SDK, until nothing waits."""
        while points := self._take():
            try:
                await client.reports.send(points, PATIENCE_SECONDS, self._steps_done(points))
            except Exception as error:
                self._warn(str(error))
                if not is_transient(error):
                    self._client = None
                    self._waiting.clear()
            for _ in range(10):
                if not self._is_closing:
                    await asyncio.sleep(PAUSE_SECONDS / 10)

    def _steps_done(self, points: list[MetricPoint]) -> int | None:
        done = points[-1].step + 1
        return None if self._total_steps is None else min(done, self._total_steps)

    def _take(self) -> list[MetricPoint]:
        """The first of what waits; after none of them, the next ``log`` begins anew."""
        points: list[MetricPoint] = []
        with self._lock:
            while self._waiting and sum(len(point.values) for point in points) < MAX_VALUES:
                points.append(self._waiting.popleft())
            self._is_sending = bool(points)
        return points

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("metrics are not reported to the server: %s; the other logs have them", reason)

    def close(self) -> None:
        """Let the rest be reported, for a few seconds at most."""
        self._is_closing = True
        if self._work is not None and wait_for([self._work], CLOSE_SECONDS).not_done:
            self._warn(f"it did not take the last of them within {CLOSE_SECONDS:g} s")
            self._work.cancel()
        self._client = None


def _accepted(name: str) -> str:
    """The name as a server takes it."""
    kept = "".join(character if character.isprintable() and character != "," else "_" for character in name)
    return kept[:MAX_NAME_CHARS] or "_"
