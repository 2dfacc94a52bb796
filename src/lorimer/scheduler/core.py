"""The scheduler of one engine: decides what is committed, computed and answered, and in what order.

`Core.handle` takes the events of one turn of the loop and returns the effects they call for. It is synchronous, does no
I/O, reads no clock and takes no callbacks: `driver.py` carries events in and performs effects. Sampling is in
``samples.py``, bringing runs into the engine in ``restoring.py``, securing them in ``snapshots.py``, and what to do
next in ``policies.py``. The cost of an event does not depend on the number of runs that have nothing to do with it.
"""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lorimer.engine import messages
from lorimer.errors import (
    Cancelled,
    CheckpointError,
    EngineDied,
    EngineError,
    Gone,
    InvalidInput,
    LorimerError,
    StorageError,
)
from lorimer.scheduler import engine_deaths, events, journal, placement, policies, restoring, snapshots
from lorimer.scheduler.batching import SentTurn, Turn
from lorimer.scheduler.custom_loss import LossChecks
from lorimer.scheduler.engine_commands import barrier_commands, explain
from lorimer.scheduler.events import Admit, Commit, Discard, Effect, Event, Refuse, Report, Resolve, Send
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.payloads import Load, SaveEphemeral, decode_payload
from lorimer.scheduler.runs import REPLAYED, Flight, Operation, Outcome, RunState, late
from lorimer.scheduler.samples import Sample, Sampling
from lorimer.scheduler.shares import FairShare, SharedLimit
from lorimer.scheduler.stats import TokenRate
from lorimer.store.futures import FutureRow, FutureState
from lorimer.store.runs import Run


