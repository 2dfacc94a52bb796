"""Runs one core: collects its events, passes them in turn by turn, and performs the effects it asks for.

Everything that waits is here: transactions, the engine, timers, files. All decisions are in the core.
"""

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lorimer import types
from lorimer.engine import messages
from lorimer.engine.config import EngineConfig
from lorimer.engine.launch import Launcher
from lorimer.engine.messages import ModelInfo, SampleProgress
from lorimer.errors import Busy, EngineDied, EngineError, LorimerError, StorageError
from lorimer.scheduler import events, journal, spans
from lorimer.scheduler.core import Core
from lorimer.scheduler.custom_loss import register_command
from lorimer.scheduler.engines import EngineSlot
from lorimer.scheduler.events import Effect, Event, OperationReply, Replied
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.payloads import CreateLoss, Load, decode_payload
from lorimer.scheduler.placement import Load as ReplicaLoad
from lorimer.scheduler.placement import kind_of
from lorimer.scheduler.results import Results
from lorimer.scheduler.runs import Flight, Journal, Operation, QueueState
from lorimer.scheduler.samples import Sample
from lorimer.scheduler.stats import ServedModel, queue_state
from lorimer.scheduler.streaming import DirectSample, new_sample
from lorimer.scheduler.translate import engine_sample
from lorimer.scheduler.usage_buffer import UsageBuffer
from lorimer.store import tokenizers
from lorimer.store.database import Store
from lorimer.store.scratch import Kind, Scratch
from lorimer.types.encoding import read_loss

log = logging.getLogger("lorimer.scheduler")

MAX_FULL_SAMPLERS = 2
"""Copies of the weights of full runs that one engine keeps for sampling; each takes as much memory as the model."""
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 30.0


@dataclass(frozen=True)
class _FetchFailed(events.NoReply):
    """Stands for ``to`` in a command whose directory could not be fetched: the reply is ``error``.

    The command is sent all the same, so that replies arrive in the order of commands.
    """

    to: events.ReplyTo
    error: LorimerError


