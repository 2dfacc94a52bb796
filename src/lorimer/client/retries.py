"""Retries: which errors are transient, and how long to wait before the next attempt."""

import asyncio
import email.utils
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import httpx2

from lorimer.client.errors import APIConnectionError, APIStatusError, ResultLost, TinkerError

T = TypeVar("T")

PATIENCE_SECONDS = 300.0
"""How long a request is repeated until its error is raised."""
LONGEST_RETRY_AFTER = 60.0


class Backoff:
    """Waits that double from ``first`` to ``longest`` seconds, a little shorter at random."""

    def __init__(self, first: float = 0.25, longest: float = 10.0, jitter: float = 0.25) -> None:
        self._first, self._longest, self._jitter = first, longest, jitter
        self._count = 0

    def reset(self) -> None:
        self._count = 0

    def next(self) -> float:
        delay = min(self._first * 2.0 ** min(self._count, 30), self._longest)
        self._count += 1
        return delay * (1 - self._jitter * random.random())


def is_transient(error: Exception) -> bool:
    """Return whether a retry of the same request may succeed."""
    if isinstance(error, APIConnectionError):
        return True
    if not isinstance(error, APIStatusError):
        return False
    advice = error.response.headers.get("x-should-retry")
    if advice in ("true", "false"):
        return advice == "true"
    return error.status_code in (408, 409, 429) or error.status_code >= 500


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that ``Retry-After`` asks for, unless they are unreasonable."""
    try:
        if text := headers.get("retry-after-ms"):
            delay = float(text) / 1000
        elif text := headers.get("retry-after"):
            delay = float(text)
        else:
            return None
    except ValueError:
        when = email.utils.parsedate_tz(text)
        if when is None:
            return None
        delay = email.utils.mktime_tz(when) - time.time()
    return delay if 0 < delay <= LONGEST_RETRY_AFTER else None


@dataclass(frozen=True)
class RetryConfig:
    """How a SamplingClient repeats samples that fail for no fault of theirs."""

    max_connections: int | None = 1000
    """Most samples under way; the server's own limit takes its place."""
    progress_timeout: float = 120 * 60
    """Seconds without any finished sample after which waiting ones are given up."""
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    enable_retry_logic: bool = True
    enable_stuck_detection: bool = True
    retryable_exceptions: tuple[type[Exception], ...] = (
        TimeoutError,
        APIConnectionError,
        httpx2.TimeoutException,
        ResultLost,
    )


class SampleRetries:
    """Repeats samples of one client, however often it takes, while any of them makes progress."""

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._room = asyncio.Semaphore(config.max_connections) if config.max_connections else None
        self._progress_at = time.monotonic()
        self._num_waiting = 0

    async def run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        if self._room is None:
            return await self._watched(attempt)
        async with self._room:
            return await self._watched(attempt)

    async def _watched(self, attempt: Callable[[], Awaitable[T]]) -> T:
        if not self._config.enable_stuck_detection:
            return await self._repeat(attempt)
        if self._num_waiting == 0:
            self._progress_at = time.monotonic()
        self._num_waiting += 1
        work = asyncio.ensure_future(self._repeat(attempt))
        try:
            while not work.done():
                left = self._progress_at + self._config.progress_timeout - time.monotonic()
                if left <= 0:
                    seconds = self._config.progress_timeout
                    raise TinkerError(f"no sample of this client has finished for {seconds:g} seconds; giving up")
                await asyncio.wait({work}, timeout=left)
            return work.result()
        finally:
            self._num_waiting -= 1
            work.cancel()

    async def _repeat(self, attempt: Callable[[], Awaitable[T]]) -> T:
        config = self._config
        backoff = Backoff(config.retry_delay_base, config.retry_delay_max, config.jitter_factor)
        while True:
            try:
                result = await attempt()
            except Exception as error:
                again = isinstance(error, config.retryable_exceptions) or is_transient(error)
                if not (config.enable_retry_logic and again):
                    raise
            else:
                self._progress_at = time.monotonic()
                return result
            await asyncio.sleep(backoff.next())