class Core:
    """The state of one engine's scheduler, and every decision about it."""

    def __init__(
        self, name: str, limits: SchedulerLimits, weights: Path, snapshots: Path, seed: int, place: str = ""
    ) -> None:
        """``seed`` generates the names of the directories that engines write; they must never repeat.

        ``place`` is the name of this replica of the base model ``name``.
        """
        self.name, self.limits, self.place = name, limits, place
        self.weights, self.snapshots = weights, snapshots
        self.now = 0.0
        self.engine = 0
        """How many engines have ended; distinguishes replies of an earlier engine."""
        self.is_ready = self.is_starting = False
        self.token_budget = 0
        self.runs: dict[str, RunState] = {}
        """Runs in the engine, and runs with work to do."""
        self.held: dict[str, RunState] = {}
        """Runs being restored or loaded."""
        self.ready: dict[str, RunState] = {}
        """Runs with operations that can be sent to the engine now."""
        self.leaving: dict[str, RunState] = {}
        """Runs being saved before their eviction."""
        self.waiting = policies.WaitingRuns()
        self.open: dict[str, Operation] = {}
        """Committed requests without a result, by request_id."""
        self.turns: list[SentTurn] = []
        """Turns sent to the engine, in order."""
        self.turn_began = 0.0
        self.fair = FairShare()
        self.trained = TokenRate()
        self.open_bytes = SharedLimit(limits.max_open_bytes)
        self.num_open = 0
        self.sampling = Sampling(self)
        self.losses = LossChecks(self)
        self.early = policies.EarlyForward(self)
        self.suspects: list[Operation | RunState] = []
        self.last_eviction = policies.Eviction()
        self.is_evict_timer_set = False
        self.idle = policies.Idle() if placement.is_full(place) else None
        """When an engine that ends without work had its last; None for one that stays."""
        self.is_closing = self.is_closed = self.is_drain_over = False
        self.is_isolating = False
        """Only suspects run, one at a time, to find out what kills engines."""
        self.touched: dict[RunState, None] = {}
        """Runs that changed, to be looked at before this turn of the loop ends."""
        self._effects: list[Effect] = []
        self.emit = self._effects.append
        """Adds an effect to those of this turn."""
        self._commits: dict[journal.Transaction, RunState | None] = {}
        self._names = random.Random(seed)

    def handle(self, happened: Iterable[Event], now: float) -> list[Effect]:
        """Process events, decide what to do next, and return the effects in the order they must be performed."""
        self.now = now
        for event in happened:
            self._dispatch(event)
        policies.decide(self)
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    def _dispatch(self, event: Event) -> None:  # noqa: C901 (one case for each event)
        match event:
            case events.Submitted(operation=Sample() as sample):
                self.sampling.submit(sample)
            case events.Submitted(operation=operation, run=None):
                self.losses.submit(operation)
            case events.Submitted(operation=operation, run=Run() as row):
                self._submit(operation, row)
            case events.Committed(transaction=transaction, result=result):
                self._end_commit(transaction)
                self._committed(transaction, result)
            case events.Replied(to=to, reply=reply):
                self._replied(to, reply)
            case events.CreateSubmitted(transaction=transaction):
                self.commit(transaction)
            case events.UnloadSubmitted(operation=operation, run=row):
                self.commit(journal.AcceptUnload(operation, row.model_id))
            case events.ConsumeSubmitted(operation=operation, run=row, reason=reason):
                self.commit(journal.Consume(operation, row, reason), self.runs.get(row.model_id))
            case events.Arrived():
                self._arrived(event)
            case events.Unloaded(model_id=model_id):
                self._unload(model_id)
            case events.Refused(model_id=model_id, seq_id=seq_id):
                self._skip(model_id, seq_id)
            case events.CommitFailed(transaction=transaction, error=error):
                self._end_commit(transaction)
                self._commit_failed(transaction, error)
            case events.EngineReady(info=info):
                self.is_ready, self.is_starting, self.token_budget = True, False, info.token_budget
            case events.EngineEnded(reason=reason, is_final=is_final):
                engine_deaths.engine_ended(self, reason, is_final)
            case events.TimerFired(timer=timer):
                policies.timer_fired(self, timer)
            case events.Cancelled(request_id=request_id):
                self.sampling.cancel(request_id)
            case events.Streamed(request_id=request_id, num_tokens=num_tokens):
                self.sampling.streamed(request_id, num_tokens)
            case events.Verified(model_id=model_id, name=name, is_whole=is_whole):
                if (run := self.runs.get(model_id)) is not None:
                    snapshots.verified(self, run, name, is_whole)
            case events.Expired(model_ids=model_ids):
                restoring.expire(self, model_ids)
            case events.Closing():
                self.is_closing = True
                self.emit(events.SetTimer(events.Timer("drain"), policies.DRAIN_SECONDS))

    # ── effects ───────────────────────────────────────────────────────────────────────────────────────

    def commit(self, transaction: journal.Transaction, run: RunState | None = None) -> None:
        """Commit a transaction. ``run`` is not restored from its journal before the transaction ends."""
        self._commits[transaction] = run
        if run is not None:
            run.count_commit(1)
        self.emit(Commit(transaction))

    def _end_commit(self, transaction: journal.Transaction) -> None:
        run = self._commits.pop(transaction)
        if run is not None:
            run.count_commit(-1)
            self.touch(run)

    @property
    def is_committing(self) -> bool:
        return bool(self._commits)

    def report(self, message: str, run: RunState, error: BaseException | None = None) -> None:
        self.emit(Report("error", message, run.model_id, error))

    def new_name(self) -> str:
        """Return a unique name for a directory."""
        return self._names.randbytes(16).hex()

    def touch(self, run: RunState) -> None:
        """Mark a run to be looked at again before this turn of the loop ends."""
        self.touched[run] = None

    # ── accepting operations of runs ──────────────────────────────────────────────────────────────────

    def run_of(self, row: Run) -> RunState:
        run = self.runs.get(row.model_id)
        if run is None:
            run = self.runs[row.model_id] = RunState(row, self.now)
        return run

    def _submit(self, operation: Operation, row: Run) -> None:
        run = self.run_of(row)
        if (error := policies.objection(self, run, operation)) is not None:
            self.emit(Refuse(operation, error))
            return
        operation.received = self.now
        # From here on, a run that is being restored knows that this seq_id is about to be committed.
        run.operations.setdefault(operation.seq_id, operation)
        moves_run = run.row.replica != self.place
        has_passed = run.has_passed(operation.seq_id)
        self.commit(journal.Accept(operation, has_passed, self.limits.max_stored_bytes, moves_run))
        if operation.kind == "forward":
            self.early.begin(run, operation)

    def adopts(self, operation: Operation, row: FutureRow, is_new: bool) -> bool:
        """Return whether ``operation`` executes the row just committed.

        A row that nobody executes is adopted too: its first submit was answered with an error although it was
        committed. The row of another replica is executed there.
        """
        is_mine = row.place in (None, self.place)
        if not is_new and (row.state != "queued" or row.request_id in self.open or not is_mine):
            return False
        operation.request_id = row.request_id
        self.open[row.request_id] = operation
        return True

    def _accepted(self, operation: Operation, row: FutureRow, is_new: bool) -> None:
        run = self.runs[operation.lane]
        if self.adopts(operation, row, is_new):
            self._arrive(run, operation)
        else:
            self._withdraw(operation)
        self.emit(Admit(operation, row.request_id, operation.lane))

    def _withdraw(self, operation: Operation) -> None:
        """Forget an operation that was not accepted."""
        run = self.runs.get(operation.lane)
        if run is not None and operation.status == "received" and run.operations.get(operation.seq_id) is operation:
            del run.operations[operation.seq_id]
            self.touch(run)

    def _skip(self, model_id: str, seq_id: int) -> None:
        if (run := self.runs.get(model_id)) is not None:
            run.skip(seq_id)
            self.touch(run)

    def _arrive(self, run: RunState, operation: Operation) -> None:
        self.fair.enter(operation.user_id)
        self.open_bytes.take(operation.user_id, operation.size)
        self.num_open += 1
        is_in_time = run.accept(operation, self.now)
        if run.phase == "corrupted":
            self.fail(operation, InvalidInput(run.error))
        elif not is_in_time:
            self.fail(operation, late(operation))
        self.touch(run)

    def _arrived(self, event: events.Arrived) -> None:
        """Execute an operation that another process or an earlier server accepted."""
        operation = event.operation
        if operation.request_id in self.open:
            return
        operation.received = self.now
        self.open[operation.request_id] = operation
        if operation.is_suspect:
            self.suspects.append(operation)
        if isinstance(operation, Sample):
            self.sampling.arrive(operation)
        elif event.run is None:
            self.losses.arrive(operation)
        else:
            run = self.run_of(event.run)
            if event.is_creation:
                operation.advance("held")
                run.begin_creation(operation)
                self.touch(run)
            else:
                self._arrive(run, operation)

    # ── sending ───────────────────────────────────────────────────────────────────────────────────────

    def send_turn(self, turn: Turn) -> None:
        """Send a whole turn to the engine before anything else."""
        if not self.turns:
            self.turn_began = self.now
        sent = SentTurn(turn.operations)
        self.turns.append(sent)
        undecodable: list[tuple[Operation, Flight, Exception]] = []
        for operation in turn.barriers:
            try:
                payload = decode_payload(operation.payload)
            except Exception as error:
                undecodable.append((operation, self._take(sent, operation, Flight()), error))
            else:
                commands, target = barrier_commands(self, operation, payload)
                to = events.OperationReply(
                    operation, self._take(sent, operation, Flight(len(commands), payload, target))
                )
                for command in commands:
                    self.emit(Send(command, to))
        unsent: list[Operation] = []
        answered: list[tuple[Operation, Flight]] = []
        for operation in turn.training:
            flight = self._take(sent, operation, operation.early or Flight())
            if not flight.is_early:
                unsent.append(operation)
            elif flight.is_complete:
                answered.append((operation, flight))
        if unsent:
            self.emit(events.SendBatch(unsent))
        for operation, flight in answered:
            self._complete(operation, flight)
        for operation, flight, reason in undecodable:
            self._replied(events.OperationReply(operation, flight), reason)

    def _take(self, sent: SentTurn, operation: Operation, flight: Flight) -> Flight:
        run = self.runs[operation.lane]
        run.send(operation, flight, self.now)
        self.touch(run)
        cost = operation.cost
        sent.unanswered[flight] = operation
        sent.cost += cost
        if not operation.is_replay:
            self.fair.charge(operation.user_id, cost)
        return flight

    # ── replies ───────────────────────────────────────────────────────────────────────────────────────

    def _replied(self, to: events.ReplyTo, reply: messages.Result | Exception) -> None:
        if isinstance(reply, EngineDied):
            return  # `EngineEnded` follows, and resets everything
        match to:
            case events.OperationReply(operation=operation, flight=flight):
                flight.receive(reply)
                if flight.is_early:
                    self.early.replied(flight)
                if flight.is_complete and operation.flight is flight:
                    self._complete(operation, flight)
                elif flight.is_complete:
                    self._discard_stale(flight)
            case events.RestoreReply(model_id=model_id, restore=number):
                run = self.runs.get(model_id)
                if run is not None and run.restore is not None and run.restore.number == number:
                    restoring.replied(self, run, reply)
            case events.SnapshotReply(model_id=model_id, name=name):
                run = self.runs.get(model_id)
                if run is not None and run.saving is not None and run.saving.name == name:
                    snapshots.replied(self, run, reply)
                else:
                    self.emit(Discard("snapshots", [name]))
            case events.SamplerReply(engine=engine, name=name):
                if engine == self.engine:
                    self.sampling.sampler_loaded(name, reply)

    def _discard_stale(self, flight: Flight) -> None:
        """Delete what the engine wrote for an operation that is no longer in this flight."""
        self._account(flight)
        if flight.target is not None:
            self.emit(Discard("snapshots" if isinstance(flight.payload, Load) else "weights", [flight.target]))

    def _complete(self, operation: Operation, flight: Flight) -> None:
        """Process the engine's last reply to an operation."""
        if isinstance(operation, Sample):
            self.sampling.complete(operation, flight)
            return
        if operation.kind == "create_custom_loss":
            self.losses.complete(operation, flight)
            return
        run = self.runs[operation.lane]
        run.running.discard(operation)
        self._account(flight)
        is_published = isinstance(flight.payload, SaveEphemeral) and not isinstance(flight.replies[0], Exception)
        if is_published and flight.target is not None:
            self.sampling.published(flight.target)
        if flight.error is not None:
            self._refuse(run, operation, flight, flight.error)
        elif operation.is_replay:
            operation.advance("done")
            if run.loading is operation:
                run.end_load()
        else:
            operation.advance("committing")
            operation.answered = self.now
            if operation.kind != "load_weights":  # a load ends with a snapshot, which `snapshots.advance_load` commits
                self.commit(
                    journal.FinishOperation(operation, run.row, flight, self.weights, self.limits.max_stored_bytes), run
                )
        self.touch(run)

    def _account(self, flight: Flight) -> None:
        """Charge a turn's time to its runs once all its replies have arrived."""
        for turn in self.turns:
            if turn.unanswered.pop(flight, None) is not None and not turn.unanswered:
                break
        else:
            return
        self.turns.remove(turn)
        seconds, self.turn_began = self.now - self.turn_began, self.now
        for operation in turn.operations:
            operation.deaths = 0
            if (run := self.runs.get(operation.lane)) is not None:
                run.credit(operation, seconds * operation.cost / turn.cost)
                self.touch(run)
            self.trained.add(0 if operation.is_replay else operation.tokens, self.now)

    def _refuse(
        self, run: RunState, operation: Operation, flight: Flight, error: Exception, *, is_applied: bool = False
    ) -> None:
        """Fail an operation. ``is_applied``: the engine executed it, but its result cannot be committed."""
        if flight.target is not None:
            self.emit(Discard("snapshots" if isinstance(flight.payload, Load) else "weights", [flight.target]))
        if not isinstance(error, LorimerError):
            self.report("an operation failed", run, error)
            error = EngineError(f"the operation failed: {type(error).__name__}")
        if operation.is_replay:
            self.corrupt(run, f"operation {operation.seq_id} failed when it was replayed: {error}")
            return
        self.fail(operation, explain(flight, error))
        # The engine may have executed the first command of a load, which ends with a snapshot.
        is_applied |= operation.kind == "load_weights" and not isinstance(flight.replies[0], Exception)
        if run.loading is operation:
            run.end_load()
        if is_applied and operation.kind in REPLAYED and run.phase == "loaded":
            # The engine's run differs from the journal: restore it, and replay what follows.
            restoring.drop(self, run)

    def redact(self, text: str) -> str:
        """Replace the path of the data directory, which users must not see."""
        directory = str(self.weights.parent)
        return text.replace(f"{directory}/", "").replace(directory, "the data directory")

    # ── ends ──────────────────────────────────────────────────────────────────────────────────────────

    def fail(self, operation: Operation, error: Exception, state: FutureState = "failed") -> None:
        """Commit the failure of an operation. Its waiters are notified after the commit."""
        operation.advance("committing")
        operation.flight = None
        is_users = isinstance(error, InvalidInput | CheckpointError | Gone | Cancelled)
        fail = journal.Fail(operation, self.redact(str(error)), "user" if is_users else "server", state)
        self.commit(fail, self.runs.get(operation.lane))

    def resolve(self, operation: Operation, outcome: Outcome) -> None:
        """Finish an operation whose end is committed."""
        operation.advance("done" if outcome.state == "done" else "failed")
        operation.flight = None
        self.open.pop(operation.request_id, None)
        run = self.runs.get(operation.lane)
        if run is not None and run.forget(operation, self.now):
            self.open_bytes.give_back(operation.user_id, operation.size)
            self.num_open -= 1
            self.fair.leave(operation.user_id)
            self.touch(run)
        self.emit(Resolve(operation, outcome))

    def corrupt(self, run: RunState, reason: str) -> None:
        """Mark a run as corrupted and fail everything that waits for it."""
        if run.phase == "loaded":
            restoring.drop(self, run)
        reason = self.redact(reason)
        run.corrupt(reason)
        self.commit(journal.MarkCorrupted(run.model_id, reason), run)
        if (creation := run.end_creation(self.now)) is not None:
            self.fail(creation, InvalidInput(reason))
        for operation in list(run.operations.values()):
            if operation.is_open and operation.status != "committing":
                self.fail(operation, InvalidInput(reason))
        self.touch(run)

    def _committed(self, transaction: journal.Transaction, result: Any) -> None:  # noqa: C901 (one case for each)
        match transaction, result:
            case journal.Accept(operation=Sample() as sample), (row, is_new):
                self.sampling.accepted(sample, row, is_new)
            case journal.Accept(operation=operation), (row, is_new):
                self._accepted(operation, row, is_new)
            case journal.AcceptRun(operation=operation), (row, future, is_new):
                self._created(operation, row, future, is_new)
            case journal.AcceptLoss(operation=operation), (row, is_new):
                self.losses.accepted(operation, row, is_new)
            case journal.AcceptUnload(operation=operation, model_id=model_id), Outcome() as outcome:
                self._unload(model_id)
                self.emit(Resolve(operation, outcome))
                self.emit(Admit(operation, operation.request_id, model_id))
            case journal.Consume(operation=operation, run=row), is_new:
                if is_new:
                    self._skip(row.model_id, operation.seq_id)
                self.emit(Admit(operation, operation.request_id, row.model_id))
            case ((journal.ReadJournal() | journal.FallBack()), found):
                restoring.journal_read(self, transaction, found)
            case journal.FinishCreation(run=row), Outcome() as outcome:
                restoring.creation_committed(self, self.runs[row.model_id], outcome)
            case journal.FinishOperation(operation=operation, flight=flight), journal.Finished() as finished:
                self._finished(operation, flight, finished)
            case journal.SetSnapshot(model_id=model_id, name=name), (row, obsolete):
                snapshots.committed(self, model_id, name, row, obsolete)
            case placement.Release(model_id=model_id), bool() as is_released:
                restoring.released(self, self.runs.get(model_id), is_released)
            case journal.FinishLoss(operation=operation, payload=payload), Outcome() as outcome:
                self.losses.committed(operation, payload, outcome)
            case (
                (journal.Fail(operation=operation) | journal.FinishSample(operation=operation)),
                Outcome() as outcome,
            ):
                self.resolve(operation, outcome)
            case journal.Abandon(operations=operations, run=row), list() as outcomes:
                policies.gaps_abandoned(self, self.runs[row.model_id], operations, outcomes)
            case journal.FindWeights(weights_id=weights_id), found:
                self.sampling.weights_found(weights_id, found)

    def _commit_failed(self, transaction: journal.Transaction, error: Exception) -> None:
        is_closing = isinstance(error, StorageError)
        match transaction:
            case journal.Accept(operation=operation) | journal.AcceptLoss(operation=operation):
                self._withdraw(operation)
                self.emit(Refuse(operation, error))
            case journal.AcceptRun(operation=operation) | journal.AcceptUnload(operation=operation):
                self.emit(Refuse(operation, error))
            case journal.Consume(operation=operation):
                self.emit(Refuse(operation, error))
            case journal.FinishOperation(operation=operation, flight=flight, run=row) if not is_closing:
                self._refuse(self.runs[row.model_id], operation, flight, error, is_applied=True)
            case journal.FinishSample(operation=Sample() as sample) if not is_closing:
                self.sampling.fail(sample, error)
            case journal.FinishLoss(operation=operation) if not is_closing:
                self.fail(operation, error)
            case journal.SetSnapshot(model_id=model_id, name=name):
                snapshots.commit_failed(self, self.runs[model_id], name, error)
            case journal.ReadJournal(model_id=model_id) | journal.FallBack(model_id=model_id):
                restoring.failed(self, self.runs[model_id], transaction.restore, error)
            case journal.FinishCreation(run=row) if not is_closing:
                restoring.failed(self, self.runs[row.model_id], None, error)
            case journal.FindWeights(weights_id=weights_id):
                self.sampling.weights_unknown(weights_id, error)
            case _:
                self.emit(Report("error", f"{type(transaction).__name__} was not committed", error=error))

    def _created(self, creation: Operation, row: Run, future: FutureRow, is_new: bool) -> None:
        if self.adopts(creation, future, is_new):
            creation.received = self.now
            creation.advance("held")
            run = self.run_of(row)
            run.begin_creation(creation)
            self.touch(run)
        self.emit(Admit(creation, future.request_id, row.model_id))

    def _finished(self, operation: Operation, flight: Flight, finished: journal.Finished) -> None:
        run = self.runs[operation.lane]
        if finished.outcome.state != "done" and flight.target is not None:
            self.emit(Discard("snapshots" if isinstance(flight.payload, Load) else "weights", [flight.target]))
        elif finished.snapshot is not None:
            snapshots.adopt(self, run, *finished.snapshot)
        if run.loading is operation:
            run.end_load()
        self.resolve(operation, finished.outcome)

    # ── engines come and go ───────────────────────────────────────────────────────────────────────────

    def start_engine(self) -> None:
        if not self.is_starting and not self.is_closing:
            self.is_starting = True
            self.emit(events.StartEngine())

    def stop_engine(self) -> None:
        """End an engine that holds no run and computes nothing."""
        self.is_ready = self.is_starting = False
        self.engine += 1
        self.sampling.engine_ended("it had nothing to do", False)
        self.emit(events.StopEngine())

    def blame(self, suspect: Operation | RunState) -> None:
        suspect.blame()
        if suspect not in self.suspects:
            self.suspects.append(suspect)

    @property
    def is_busy(self) -> bool:
        """Whether the engine is computing anything."""
        is_moving = any(run.phase == "restoring" or run.saving is not None for run in self.held.values())
        return bool(self.turns) or self.early.is_running or is_moving or self.sampling.num_running > 0

    # ── what else happens ─────────────────────────────────────────────────────────────────────────────

    def _unload(self, model_id: str) -> None:
        run = self.runs.get(model_id)
        if run is not None and run.is_idle:
            snapshots.park(self, run, is_forced=False)
            if self.idle is not None:
                self.idle.is_over = True