class Driver:
    """One replica of a base model: its core, its engine, and the loop that runs them."""

    def __init__(
        self,
        name: str,
        place: str,
        config: EngineConfig,
        store: Store,
        scratch: Scratch,
        limits: SchedulerLimits,
        results: Results,
        usage: UsageBuffer,
        known_losses: dict[str, CreateLoss],
        launcher: Launcher,
    ) -> None:
        """``name`` is the base model, ``place`` the replica. All drivers of a process share ``known_losses``."""
        self.name, self.place, self.kind = name, place, kind_of(place)
        directory = scratch.directory
        if config.vllm is not None:
            limits = dataclasses.replace(limits, max_loaded_samplers=config.vllm.max_loras)
        elif config.method == "full":
            limits = dataclasses.replace(limits, max_loaded_runs=1, max_loaded_samplers=MAX_FULL_SAMPLERS)
        self.core = Core(name, limits, directory.weights, directory.snapshots, secrets.randbits(128), place)
        self.slot = EngineSlot(name, config, self, launcher, stall_seconds=limits.stall_seconds)
        self.streams: dict[str, DirectSample] = {}
        """Direct samples in progress, by request_id."""
        self._store, self._scratch, self._results, self._usage = store, scratch, results, usage
        self._known_losses = known_losses
        self._registered_losses: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self._events: deque[object] = deque()
        """For the next turn."""
        self._is_turn_due = False
        self._failed: asyncio.Future[None] = self._loop.create_future()
        """Gets the exception of a turn that fails."""
        self._submits: dict[Operation, asyncio.Future[events.Admit]] = {}
        self._engine_waiters: list[asyncio.Future[ModelInfo]] = []
        self._background: set[asyncio.Future[None]] = set()
        self._commits: set[asyncio.Future[object]] = set()
        """Transactions in progress."""
        self._transfers: set[asyncio.Future[None]] = set()
        """Uploads before transactions and fetches before commands; cancelled at the end."""
        self._is_storage_given_up = self._is_ended = False
        self._closed = asyncio.Event()

    # ── what the scheduler calls ──────────────────────────────────────────────────────────────────────

    def load(self) -> ReplicaLoad:
        core = self.core
        num_samples = core.sampling.num_waiting + core.sampling.num_running
        is_usable = self.slot.is_ready if self.kind == "sampler" else self.slot.state != "failed"
        return ReplicaLoad(len(core.runs), core.limits.max_loaded_runs, num_samples, core.open_bytes.held, is_usable)

    def holds(self, model_id: str) -> bool:
        """Return whether a run must stay here: it is in the engine, has work, or a request for it is arriving."""
        run = self.core.runs.get(model_id)
        is_held = run is not None and not run.is_forgettable
        return is_held or any(operation.lane == model_id for operation in self._submits)

    @property
    def is_releasable(self) -> bool:
        """Whether another process may compute this replica: nothing runs here, and nothing waits that could."""
        if self.slot.state not in ("idle", "failed") or self._events or self.streams or self._commits:
            return False
        waiting = list(self.core.open.values())
        creates = any(operation.lane.endswith(":models") for operation in waiting)
        return not waiting or (self.slot.refusal is not None and not creates)

    async def submit(self, operation: Operation, event: Event) -> events.Admit:
        """Submit a request to the core and wait until it is accepted.

        The request continues if the caller is cancelled.
        """
        answer: asyncio.Future[events.Admit] = self._loop.create_future()
        self._submits[operation] = answer
        self.post(event)
        return await asyncio.shield(answer)

    async def info(self) -> ModelInfo:
        """Return the engine's description of its model; start the engine if necessary."""
        return self.slot.info if self.slot.info is not None else await self.ready()

    async def ready(self) -> ModelInfo:
        """Wait for a ready engine; start it if necessary."""
        if self.slot.is_ready and self.slot.info is not None:
            return self.slot.info
        if self.slot.state == "closed":
            raise Busy("the server is shutting down")
        self.slot.start()
        waiter: asyncio.Future[ModelInfo] = self._loop.create_future()
        self._engine_waiters.append(waiter)
        return await waiter

    def cancel(self, request_id: str) -> None:
        self.post(events.Cancelled(request_id))

    def queue_state(self, operation: Operation) -> tuple[QueueState, str]:
        """Return why an operation is not finished, in a readable form."""
        return queue_state(self.name, self.slot, self.core, operation)

    def start_sample(
        self,
        user_id: str,
        weights_id: str | None,
        request: types.SampleRequest,
        grammar: str = "",
        stream: bool = False,
    ) -> DirectSample:
        """Enqueue a direct sample. Raise `Busy` if the queue is full."""
        if (error := self.core.sampling.objection(user_id)) is not None:
            raise error
        sample = new_sample(self.name, user_id, weights_id, request, grammar, stream)
        direct = self.streams[sample.request_id] = DirectSample(sample, self._leave)
        self.post(events.Submitted(sample))
        return direct

    def _leave(self, request_id: str) -> None:
        """Cancel a direct sample whose caller has gone."""
        if request_id in self.streams:
            self.cancel(request_id)

    def status(self) -> ServedModel:
        core, slot, now = self.core, self.slot, time.monotonic()
        return ServedModel(
            name=self.name,
            replica=self.place,
            state="idle" if slot.state == "closed" else slot.state,
            stage=slot.stage,
            info=slot.info,
            error=slot.error,
            num_deaths=slot.num_deaths,
            num_loaded_runs=sum(run.phase == "loaded" for run in core.held.values()),
            num_loaded_samplers=len(core.sampling.samplers),
            num_open_operations=core.num_open,
            num_waiting_samples=core.sampling.num_waiting,
            num_running_samples=core.sampling.num_running,
            tokens_trained=core.trained.total,
            tokens_sampled=core.sampling.sampled.total,
            training_rate=core.trained.per_second(now),
            sampling_rate=core.sampling.sampled.per_second(now),
            pids=() if slot.pid is None else (slot.pid,),
        )

    async def drain(self) -> None:
        """Finish what is being computed and take snapshots."""
        self.post(events.Closing())
        await self._closed.wait()

    def stop_waiting_for_storage(self) -> None:
        """Stop retrying transactions that the storage refuses. The next start recovers their operations."""
        self._is_storage_given_up = True

    async def end(self, reason: str = "the server is shutting down") -> None:
        """Stop the engine, and fail all waiters except those of committed requests."""
        self.stop_waiting_for_storage()
        self._is_ended = True
        await self.slot.close()
        self._fail_engine_waiters(Busy(reason))
        for transfer in self._transfers:
            transfer.cancel()
        if self._background:
            await asyncio.wait(self._background)
        while self._commits:
            await asyncio.wait(self._commits)
        for answer in self._submits.values():
            if not answer.done():
                answer.set_exception(Busy(reason))
                answer.exception()
        for stream in list(self.streams.values()):
            stream.resolve(Busy(reason))

    # ── the loop ──────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Wait until cancelled. An exception of a turn is a bug: the core's state cannot be trusted after it."""
        await self._failed

    def post(self, event: object) -> None:
        """Add an event, on the event loop. Any number of events makes one turn."""
        self._events.append(event)
        if not self._is_turn_due:
            self._is_turn_due = True
            self._loop.call_soon(self._turn)

    def post_threadsafe(self, event: object) -> None:
        """Add an event from any thread."""
        self._events.append(event)
        if not self._is_turn_due:
            self._is_turn_due = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._turn)

    def _turn(self) -> None:
        """Pass all events to the core, and perform the effects it asks for."""
        self._is_turn_due = False  # reset before taking events, so that one that arrives meanwhile makes another turn
        if self._failed.done():
            return
        try:
            happened: list[Event] = []
            while self._events:
                if (event := self._observe(self._events.popleft())) is not None:
                    happened.append(event)
            for effect in self.core.handle(happened, time.monotonic()):
                self._perform(effect)
        except Exception as error:
            self._failed.set_exception(error)

    def _observe(self, event: object) -> Event | None:
        """Update the driver's own state, and return the event for the core."""
        match event:
            case SampleProgress(request_id=request_id, tokens=tokens):
                if (stream := self.streams.get(request_id)) is None:
                    return None
                stream.progress(event)
                return events.Streamed(request_id, len(tokens))
            case Replied(to=_FetchFailed(to=to, error=error), reply=reply):
                return Replied(to, reply if isinstance(reply, EngineDied) else error)
            case events.EngineReady(info=info):
                self._engine_ready(info)
            case events.EngineEnded(reason=reason, is_final=is_final):
                self._registered_losses.clear()
                if is_final:
                    self._fail_engine_waiters(self.slot.refusal or EngineError(reason))
            case events.Committed(transaction=journal.ReadJournal() | journal.FallBack(), result=found):
                for graph in found.losses if found is not None else ():
                    self.learn_loss(graph)
            case events.Committed(transaction=journal.FinishLoss(payload=payload)):
                self._known_losses[payload.loss_id] = payload
                self._registered_losses.add(payload.loss_id)
        return event  # type: ignore[return-value]

    def _engine_ready(self, info: ModelInfo) -> None:
        waiters, self._engine_waiters = self._engine_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(info)
        if not self._scratch.is_local:
            self._transfer(self._publish_tokenizer(info))

    def _perform(self, effect: Effect) -> None:  # noqa: C901 (one case for each effect)
        match effect:
            case events.Commit(transaction=transaction):
                self._commit(transaction, FIRST_PAUSE_SECONDS)
            case events.Send(command=messages.LoadState() | messages.LoadSampler() as command, to=to):
                self._send_load(command, to)
            case events.Send(command=command, to=to):
                self.slot.send(command, to)
            case events.SendBatch(operations=operations):
                self._send_training(operations)
            case events.SendEarly(operation=operation):
                self._send_training([operation], is_early=True)
            case events.SendSample(operation=Sample() as sample, sampler_name=name):
                self._send_sample(sample, name)
            case events.Resolve():
                self._resolve(effect)
            case events.Admit(operation=operation):
                self._admit(operation, effect)
            case events.Refuse(operation=operation, error=error):
                answer = self._submits.pop(operation)
                answer.set_exception(error)
                answer.exception()  # retrieve the exception; the caller may have disconnected
            case events.SetTimer(timer=timer, seconds=seconds):
                self._loop.call_later(seconds, self.post, events.TimerFired(timer))
            case events.CancelSample(request_id=request_id):
                self.slot.cancel(request_id)
            case events.StartEngine():
                self.slot.start()
            case events.StopEngine():
                self._registered_losses.clear()
                self.slot.stop()
            case events.StopRetrying():
                self.slot.stop_retrying()
            case events.Verify(model_id=model_id, name=name):
                self._in_background(self._verify(model_id, name))
            case events.Discard(kind=kind, names=names):
                self._in_background(self._discard(kind, list(names)))
            case events.Report(level=level, message=message, model_id=model_id, error=error):
                extra = {"model_id": model_id} if model_id else {}
                log.log(getattr(logging, level.upper()), message, exc_info=error, extra=extra)
            case events.Closed():
                self._closed.set()

    # ── the database ──────────────────────────────────────────────────────────────────────────────────

    def _commit(self, transaction: journal.Transaction, pause: float) -> None:
        """Run a transaction, and retry it while the storage fails."""
        if self._is_ended:
            return
        if not self._scratch.is_local and (named := named_directories(transaction)):
            self._transfer(self._publish_and_commit(named, transaction, pause))
        else:
            self._apply(transaction, pause)

    async def _publish_and_commit(
        self, named: list[tuple[Kind, str]], transaction: journal.Transaction, pause: float
    ) -> None:
        """Upload the directories that a transaction is about to name, then run it, while they stay here."""
        with contextlib.ExitStack() as pins:
            try:
                for kind, name in named:
                    pins.enter_context(self._scratch.pinned(kind, name))
                    await self._scratch.publish(kind, name)
            except StorageError as error:
                self._retry_commit(transaction, error, pause)
            except LorimerError as error:
                self.post(events.CommitFailed(transaction, error))
            else:
                if (commit := self._apply(transaction, pause)) is not None:
                    await asyncio.wait([commit])

    def _apply(self, transaction: journal.Transaction, pause: float) -> "asyncio.Future[object] | None":
        try:
            if transaction.only_reads:
                waiter = self._store.submit_read(transaction.apply)
            else:
                payload = transaction.operation.payload if isinstance(transaction, journal.ACCEPTING) else b""
                waiter = self._store.submit(transaction.apply, payload)
        except StorageError as error:
            self._retry_commit(transaction, error, pause)
            return None
        self._commits.add(waiter)
        waiter.add_done_callback(partial(self._applied, transaction, pause))
        return waiter

    def _applied(self, transaction: journal.Transaction, pause: float, done: "asyncio.Future[object]") -> None:
        self._commits.discard(done)
        error = done.exception()
        if isinstance(error, StorageError):
            self._retry_commit(transaction, error, pause)
            return
        if error is not None:
            assert isinstance(error, Exception)
            self.post(events.CommitFailed(transaction, error))
            return
        result = done.result()
        if isinstance(result, Journal) and not self._scratch.is_local and (reads := loaded_weights(result)):
            self._transfer(self._bring_and_post(reads, events.Committed(transaction, result)))
        else:
            self.post(events.Committed(transaction, result))

    async def _bring_and_post(self, reads: list[str], event: events.Committed) -> None:
        """Fetch the weights that operations of a journal load before the run is rebuilt from it."""
        for name in reads:
            self._scratch.pin("weights", name)  # rare, so they are kept until the server ends
            try:
                await self._scratch.bring_patiently("weights", name, lambda: self._is_storage_given_up)
            except LorimerError as error:  # the engine finds nothing to load, and the operation fails
                log.error("weights that an operation loads: %s", error)
        self.post(event)

    def _retry_commit(self, transaction: journal.Transaction, error: StorageError, pause: float) -> None:
        is_submit = isinstance(transaction, journal.ACCEPTING)
        if self._is_storage_given_up or is_submit:
            self.post(events.CommitFailed(transaction, error))
            return
        log.error("the storage failed, retrying in %.1f s: %s", pause, error)
        later = min(2 * pause, MAX_PAUSE_SECONDS)
        self._loop.call_later(pause, self._commit, transaction, later)

    # ── the engine ────────────────────────────────────────────────────────────────────────────────────

    def _send_load(self, command: messages.LoadState | messages.LoadSampler, to: events.ReplyTo) -> None:
        # An operation's weights were fetched before it was accepted, and keep their place among other commands.
        if self._scratch.is_local or isinstance(to, OperationReply):
            self.slot.send(command, to)
        else:
            self._transfer(self._bring_and_send(command, to))

    async def _bring_and_send(self, command: messages.LoadState | messages.LoadSampler, to: events.ReplyTo) -> None:
        """Fetch the directory that a command reads, then send it, unless its engine has ended."""
        path, engine = Path(command.directory), self.slot.num_deaths
        kind: Kind = "weights" if path.parent == self.core.weights else "snapshots"

        def is_given_up() -> bool:
            return self._is_storage_given_up or self.slot.num_deaths != engine

        with self._scratch.pinned(kind, path.name):
            try:
                await self._scratch.bring_patiently(kind, path.name, is_given_up)
            except StorageError as error:  # the server is closing, or the engine has ended: nothing is damaged
                to = _FetchFailed(to, EngineError(str(error)))
            except LorimerError as error:
                to = _FetchFailed(to, error)
            if self.slot.num_deaths == engine:
                self.slot.send(command, to)

    def _send_training(self, operations: Sequence[Operation], *, is_early: bool = False) -> None:
        """Send a batch. Payloads are dropped, except of an operation whose row is being committed."""
        commands: list[messages.ForwardBackward | messages.EncodedForwardBackward] = []
        to: list[events.ReplyTo] = []
        for operation in operations:
            flight = operation.early if is_early else operation.flight
            assert flight is not None
            reply_to, payload = OperationReply(operation, flight), operation.payload
            if not is_early:
                operation.payload = b""
            try:
                if self._known_losses:
                    self._register_loss(payload)
            except Exception as error:
                self.post(Replied(reply_to, error))
                continue
            commands.append(
                messages.EncodedForwardBackward(
                    request_id=operation.request_id,
                    model_id=operation.lane,
                    payload=payload,
                    forward_only=operation.kind == "forward",
                )
            )
            to.append(reply_to)
        if commands:
            self.slot.train(messages.TrainBatch(operations=commands), to)

    def _register_loss(self, payload: bytes) -> None:
        """Send the engine the custom loss of an operation if it does not have it yet."""
        loss_fn, config = read_loss(payload)
        loss_id = str(config.get("loss_id")) if loss_fn == "custom" else ""
        if loss_id in self._known_losses and loss_id not in self._registered_losses:
            register = register_command(f"loss:{loss_id}", self._known_losses[loss_id])
            self.slot.send(register, events.NoReply())
            self._registered_losses.add(loss_id)

    def learn_loss(self, graph: bytes) -> None:
        payload = decode_payload(graph)
        assert isinstance(payload, CreateLoss)
        self._known_losses[payload.loss_id] = payload

    def _send_sample(self, sample: Sample, name: str | None) -> None:
        assert sample.flight is not None
        to = OperationReply(sample, sample.flight)
        try:
            command = engine_sample(
                sample.request,
                sample.request_id,
                name,
                cache_salt=sample.user_id,
                grammar=sample.grammar,
                stream=sample.is_streaming,
            )
        except Exception as error:
            self.post(Replied(to, error))
        else:
            self.slot.send(command, to)

    def _fail_engine_waiters(self, error: LorimerError) -> None:
        waiters, self._engine_waiters = self._engine_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    # ── answers ───────────────────────────────────────────────────────────────────────────────────────

    def _admit(self, operation: Operation, admit: events.Admit) -> None:
        is_carried = self.core.open.get(operation.request_id) is operation
        if is_carried:
            self._results.open[operation.request_id] = operation
        if isinstance(operation, Sample) and not operation.is_direct:
            self._usage.sampler_used(operation.lane)
        elif is_carried and operation.lane in self.core.runs:
            self._usage.run_used(operation.lane)
        if (answer := self._submits.pop(operation, None)) is not None:
            answer.set_result(admit)

    def _resolve(self, effect: events.Resolve) -> None:
        operation = effect.operation
        if isinstance(operation, Sample) and operation.is_direct:
            if (stream := self.streams.pop(operation.request_id, None)) is not None:
                stream.resolve(effect.result)
        else:
            self._results.resolve(operation, effect.outcome)
        spans.finished(operation, effect.outcome)

    # ── files ─────────────────────────────────────────────────────────────────────────────────────────

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _transfer(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        for tasks in (self._background, self._transfers):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _verify(self, model_id: str, name: str) -> None:
        try:
            found = await self._scratch.is_whole("snapshots", name, lambda: self._is_storage_given_up)
        except StorageError:
            found = False  # not known, so the snapshot before it is kept
        self.post(events.Verified(model_id, name, found))

    async def _publish_tokenizer(self, info: ModelInfo) -> None:
        try:
            await tokenizers.publish(self._scratch.objects, self.name, Path(info.directory))
        except (LorimerError, OSError) as error:
            log.warning("cannot store the tokenizer of %s: %s", self.name, error)

    async def _discard(self, kind: Kind, names: list[str]) -> None:
        """Delete directories that an engine has written, complete or not."""
        try:
            await self._scratch.remove(kind, names)
        except StorageError as error:
            log.warning("cannot delete; the next start deletes it: %s", error)


def named_directories(transaction: journal.Transaction) -> list[tuple[Kind, str]]:
    """Return the directories that rows name after a transaction; they are stored completely before it."""
    match transaction:
        case journal.SetSnapshot(name=name):
            return [("snapshots", name)]
        case journal.FinishOperation(flight=Flight(target=str() as target, payload=payload)):
            return [("snapshots" if isinstance(payload, Load) else "weights", target)]
    return []


def loaded_weights(journal: Journal) -> list[str]:
    """Return the names of the weights that operations of a journal load."""
    loads = {row.request_id for row in journal.rows if row.kind == "load_weights"}
    found = [decode_payload(payload) for request_id, payload in journal.payloads.items() if request_id in loads]
    return [payload.weights_name for payload in found if isinstance(payload, Load)]
