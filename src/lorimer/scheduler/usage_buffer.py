"""Buffers which results were fetched and which runs and samplers were used, and persists them once a second."""

import asyncio
import logging
from datetime import UTC, datetime

from sqlalchemy import Connection

from lorimer.errors import StorageError
from lorimer.store import futures, runs, samplers
from lorimer.store.database import Store

log = logging.getLogger("lorimer.scheduler")

WRITE_SECONDS = 1.0


class UsageBuffer:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._fetched: dict[str, datetime] = {}
        self._runs: dict[str, datetime] = {}
        self._samplers: dict[str, datetime] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def fetched(self, request_id: str) -> None:
        self._fetched.setdefault(request_id, datetime.now(UTC))
        self._schedule()

    def run_used(self, model_id: str) -> None:
        self._runs[model_id] = datetime.now(UTC)
        self._schedule()

    def sampler_used(self, sampling_session_id: str) -> None:
        self._samplers[sampling_session_id] = datetime.now(UTC)
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is None and self._writing is None:
            self._timer = asyncio.get_running_loop().call_later(WRITE_SECONDS, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._writing = asyncio.ensure_future(self._write())

    async def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is not None:
            await asyncio.wait([self._writing])
        await self._write()

    async def _write(self) -> None:
        fetched, self._fetched = self._fetched, {}
        used_runs, self._runs = self._runs, {}
        used_samplers, self._samplers = self._samplers, {}
        try:
            await self._store.write(_write, fetched, used_runs, used_samplers)
        except StorageError as error:
            log.warning("cannot persist the last use of runs and samplers: %s", error)
        self._writing = None
        if self._fetched or self._runs or self._samplers:
            self._schedule()


def _write(
    c: Connection, fetched: dict[str, datetime], used_runs: dict[str, datetime], used_samplers: dict[str, datetime]
) -> None:
    futures.mark_fetched(c, fetched)
    runs.touch_runs(c, used_runs)
    samplers.touch_samplers(c, used_samplers)
