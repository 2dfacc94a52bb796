"""Secures runs in the background: when a replay would take long, when a run makes room for another, and at the end.

Before a snapshot takes the place of the one before it, that one is verified; it and the journal after it are kept until
the next. So one snapshot that is torn or damaged makes a replay longer, and a run never has more than two.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from lorimer.engine import messages
from lorimer.errors import EngineDied, LorimerError, StorageError
from lorimer.scheduler import records
from lorimer.scheduler.commands import discard, snapshot_command
from lorimer.scheduler.engines import EngineSlot
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.manifests import is_whole
from lorimer.scheduler.recorder import Recorder
from lorimer.scheduler.runs import RunState
from lorimer.store.directory import DataDirectory
from lorimer.store.runs import Run

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

    def park(self, state: RunState, *, is_forced: bool) -> None:
        """Take a run out of the engine, also one that is used meanwhile if ``is_forced``; it comes back when needed."""
        state.is_leaving = True
        self._begin(state, self._park(state, is_forced))

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
        if state.work_seconds or state.run.resume_name is None:
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
        try:
            saved = await self._slot.submit(snapshot_command(state.run, target))
        except BaseException:
            state.work_seconds += secured
            await discard(self._directory, target)
            raise
        assert isinstance(saved, messages.StateResult)
        state.snapshot_cost = saved.seconds
        await settled(state, seq_id)
        verified = await self.verified(state)
        # From here on the run's row may name it, whatever becomes of the answer; a needless one goes at the next start.
        self.adopt(
            state, *await self._recorder.write(records.set_snapshot, state.model_id, seq_id, target.name, verified)
        )

    async def verified(self, state: RunState) -> str | None:
        """The run's newest snapshot, if it can be fallen back on."""
        name = state.run.newest_name
        if name is None or await asyncio.to_thread(is_whole, self._directory.snapshots / name):
            return name
        log.warning("snapshot %s is damaged; the one before it is kept", name, extra={"model_id": state.model_id})
        return None

    def adopt(self, state: RunState, run: Run | None, obsolete: Iterable[str]) -> None:
        """The run's row is ``run`` now, and names ``obsolete`` no more."""
        if run is not None:
            state.run = run
        for name in obsolete:
            task = asyncio.ensure_future(discard(self._directory, self._directory.snapshots / name))
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
