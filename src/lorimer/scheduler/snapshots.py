"""Secures runs in the background: when a replay would take long, when a run makes room for another, and at the end."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lorimer.engine import messages
from lorimer.errors import EngineDied, LorimerError, StorageError
from lorimer.scheduler import records
from lorimer.scheduler.commands import discard, snapshot_command
from lorimer.scheduler.engines import EngineSlot
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.recorder import Recorder
from lorimer.scheduler.runs import RunState
from lorimer.store.directory import DataDirectory

log = logging.getLogger("lorimer.scheduler")

_WORTH = 20.0
"""A snapshot waits until the work it secures took this many times as long as the last snapshot."""


class Snapshots:
    def __init__(
        self,
        slot: EngineSlot,
        directory: DataDirectory,
        limits: SchedulerLimits,
        recorder: Recorder,
        on_room: Callable[[], None],
    ) -> None:
        self._slot, self._directory, self._limits, self._recorder = slot, directory, limits, recorder
        self._on_room = on_room
        self._tasks: set[asyncio.Task[None]] = set()

    def consider(self, state: RunState) -> None:
        """Begin a snapshot if one is due; called when an operation was answered."""
        due = max(self._limits.snapshot_seconds, _WORTH * state.snapshot_cost)
        if state.work_seconds >= due and state.phase == "loaded" and state.saving is None:
            self._begin(state, self._save_and_report(state))

    def park(self, state: RunState) -> None:
        """Take a run out of the engine; it is brought in again when it is needed."""
        state.is_leaving = True
        self._begin(state, self._park(state, is_forced=not state.is_idle))

    def _begin(self, state: RunState, work: Coroutine[Any, Any, None]) -> None:
        state.saving = task = asyncio.ensure_future(work)
        self._tasks.add(task)

        def done(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            state.saving, state.is_leaving = None, False
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a run was not secured", exc_info=error, extra={"model_id": state.model_id})
            self._on_room()

        task.add_done_callback(done)

    async def _park(self, state: RunState, is_forced: bool) -> None:
        while state.recording:
            await asyncio.wait(state.recording)
        if state.work_seconds or state.run.snapshot_name is None:
            await self._save_and_report(state)  # without one the journal still has it all, and is replayed
        if state.phase != "loaded" or (state.operations and not is_forced):
            return  # the engine is gone, or the run is needed after all
        state.forget_engine()
        with contextlib.suppress(LorimerError):
            await self._slot.submit(messages.DropRun(request_id=f"drop:{state.model_id}", model_id=state.model_id))

    async def _save_and_report(self, state: RunState) -> None:
        try:
            await self.save(state, state.sent_seq)
        except (EngineDied, StorageError):
            return  # laid out anew from the journal, or about to close
        except Exception as error:
            # The run goes on; only a replay would take longer. The next attempt comes after as much work again.
            state.work_seconds = 0.0
            log.error("no snapshot: %s", error, extra={"model_id": state.model_id})

    async def save(self, state: RunState, seq_id: int) -> None:
        """Write a snapshot of the run as the engine has it after ``seq_id``, the last number it was given."""
        target = self._directory.new_snapshot_directory()
        secured, state.work_seconds = state.work_seconds, 0.0
        began = time.monotonic()
        try:
            await self._slot.submit(snapshot_command(state.run, target))
        except BaseException:
            state.work_seconds += secured
            await discard(self._directory, target)
            raise
        state.snapshot_cost = time.monotonic() - began
        await settled(state, seq_id)
        # From here on the run's row may name it, whatever becomes of the answer; a needless one goes at the next start.
        obsolete = await self._recorder.write(records.set_snapshot, state.model_id, seq_id, target.name)
        self.adopt(state, seq_id, target, obsolete)

    def adopt(self, state: RunState, seq_id: int, target: Path, obsolete: str | None) -> None:
        """The run's row names ``target`` now, and ``obsolete`` no more."""
        if obsolete != target.name:
            state.run = replace(state.run, snapshot_seq=seq_id, snapshot_name=target.name)
        if obsolete is not None:
            task = asyncio.ensure_future(discard(self._directory, self._directory.snapshots / obsolete))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def save_all(self, states: Iterable[RunState]) -> None:
        """At the end: secure every run that has changed."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        changed = [state for state in states if state.phase == "loaded" and state.work_seconds]
        await asyncio.gather(*(self._save_and_report(state) for state in changed))
        if self._tasks:
            await asyncio.wait(self._tasks)


async def settled(state: RunState, seq_id: int) -> None:
    """Wait until the results of everything up to ``seq_id`` are on record, so that no replay is needed for them."""
    open_ones = [op.outcome for seq, op in state.operations.items() if seq <= seq_id and op.is_accepted]
    if open_ones:
        await asyncio.wait(open_ones)
