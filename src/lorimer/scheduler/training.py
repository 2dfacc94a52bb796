"""The runs of one base model: takes their operations in order and gives them to the engine turn by turn.

Up to two turns are with the engine, so that it never waits for this process. The engine computes commands in the order
they are sent, so operations of a run may be sent before earlier ones are answered; one that fails has changed nothing
and those after it go on. When an engine ends, everything it was given is laid out anew from the journal.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from lorimer.engine import messages
from lorimer.errors import Busy, EngineError, InvalidInput
from lorimer.scheduler.answers import Answers
from lorimer.scheduler.background import Background
from lorimer.scheduler.batching import Queue, Turn, next_turn
from lorimer.scheduler.commands import Sent, refused, send_barrier, to_forward_backward
from lorimer.scheduler.engines import EngineSlot
from lorimer.scheduler.gaps import Gaps
from lorimer.scheduler.isolation import Isolation
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.losses import LossRegistry
from lorimer.scheduler.operation import BARRIER_TOKENS, Operation
from lorimer.scheduler.rates import TokenRate
from lorimer.scheduler.recorder import Recorder
from lorimer.scheduler.residents import Residents
from lorimer.scheduler.restoring import Restorer
from lorimer.scheduler.runs import RunState
from lorimer.scheduler.shares import SharedLimit, Shares
from lorimer.scheduler.snapshots import Snapshots
from lorimer.store.directory import DataDirectory
from lorimer.store.runs import Run
from lorimer.types.encoding import read_loss

_MOST_TURNS = 2


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
        self.trained = TokenRate()
        self.on_answer: Callable[[], None] = self.pump
        self._directory, self._limits, self._recorder = directory, limits, recorder
        self._losses, self._isolation = losses, isolation
        self._background = Background("a task of the scheduler failed")
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
        self._residents = Residents(
            self.runs, slot, limits, isolation, self._snapshots, self._restorer, self._background, self.pump
        )
        self._gaps = Gaps(limits.gap_seconds, recorder, self._background, forget=self._forget, on_closed=self.pump)
        self._answers = Answers(
            slot,
            directory,
            recorder,
            self._snapshots,
            self._restorer,
            fail=self._fail,
            forget=self._forget,
            on_loaded=self.pump,
            on_published=on_published,
            max_stored_bytes=limits.max_stored_bytes,
        )
        self._turns: list[tuple[Turn, list[Sent]]] = []
        """With the engine, in the order they were sent."""
        self._turn_began = 0.0
        self._open_bytes = SharedLimit(limits.max_open_bytes)
        self._will_pump = self._is_closing = False

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
        waiting, user_id = self._open_bytes, state.run.user_id
        is_first = not waiting.held_by(user_id) and waiting.held + num_bytes <= 2 * waiting.total
        if waiting.held and not is_first and not waiting.has_room(user_id, num_bytes):
            raise Busy(
                f"operations of {waiting.held} bytes are waiting for {self.slot.name}, {waiting.held_by(user_id)} bytes"
                f" of them yours; {waiting.total} bytes are shared by its users (max_open_bytes): try again in a moment"
            )

    def arrive(self, state: RunState, operation: Operation) -> None:
        """Take an operation that is on record."""
        state.last_used = time.monotonic()
        self.shares.enter(operation.user_id)
        self._open_bytes.take(operation.user_id, operation.size)
        is_in_time = state.arrive(operation)
        if state.phase == "corrupted":
            self._background.record(state, self._fail(state, operation, InvalidInput(state.error)))
        elif not is_in_time:
            reason = f"operation {operation.seq_id} came when later ones had been computed; use a new seq_id"
            self._background.record(state, self._fail(state, operation, InvalidInput(reason)))
        self._gaps.watch(state)
        self.pump()

    def take_up(self, state: RunState, operation: Operation) -> None:
        """Take an operation that an earlier server had on record."""
        state.operations[operation.seq_id] = operation
        self.shares.enter(operation.user_id)

    def skip(self, state: RunState, seq_id: int) -> None:
        """A number that was refused has gone by."""
        state.skip(seq_id)
        self._gaps.watch(state)
        self.pump()

    def create(self, state: RunState, creation: Operation) -> None:
        state.creation = creation
        self.pump()

    # ── giving work to the engine ─────────────────────────────────────────────────────────────────────

    def pump(self) -> None:
        """Start what can be started. Called after everything that may have made that possible.

        Once for all of them that happen together, so that operations put on record together are computed together.
        """
        if not self._will_pump:
            self._will_pump = True
            asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        self._will_pump = False
        if self._is_closing:
            return
        self._residents.bring_in()
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

    def _secured(self) -> None:
        self.forget_idle()
        self.on_answer()

    def _restored(self, state: RunState) -> None:
        self._gaps.watch(state)
        self.on_answer()

    def _send(self, turn: Turn) -> None:
        """Hand a turn to the engine, all of it before anything else can be sent."""
        if not self._turns:
            self._turn_began = time.monotonic()
        sent = [self._send_barrier(self._take(operation), operation) for operation in turn.barriers]
        commands: list[messages.EncodedForwardBackward] = []
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
            self._background.record(state, self._answers.complete(state, answers))
        self._background.spawn(self._follow(turn, sent))

    def _send_barrier(self, state: RunState, operation: Operation) -> Sent:
        state.is_loading = operation.kind == "load_weights"
        try:
            return send_barrier(self.slot, self._directory, state.run, operation)
        except Exception as error:
            return refused(operation, error)

    def _training_command(self, operation: Operation) -> messages.EncodedForwardBackward:
        command = to_forward_backward(operation)
        loss_fn, config = read_loss(command.payload)
        if loss_fn == "custom":
            self._losses.ensure(self.slot, str(config.get("loss_id")))
        return command

    def _send_batch(self, operations: list[Operation], commands: list[messages.EncodedForwardBackward]) -> list[Sent]:
        if not operations:
            return []
        try:
            answers = self.slot.train(messages.TrainBatch(operations=[*commands]))
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
        state.sent_seq, state.has_had_turn = operation.seq_id, True
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
            self.trained.add(0 if operation.is_replay else operation.tokens)
            self._snapshots.consider(state)

    async def _fail(self, state: RunState, operation: Operation, error: Exception) -> None:
        await self._recorder.fail(operation, error)
        self._forget(state, operation)

    def _forget(self, state: RunState, operation: Operation) -> None:
        """Its result is on record."""
        if state.operations.get(operation.seq_id) is operation:
            del state.operations[operation.seq_id]
            state.last_used = time.monotonic()
            self._open_bytes.give_back(operation.user_id, operation.size)
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
                    self._background.record(state, self._restorer.corrupt(state, reason))

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
                self._background.record(state, self._restorer.corrupt(state, text))
        for operation in operations:
            if not operation.is_replay:
                self._isolation.blame(operation)
                if operation.deaths >= most:
                    text = f"the engine ended {operation.deaths} times while it computed this: {reason}"
                    state = self.runs[operation.lane]
                    self._background.record(state, self._fail(state, operation, EngineError(text)))

    def unload(self, state: RunState) -> None:
        if state.is_idle:
            self._snapshots.park(state, is_forced=False)

    async def close(self) -> None:
        """Let the turns under way end, record them, and secure every run."""
        self._is_closing = True
        self._residents.close()
        self._gaps.stop(self.runs.values())
        await self._background.wait()
        if self.slot.is_ready:
            await self._snapshots.save_all(self.runs.values())
