"""Jobs for the database threads, and the delivery of their results to an event loop or a waiting thread."""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import Connection

_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 0.05, 2.0
_CLOSING_SECONDS = 5.0


class Job:
    """Runs ``call(connection)`` for a caller. A lost connection retries it."""

    __slots__ = ("call", "error", "result", "submitted_at", "waiter")

    def __init__(
        self,
        call: Callable[[Connection], Any],
        waiter: "asyncio.Future[Any] | concurrent.futures.Future[Any]",
    ) -> None:
        self.call = call
        self.waiter = waiter
        self.submitted_at = time.monotonic()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self, connection: Connection) -> None:
        self.error = None
        self.result = self.call(connection)


class Patience:
    """Exponential backoff between attempts to reach the database, for up to ``seconds``, or briefly while closing.

    Counts from ``since``, so that a job that already waited behind others for a lost database does not start over.
    """

    def __init__(self, seconds: float, closing: threading.Event, since: float | None = None) -> None:
        self._deadline = (time.monotonic() if since is None else since) + seconds
        self._closing = closing
        self._delay = _FIRST_DELAY_SECONDS

    def wait(self) -> bool:
        """Sleep, and return whether to retry."""
        if self._closing.is_set():
            self._deadline = min(self._deadline, time.monotonic() + _CLOSING_SECONDS)
        if time.monotonic() + self._delay > self._deadline:
            return False
        threading.Event().wait(self._delay)
        self._delay = min(2 * self._delay, _LONGEST_DELAY_SECONDS)
        return True


def deliver(jobs: Iterable[Job]) -> None:
    """Notify the callers, with one wakeup per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        if isinstance(job.waiter, asyncio.Future):
            by_loop.setdefault(job.waiter.get_loop(), []).append(job)
        else:
            _settle([job])
    for loop, its_jobs in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, its_jobs)
        except RuntimeError:
            continue  # the event loop is closed, so nobody waits


def _settle(jobs: Iterable[Job]) -> None:
    for job in jobs:
        if job.waiter.done():
            continue  # the caller was cancelled
        if job.error is not None:
            job.waiter.set_exception(job.error)
        else:
            job.waiter.set_result(job.result)
