"""Work that goes on beside the requests and is waited for at the end; what goes wrong in it is logged."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from lorimer.scheduler.runs import RunState

log = logging.getLogger("lorimer.scheduler")


class Background:
    def __init__(self, complaint: str) -> None:
        """``complaint`` is what the log says of an error that nobody expected."""
        self._complaint = complaint
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def unfinished(self) -> "list[asyncio.Task[None]]":
        return [task for task in self._tasks if not task.done()]

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def record(self, state: RunState, work: Coroutine[Any, Any, None]) -> None:
        """Do something after which the run's journal is different; the run is not laid out from it before."""
        task = self.spawn(work)
        state.recording.add(task)
        task.add_done_callback(state.recording.discard)

    async def wait(self) -> None:
        """Until nothing is left, also of what is begun meanwhile."""
        while tasks := self.unfinished:
            await asyncio.wait(tasks)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(self._complaint, exc_info=error)
