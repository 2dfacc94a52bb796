"""The runs of one base model: takes their operations in order, gives them to the engine turn by turn, records results.

Up to two turns are with the engine, so that it never waits for this process. The engine computes commands in the order
they are sent, so operations of a run may be sent before earlier ones are answered; one that fails has changed nothing
and those after it go on. When an engine ends, everything it was given is laid out anew from the journal.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from lorimer.engine import messages
from lorimer.errors import Busy, EngineError, InvalidInput, LorimerError, StorageError
from lorimer.scheduler import records
from lorimer.scheduler.batching import Queue, Turn, next_turn
from lorimer.scheduler.commands import Sent, discard, refused, send_barrier, to_forward_backward
from lorimer.scheduler.engines import EngineSlot
from lorimer.scheduler.isolation import Isolation
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.losses import LossRegistry
from lorimer.scheduler.operation import BARRIER_TOKENS, REPLAYED, Operation
from lorimer.scheduler.recorder import Recorder
from lorimer.scheduler.restoring import Restorer
from lorimer.scheduler.runs import RunState
from lorimer.scheduler.shares import Shares
from lorimer.scheduler.snapshots import Snapshots, settled
from lorimer.store.directory import DataDirectory
from lorimer.store.runs import Run

log = logging.getLogger("lorimer.scheduler")

_MOST_TURNS = 2
_IDLE_SECONDS = 0.5
"""A run whose client has not come back for so long counts as idle: between two steps of a loop it always does."""
_CHANGING = REPLAYED | {"load_weights"}


class TrainingQueue:
    def __init__(
        self,
        slot: EngineSlot,
        directory: DataDirectory,
        limits: SchedulerLimits,
        recorder: Recorder,
        losses: LossRegistry,
        isolation: Isolation,
        on_published: Callable[[str], None],
    ) -> None:
        """``on_published`` is told which sampler the engine has frozen from a run."""
        self.slot = slot
        self.runs: dict[str, RunState] = {}
        """Those in the engine, and those with something to do."""
        self.shares = Shares()
        self.tokens_trained = 0
        self.on_answer: Callable[[], None] = self.pump
        self._directory, self._limits, self._recorder = directory, limits, recorder
        self._losses, self._isolation, self._on_published = losses, isolation, on_published
        self._snapshots = Snapshots(slot, directory, limits, recorder, self._secured)
        self._restorer = Restorer(
            slot,
            directory,
            limits,
            recorder,
            losses,
            self._snapshots,
            on_restored=self._restored,
            fail=self._fail,
        )
        self._turns: list[tuple[Turn, list[Sent]]] = []
        """With the engine, in the order they were sent."""
        self._turn_began = 0.0
        self._open_bytes = 0
        self._second_look: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    @property
    def num_open(self) -> int:
        return sum(len(state.operations) for state in self.runs.values())

    @property
    def has_work(self) -> bool:
        return any(state.has_work for state in self.runs.values())

    @property
    def is_busy(self) -> bool:
        """Whether the engine has anything to do for these runs."""
        return bool(self._turns) or any(state.restoring or state.saving for state in self.runs.values())

    def add_run(self, run: Run) -> RunState:
        state = self.runs.get(run.model_id)
        if state is None:
            state = self.runs[run.model_id] = RunState(run)
            if run.corrupted:
                state.phase, state.error = "corrupted", run.corrupted
        return state

    def forget_idle(self) -> None:
        """Drop what the store knows as well."""
        for model_id in [model_id for model_id, state in self.runs.items() if state.is_forgettable]:
            del self.runs[model_id]

    def expire(self, model_id: str) -> None:
        """The run's row says that it cannot be used any more."""
        if (state := self.runs.get(model_id)) is not None and not state.has_work:
            self._restorer.drop(state)
            del self.runs[model_id]

    # ── arriving ──────────────────────────────────────────────────────────────────────────────────────

    def check_room(self, state: RunState, num_bytes: int) -> None:
        if len(state.operations) >= self._limits.max_open_operations:
            raise Busy(f"run {state.model_id} has {len(state.operations)} unfinished operations; wait for some of them")
        if self._open_bytes and self._open_bytes + num_bytes > self._limits.max_open_bytes:
            raise Busy(
                f"operations of {self._open_bytes} bytes are waiting for {self.slot.name}; try again in a moment"
            )

    def arrive(self, state: RunState, operation: Operation) -> None:
        """Take an operation that is on record."""
        state.last_used = time.monotonic()
        self.shares.enter(operation.user_id)
        self._open_bytes += operation.size
        is_in_time = state.arrive(operation)
        if state.phase == "corrupted":
            self._record(state, self._fail(state, operation, InvalidInput(state.error)))
        elif not is_in_time:
            reason = f"operation {operation.seq_id} came when later ones had been computed; use a new seq_id"
            self._record(state, self._fail(state, operation, InvalidInput(reason)))
        self._watch_gap(state)
        self.pump()

    def take_up(self, state: RunState, operation: Operation) -> None:
        """Take an operation that an earlier server had on record."""
        state.operations[operation.seq_id] = operation
        self.shares.enter(operation.user_id)

    def skip(self, state: RunState, seq_id: int) -> None:
        """A number that was refused has gone by."""
        state.skip(seq_id)
        self._watch_gap(state)
        self.pump()

    def create(self, state: RunState, creation: Operation) -> None:
        state.creation = creation
        self.pump()

    def _watch_gap(self, state: RunState) -> None:
        missing = state.lane.missing if state.lane is not None else None
        if missing is None and state.gap is not None:
            state.gap.cancel()
            state.gap = None
        elif missing is not None and state.gap is None and not self._is_closing:
            loop = asyncio.get_running_loop()
            state.gap = loop.call_later(self._limits.gap_seconds, self._close_gap, state, missing)

    def _close_gap(self, state: RunState, missing: int) -> None:
        state.gap = None
        lane = state.lane
        if lane is None or lane.missing is None:
            return
        gaps = lane.gaps()
        is_coming = any(first <= seq <= last for first, last in gaps for seq in state.operations)
        if lane.missing != missing or is_coming:  # that one came, or is just being put on record
            self._watch_gap(state)
            return
        numbers = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in gaps[:8])
        reason = (
            f"operation {numbers} of run {state.model_id} never arrived; those after it were given up after "
            f"{self._limits.gap_seconds:.0f} s. Submit them again, with new numbers"
        )
        self._record(state, self._abandon(state, gaps, lane.held(), reason))

    async def _abandon(
        self, state: RunState, gaps: list[tuple[int, int]], waiting: list[Operation], reason: str
    ) -> None:
        """On record first: were the order to go on before, a replay would wait for the lost numbers again."""
        outcomes = await self._recorder.write(records.abandon, state.run, gaps, waiting, reason)
        if state.lane is not None:
            state.lane.give_up(gaps, waiting)
        for operation, outcome in zip(waiting, outcomes, strict=True):
            self._recorder.settle(operation, outcome)
            self._forget(state, operation)
        self._watch_gap(state)
        self.pump()

    # ── giving work to the engine ─────────────────────────────────────────────────────────────────────

    def pump(self) -> None:
        """Start what can be started. Called after everything that may have made that possible."""
        if self._is_closing:
            return
        self._bring_in()
        while self.slot.is_ready and len(self._turns) < _MOST_TURNS:
            turn = self._next_turn()
            if not turn.operations:
                break
            self._send(turn)

    def _next_turn(self) -> Turn:
        is_isolated = self._isolation.is_on
        if is_isolated and self._isolation.is_busy():
            return Turn()
        waiting = [state for state in self.runs.values() if state.ready]
        if is_isolated:
            waiting = [state for state in waiting if state.has_suspect]
        assert self.slot.info is not None
        budget = self._limits.turn_tokens or 2 * self.slot.info.token_budget
        queues = [Queue(state.run.user_id, state.ready) for state in waiting]
        return next_turn(queues, self.shares.served, budget, alone=is_isolated)

    def _bring_in(self) -> None:
        """Have the engine hold the runs that have something to do."""
        now = time.monotonic()
        waiting = [s for s in self.runs.values() if s.phase == "absent" and s.has_work and s.retry_at <= now]
        if not waiting:
            return
        if not self.slot.is_ready:
            self.slot.start()
            return
        if self._isolation.is_on:
            waiting = [] if self._isolation.is_busy() else [state for state in waiting if state.has_suspect][:1]
        waiting.sort(key=lambda state: state.waiting_since)
        held = [state for state in self.runs.values() if state.phase in ("loaded", "restoring")]
        room = max(0, self._limits.max_loaded_runs - len(held))
        for state in waiting[:room]:
            state.phase = "restoring"
            state.restoring = self._spawn(self._restorer.restore(state))
        self._make_room(len(waiting) - room, held)

    def _make_room(self, num_wanted: int, held: Iterable[RunState]) -> None:
        """Idle runs leave first, the longest unused before others; then those that have had their time."""
        now = time.monotonic()
        latest, unused = now - self._limits.residence_seconds, now - _IDLE_SECONDS
        staying = [state for state in held if state.phase == "loaded" and state.saving is None]
        leaving = [s for s in staying if (s.is_idle and s.last_used <= unused) or s.loaded_at < latest]
        leaving.sort(key=lambda state: (not state.is_idle, state.last_used if state.is_idle else state.loaded_at))
        num_wanted -= sum(state.is_leaving for state in held)
        for state in leaving[: max(0, num_wanted)]:
            self._snapshots.park(state)
        if num_wanted > len(leaving) and self._second_look is None:
            self._second_look = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._look_again)

    def _look_again(self) -> None:
        """Somebody waits for room. That time has passed, for a run that does nothing, is an event of its own."""
        self._second_look = None
        self.pump()

    def _secured(self) -> None:
        self.forget_idle()
        self.on_answer()

    def _restored(self, state: RunState) -> None:
        self._watch_gap(state)
        self.on_answer()

    def _send(self, turn: Turn) -> None:
        """Hand a turn to the engine, all of it before anything else can be sent."""
        if not self._turns:
            self._turn_began = time.monotonic()
        sent = [self._send_barrier(self._take(operation), operation) for operation in turn.barriers]
        commands: list[messages.ForwardBackward] = []
        batched: list[Operation] = []
        for operation in turn.training:
            self._take(operation)
            try:
                commands.append(self._training_command(operation))
                batched.append(operation)
            except Exception as error:
                sent.append(refused(operation, error))
        sent += self._send_batch(batched, commands)
        self._turns.append((turn, sent))
        for answers in sent:
            state = self.runs[answers.operation.lane]
            self._record(state, self._complete(state, answers))
        self._spawn(self._follow(turn, sent))

    def _send_barrier(self, state: RunState, operation: Operation) -> Sent:
        state.is_loading = operation.kind == "load_weights"
        try:
            return send_barrier(self.slot, self._directory, state.run, operation)
        except Exception as error:
            return refused(operation, error)

    def _training_command(self, operation: Operation) -> messages.ForwardBackward:
        command = to_forward_backward(operation)
        if command.loss_fn == "custom":
            self._losses.ensure(self.slot, str(command.loss_fn_config.get("loss_id")))
        return command

    def _send_batch(self, operations: list[Operation], commands: list[messages.ForwardBackward]) -> list[Sent]:
        if not operations:
            return []
        try:
            answers = self.slot.train(messages.TrainBatch(operations=commands))
        except Exception as error:
            return [refused(operation, error) for operation in operations]
        return [Sent(operation, [answer]) for operation, answer in zip(operations, answers, strict=True)]

    def _take(self, operation: Operation) -> RunState:
        state = self.runs[operation.lane]
        assert state.lane is not None
        taken = state.lane.ready.popleft()
        assert taken is operation
        operation.started_at = time.time()
        state.sent.add(operation)
        state.sent_seq = operation.seq_id
        if not operation.is_replay:
            self.shares.charge(operation.user_id, operation.tokens or BARRIER_TOKENS)
        return state

    # ── answers ───────────────────────────────────────────────────────────────────────────────────────

    async def _follow(self, turn: Turn, sent: list[Sent]) -> None:
        """Wait for the engine's part of a turn; recording goes on by itself."""
        await asyncio.wait([answer for answers in sent for answer in answers.futures])
        if any(answers.has_died for answers in sent) or all(turn is not running for running, _ in self._turns):
            return  # the engine ended; when that is told, the turn shows what it was computing
        self._turns = [running for running in self._turns if running[0] is not turn]
        now = time.monotonic()
        self._account([answers.operation for answers in sent], now - self._turn_began)
        self._turn_began = now
        self.on_answer()

    def _account(self, operations: Sequence[Operation], seconds: float) -> None:
        """Share a turn's time among its runs, and see whose snapshot is due."""
        total = sum(operation.tokens or BARRIER_TOKENS for operation in operations)
        for operation in operations:
            operation.deaths = 0
            if (state := self.runs.get(operation.lane)) is None:
                continue
            state.sent.discard(operation)
            state.replays.discard(operation)
            if not state.replays:
                state.deaths = 0
            state.work_seconds += seconds * (operation.tokens or BARRIER_TOKENS) / total
            self.tokens_trained += 0 if operation.is_replay else operation.tokens
            self._snapshots.consider(state)

    async def _complete(self, state: RunState, sent: Sent) -> None:
        """Record what the engine answered."""
        operation, num_deaths = sent.operation, self.slot.num_deaths
        await asyncio.wait(sent.futures)
        if sent.has_died:
            await self._discard(sent)
            return  # it is in the journal, and the next engine computes it
        if sent.sampler_id is not None and sent.futures[0].exception() is None and num_deaths == self.slot.num_deaths:
            self._on_published(sent.sampler_id)
        if (error := sent.error) is not None:
            await self._refuse(state, sent, error)
        elif not operation.is_replay:
            await self._finish(state, sent)

    async def _finish(self, state: RunState, sent: Sent) -> None:
        operation = sent.operation
        if operation.kind == "load_weights":  # it ends with a snapshot, which must not overtake earlier results
            await settled(state, operation.seq_id - 1)
        try:
            results = [future.result() for future in sent.futures]
            outcome = await self._recorder.finish(operation, records.finish_operation, state.run, sent, results)
        except StorageError:
            return  # the server is closing; the operation is computed again at the next start
        except Exception as error:
            await self._refuse(state, sent, error, is_applied=True)
            return
        if operation.kind == "load_weights" and outcome.state == "done" and sent.directory is not None:
            self._snapshots.adopt(state, operation.seq_id, sent.directory, sent.obsolete)
        elif outcome.state != "done":
            await self._discard(sent)
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
            reason = f"operation {operation.seq_id} failed when it was replayed: {error}"
            await self._restorer.corrupt(state, reason)
            return
        await self._fail(state, operation, sent.explain(error))
        # Of a load, which ends with a snapshot, the first part may have been carried out.
        is_applied |= operation.kind == "load_weights" and sent.futures[0].exception() is None
        if is_applied and operation.kind in _CHANGING and state.phase == "loaded":
            # The engine's run is not what the journal says; operations behind it are computed again on the right one.
            self._restorer.drop(state)
        self._loaded(state, operation)

    def _loaded(self, state: RunState, operation: Operation) -> None:
        if operation.kind == "load_weights":
            state.is_loading = False
            self.pump()

    async def _discard(self, sent: Sent) -> None:
        """What the engine has written belongs to nothing."""
        if sent.directory is not None:
            await discard(self._directory, sent.directory)

    async def _fail(self, state: RunState, operation: Operation, error: Exception) -> None:
        await self._recorder.fail(operation, error)
        self._forget(state, operation)

    def _forget(self, state: RunState, operation: Operation) -> None:
        """Its result is on record."""
        if state.operations.get(operation.seq_id) is operation:
            del state.operations[operation.seq_id]
            state.last_used = time.monotonic()
            self._open_bytes -= operation.size
            self.shares.leave(operation.user_id)

    # ── engines come and go ───────────────────────────────────────────────────────────────────────────

    def engine_ended(self, reason: str, is_final: bool) -> None:
        """Set everything back to what the journal has. ``is_final``: no engine can be had for this model."""
        self._blame(reason)
        self._turns.clear()
        for state in self.runs.values():
            state.forget_engine()
        if is_final:
            for state in self.runs.values():
                if state.creation is not None:
                    self._record(state, self._restorer.corrupt(state, reason))

    def _blame(self, reason: str) -> None:
        """Note what the engine may have ended over: the first turn that it had not finished, and runs on their way."""
        unfinished = [[answers.operation for answers in sent if answers.has_died] for _, sent in self._turns]
        operations = next((turn for turn in unfinished if turn), [])
        states = {state for state in self.runs.values() if state.phase == "restoring"}
        states |= {self.runs[operation.lane] for operation in operations if operation.is_replay}
        most = self._limits.max_engine_deaths
        for state in states:
            self._isolation.blame(state)
            if state.deaths >= most:
                text = f"the engine ended {state.deaths} times while it restored run {state.model_id}: {reason}"
                self._record(state, self._restorer.corrupt(state, text))
        for operation in operations:
            if not operation.is_replay:
                self._isolation.blame(operation)
                if operation.deaths >= most:
                    text = f"the engine ended {operation.deaths} times while it computed this: {reason}"
                    state = self.runs[operation.lane]
                    self._record(state, self._fail(state, operation, EngineError(text)))

    def unload(self, state: RunState) -> None:
        if state.is_idle:
            self._snapshots.park(state)

    async def close(self) -> None:
        """Let the turns under way end, record them, and secure every run."""
        self._is_closing = True
        if self._second_look is not None:
            self._second_look.cancel()
        for state in self.runs.values():
            if state.gap is not None:
                state.gap.cancel()
        while tasks := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(tasks)
        if self.slot.is_ready:
            await self._snapshots.save_all(self.runs.values())

    def _record(self, state: RunState, work: Coroutine[Any, Any, None]) -> None:
        """Do something after which the run's journal is different; the run is not laid out from it before."""
        task = self._spawn(work)
        state.recording.add(task)
        task.add_done_callback(state.recording.discard)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the scheduler failed", exc_info=error)
