"""Runs periodic jobs: each job runs again a fixed time after its last run ended, whether it succeeded or failed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)


class Periodic:
    """Runs ``job`` every ``seconds`` until ``stop``. Errors are logged and do not stop it."""

    def __init__(self, seconds: float, job: Callable[[], Awaitable[None]], name: str) -> None:
        self._seconds = seconds
        self._job = job
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._begin)

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def _run(self) -> None:
        try:
            await self._job()
        except Exception:
            logger.exception("%s failed; retrying in %g s", self._name, self._seconds)
        self.start()

    async def stop(self) -> None:
        """Wait for the current run to finish and cancel the next."""
        if self._task is not None:
            await asyncio.wait({self._task})
        if self._timer is not None:
            self._timer.cancel()
