"""What the engine answered to a run's operations, on its way to the record.

A result is recorded whole, with what belongs to it, or not at all. Where the engine's run is no longer what the journal
says, it is dropped and laid out anew.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from lorimer.errors import EngineError, LorimerError, StorageError
from lorimer.scheduler import records
from lorimer.scheduler.commands import Sent, discard
from lorimer.scheduler.engines import EngineSlot
from lorimer.scheduler.operation import REPLAYED, Operation
from lorimer.scheduler.recorder import Recorder
from lorimer.scheduler.restoring import Restorer
from lorimer.scheduler.runs import RunState
from lorimer.scheduler.snapshots import Snapshots, settled
from lorimer.store.directory import DataDirectory

log = logging.getLogger("lorimer.scheduler")


class Answers:
    def __init__(
        self,
        slot: EngineSlot,
        directory: DataDirectory,
        recorder: Recorder,
        snapshots: Snapshots,
        restorer: Restorer,
        *,
        fail: Callable[[RunState, Operation, Exception], Coroutine[Any, Any, None]],
        forget: Callable[[RunState, Operation], None],
        on_loaded: Callable[[], None],
        on_published: Callable[[str], None],
        max_stored_bytes: int,
    ) -> None:
        """``fail`` ends an operation, ``forget`` is told that one has ended.

        ``on_loaded`` is told when a load no longer holds its run up, ``on_published`` which sampler was frozen.
        """
        self._slot, self._directory, self._recorder = slot, directory, recorder
        self._snapshots, self._restorer, self._max_stored_bytes = snapshots, restorer, max_stored_bytes
        self._fail, self._forget, self._on_loaded, self._on_published = fail, forget, on_loaded, on_published

    async def complete(self, state: RunState, sent: Sent) -> None:
        """Wait for the engine, and record what it answered."""
        operation, num_deaths = sent.operation, self._slot.num_deaths
        await asyncio.wait(sent.futures)
        if sent.has_died:
            await self._discard(sent)
            return  # it is in the journal, and the next engine computes it
        if sent.sampler_id is not None and sent.futures[0].exception() is None and num_deaths == self._slot.num_deaths:
            self._on_published(sent.sampler_id)
        if (error := sent.error) is not None:
            await self._refuse(state, sent, error)
        elif operation.is_replay:
            self._loaded(state, operation)
        else:
            await self._finish(state, sent)

    async def _finish(self, state: RunState, sent: Sent) -> None:
        operation = sent.operation
        if operation.kind == "load_weights":  # it ends with a snapshot, which must not overtake earlier results
            await settled(state, operation.seq_id - 1)
            sent.verified = await self._snapshots.verified(state)
        try:
            results, most = [future.result() for future in sent.futures], self._max_stored_bytes
            outcome = await self._recorder.finish(operation, records.finish_operation, state.run, sent, results, most)
        except StorageError:
            return  # the server is closing; the operation is computed again at the next start
        except Exception as error:
            await self._refuse(state, sent, error, is_applied=True)
            return
        if outcome.state != "done":
            await self._discard(sent)
        elif sent.snapshot is not None:
            self._snapshots.adopt(state, *sent.snapshot)
        self._loaded(state, operation)
        self._forget(state, operation)

    async def _refuse(self, state: RunState, sent: Sent, error: BaseException, *, is_applied: bool = False) -> None:
        """An operation has failed. ``is_applied``: although the engine carried it out."""
        operation = sent.operation
        await self._discard(sent)
        if not isinstance(error, LorimerError):
            log.error("an operation failed", exc_info=error, extra={"request_id": operation.request_id})
            error = EngineError(f"the operation failed: {type(error).__name__}")
        if operation.is_replay:
            await self._restorer.corrupt(state, f"operation {operation.seq_id} failed when it was replayed: {error}")
            return
        await self._fail(state, operation, sent.explain(error))
        # Of a load, which ends with a snapshot, the first part may have been carried out.
        is_applied |= operation.kind == "load_weights" and sent.futures[0].exception() is None
        if is_applied and operation.kind in REPLAYED and state.phase == "loaded":
            # The engine's run is not what the journal says; operations behind it are computed again on the right one.
            self._restorer.drop(state)
        self._loaded(state, operation)

    def _loaded(self, state: RunState, operation: Operation) -> None:
        if operation.kind == "load_weights":
            state.is_loading = False
            self._on_loaded()

    async def _discard(self, sent: Sent) -> None:
        """What the engine has written belongs to nothing."""
        if sent.directory is not None:
            await discard(self._directory, sent.directory)
