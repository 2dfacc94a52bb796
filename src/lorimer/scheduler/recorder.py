"""Puts what happened on record, then tells those who wait; never the other way round.

A result that cannot be written (a full disk, a database that is away) is written later: the request stays open until
it is. The newest results are also kept in memory, for the client that asks for them next.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from lorimer.errors import Cancelled, CheckpointError, Gone, InvalidInput, StorageError
from lorimer.scheduler import records
from lorimer.scheduler.operation import Operation, Outcome
from lorimer.store.database import Store
from lorimer.store.futures import FutureState

log = logging.getLogger("lorimer.scheduler")

P = ParamSpec("P")
T = TypeVar("T")
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0
_MOST_RECENT = 100_000


class Recorder:
    def __init__(self, store: Store, recent_bytes: int, directory: Path) -> None:
        """Errors are told to users without the place of the data ``directory``."""
        self._store = store
        self._directory = str(directory)
        self.open: dict[str, Operation] = {}
        """Every request that is not answered, by id."""
        self._recent: OrderedDict[str, tuple[str, Outcome]] = OrderedDict()
        """By request: whose it was, and how it ended."""
        self._recent_bytes, self._most_recent_bytes = 0, recent_bytes
        self._closing = asyncio.Event()
        self.on_settled: Callable[[Operation, Outcome], None] = lambda operation, outcome: None

    def close(self) -> None:
        """From now on a failing storage is not waited for; what it lacks is done again at the next start."""
        self._closing.set()

    async def write(self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a transaction, again and again while the storage fails."""
        return await self._surely(lambda: self._store.write(function, *args, **kwargs))

    async def read(self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._surely(lambda: self._store.read(function, *args, **kwargs))

    async def _surely(self, attempt: Callable[[], Awaitable[T]]) -> T:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return await attempt()
            except StorageError as error:
                if self._closing.is_set():
                    raise
                log.error("the storage fails, trying again in %.1f s: %s", pause, error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def finish(self, operation: Operation, transaction: Callable[..., Outcome], *args: Any) -> Outcome:
        """``transaction(connection, operation, *args)`` records the result with all that belongs to it."""
        outcome = await self.write(transaction, operation, *args)
        self.settle(operation, outcome)
        return outcome

    async def fail(self, operation: Operation, error: Exception, state: FutureState = "failed") -> None:
        is_users = isinstance(error, InvalidInput | CheckpointError | Gone | Cancelled)
        text = self.without_place(str(error))
        outcome = await self.write(records.fail, operation, text, "user" if is_users else "server", state)
        self.settle(operation, outcome)

    def without_place(self, text: str) -> str:
        """An error for users: files are named as below the data directory, wherever that is."""
        return text.replace(f"{self._directory}/", "").replace(self._directory, "the data directory")

    def settle(self, operation: Operation, outcome: Outcome) -> None:
        """What is told here is on record."""
        self.open.pop(operation.request_id, None)
        if operation.outcome.done():
            return
        self._recent[operation.request_id] = operation.user_id, outcome
        self._recent_bytes += len(outcome.result)
        while self._recent_bytes > self._most_recent_bytes or len(self._recent) > _MOST_RECENT:
            _, (_, oldest) = self._recent.popitem(last=False)
            self._recent_bytes -= len(oldest.result)
        operation.settle(outcome)
        self.on_settled(operation, outcome)

    def owner(self, request_id: str) -> str | None:
        """Whose request it is; None if only the store knows."""
        if (operation := self.open.get(request_id)) is not None:
            return operation.user_id
        return self._recent[request_id][0] if request_id in self._recent else None

    def recent(self, request_id: str) -> Outcome | None:
        return self._recent[request_id][1] if request_id in self._recent else None

    def forget(self, request_id: str) -> None:
        if request_id in self._recent:
            self._recent_bytes -= len(self._recent.pop(request_id)[1].result)
