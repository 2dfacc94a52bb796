"""How every request gets in: on record first, then at work, although its caller may give up meanwhile."""

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from lorimer.engine.config import EngineConfig
from lorimer.errors import Busy, Gone, NotFound
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.models import ModelScheduler
from lorimer.scheduler.notes import Notes
from lorimer.scheduler.operation import Operation
from lorimer.scheduler.recorder import Recorder
from lorimer.store.database import Store
from lorimer.store.directory import DataDirectory
from lorimer.store.futures import FutureRow
from lorimer.store.sessions import Session

T = TypeVar("T")


@dataclass(frozen=True)
class Accepted:
    """The answer to a submit."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class Intake:
    """Holds what every kind of request needs; what is done with one is left to the classes that are made of this."""

    def __init__(
        self,
        store: Store,
        directory: DataDirectory,
        models: Mapping[str, EngineConfig],
        limits: SchedulerLimits | None = None,
    ) -> None:
        self.limits = limits or SchedulerLimits()
        self.store, self.directory = store, directory
        self.recorder = Recorder(store, self.limits.recent_result_bytes, directory.path)
        self.notes = Notes(self.recorder)
        self.open = self.recorder.open
        self.models: dict[str, ModelScheduler] = {}
        """Those of ``models``, once the scheduler is started."""
        self._configs = models
        self._submits: set[asyncio.Task[Any]] = set()
        self._is_closing = False

    async def _surely(self, work: Coroutine[Any, Any, T]) -> T:
        """Go on although the caller gives up, as when a client hangs up: what is on record must also be at work."""
        task = asyncio.ensure_future(work)
        self._submits.add(task)
        task.add_done_callback(self._submitted)
        return await asyncio.shield(task)

    def _submitted(self, task: "asyncio.Task[Any]") -> None:
        self._submits.discard(task)
        if not task.cancelled():
            task.exception()  # for whoever still waits

    def _is_ours(self, operation: Operation, row: FutureRow, is_new: bool) -> bool:
        """Whether the row just written is to be carried out by ``operation``.

        So is one that nobody carries out: whoever submitted it first could not be told that it is on record.
        """
        if not is_new and (row.state != "queued" or row.request_id in self.open):
            return False
        operation.request_id = row.request_id
        self.open[row.request_id] = operation
        return True

    def _check_open(self, session: Session) -> None:
        if self._is_closing:
            raise Busy("the server is shutting down")
        if session.status != "active":
            raise Gone(f"session {session.session_id} has ended; make a new one")

    def _model(self, name: str) -> ModelScheduler:
        if name not in self.models:
            raise NotFound(f"base model {name!r} is not served here; accepted are {', '.join(self.models)}")
        return self.models[name]
