"""Brings runs into the engine and gives them up: a run is its snapshot and what the journal has after it.

A newest snapshot that cannot be read is dropped, and the run begins with the one before it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from lorimer.engine import messages
from lorimer.errors import CheckpointError, EngineDied, EngineError, InvalidInput, LorimerError, StorageError
from lorimer.scheduler import records
from lorimer.scheduler.commands import create_command, discard, load_command
from lorimer.scheduler.engines import EngineSlot
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.losses import LossRegistry
from lorimer.scheduler.operation import Operation
from lorimer.scheduler.payloads import CreateModel, decode_payload
from lorimer.scheduler.recorder import Recorder
from lorimer.scheduler.runs import RunState, rebuild
from lorimer.scheduler.snapshots import Snapshots
from lorimer.store.directory import DataDirectory

log = logging.getLogger("lorimer.scheduler")

_RETRY_SECONDS = 2.0


class Restorer:
    def __init__(
        self,
        slot: EngineSlot,
        directory: DataDirectory,
        limits: SchedulerLimits,
        recorder: Recorder,
        losses: LossRegistry,
        snapshots: Snapshots,
        *,
        on_restored: Callable[[RunState], None],
        fail: Callable[[RunState, Operation, Exception], Coroutine[Any, Any, None]],
    ) -> None:
        """``fail`` ends an operation; ``on_restored`` is also called when a run is given up or put off."""
        self._slot, self._directory, self._limits, self._recorder = slot, directory, limits, recorder
        self._losses, self._snapshots = losses, snapshots
        self._on_restored, self._fail = on_restored, fail

    async def restore(self, state: RunState) -> None:
        """Bring a run into the engine, unless the engine ends; then it is begun anew with the next."""
        try:
            late = await self._restore(state)
        except (EngineDied, StorageError):
            return  # everything is set back when the end is told, or the server is closing
        except Exception as error:
            is_final = isinstance(error, LorimerError) and not isinstance(error, EngineError)
            await self._put_off(state, error, is_final)
            return
        state.restoring = None
        state.phase, state.loaded_at, state.has_had_turn, state.failures = "loaded", time.monotonic(), False, 0
        if state.replays:
            log.info("replaying %d operations", len(state.replays), extra={"model_id": state.model_id})
        else:
            state.deaths = 0
        for operation in late:
            reason = f"operation {operation.seq_id} came when later ones had been computed; use a new seq_id"
            await self._fail(state, operation, InvalidInput(reason))
        self._on_restored(state)

    async def _restore(self, state: RunState) -> list[Operation]:
        while state.recording:
            await asyncio.wait(state.recording)
        if state.saving is not None:
            await asyncio.wait([state.saving])
        state.passed.clear()  # the journal has these
        journal = self._take(state, await self._recorder.read(records.journal, state.model_id))
        await self._losses.recall(journal.run.session_id)
        try:
            await self._load(state, journal)
        except CheckpointError as error:
            journal = await self._fall_back(state, error)
            await self._load(state, journal)
        late = rebuild(state, journal.rows, journal.payloads)
        for operation in state.operations.values():
            if operation.is_accepted:
                self._recorder.open.setdefault(operation.request_id, operation)
        return late

    def _take(self, state: RunState, journal: records.Journal | None) -> records.Journal:
        if journal is None:
            raise InvalidInput("there is no record of it any more")
        state.run = journal.run
        if journal.run.corrupted:
            raise InvalidInput(journal.run.corrupted)
        return journal

    async def _fall_back(self, state: RunState, error: CheckpointError) -> records.Journal:
        """The newest snapshot cannot be read; go on with the one before it, if there is one."""
        damaged = state.run.newest_name
        if damaged is None:
            raise error
        log.error("falling back on an older snapshot: %s", error, extra={"model_id": state.model_id})
        journal = self._take(state, await self._recorder.write(records.fall_back, state.model_id, damaged))
        self._drop_from_engine(state)
        await discard(self._directory, self._directory.snapshots / damaged)
        return journal

    async def _load(self, state: RunState, journal: records.Journal) -> None:
        """Have the engine make the run and load what it begins with; ``CheckpointError`` if that cannot be read."""
        run, made_of = journal.run, _creation(state, journal)
        created = self._slot.submit(create_command(run))
        if run.resume_name is not None:
            loaded = self._slot.submit(load_command(run, self._directory.snapshots / run.resume_name, optimizer=True))
            await created
            try:
                await loaded
            except InvalidInput as error:
                raise CheckpointError(str(error)) from error
        elif made_of.weights_name is not None:
            source = self._directory.weights / made_of.weights_name
            await asyncio.gather(created, self._slot.submit(load_command(run, source, made_of.optimizer)))
            await self._snapshots.save(state, 0)
        else:
            await created
        if state.creation is not None:
            await self._recorder.finish(state.creation, records.finish_creation, run, made_of)
            state.creation, state.last_used = None, time.monotonic()  # its client hears of it only now

    async def _put_off(self, state: RunState, error: Exception, is_final: bool) -> None:
        """Try again later, or give the run up if that would not help."""
        state.failures += 1
        text = str(error)
        log.error("run not restored: %s", text, exc_info=error, extra={"model_id": state.model_id})
        state.restoring = None
        self.drop(state)
        if is_final or state.failures >= self._limits.max_engine_deaths:
            is_new = state.creation is not None and not state.operations
            await self.corrupt(state, text if is_new else f"run {state.model_id} cannot be restored: {text}")
        else:
            state.retry_at = time.monotonic() + _RETRY_SECONDS
            asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._on_restored, state)

    def drop(self, state: RunState) -> None:
        """Take a run out of the engine as it is; it comes back as the journal has it."""
        state.forget_engine()
        self._drop_from_engine(state)

    def _drop_from_engine(self, state: RunState) -> None:
        with contextlib.suppress(LorimerError):  # there may be no engine, or nothing to drop
            self._slot.submit(messages.DropRun(request_id=f"drop:{state.model_id}", model_id=state.model_id))

    async def corrupt(self, state: RunState, reason: str) -> None:
        """Give a run up, with everything that waits for it."""
        if state.phase == "loaded":
            self.drop(state)
        reason = self._recorder.without_place(reason)
        state.phase, state.error = "corrupted", reason
        await self._recorder.write(records.mark_corrupted, state.model_id, reason)
        if state.creation is not None:
            await self._recorder.fail(state.creation, InvalidInput(reason))
            state.creation = None
        for operation in list(state.operations.values()):
            if operation.is_accepted:
                await self._fail(state, operation, InvalidInput(reason))
        self._on_restored(state)


def _creation(state: RunState, journal: records.Journal) -> CreateModel:
    """What the run was made of; asked while that is to be answered, or nothing later is known of the run."""
    payload = journal.creation if state.creation is None else state.creation.payload
    if payload is None:
        if journal.run.resume_name is None:
            raise CheckpointError("the record of how it was made is not complete")
        return CreateModel()
    creation = decode_payload(payload)
    assert isinstance(creation, CreateModel)
    return creation
