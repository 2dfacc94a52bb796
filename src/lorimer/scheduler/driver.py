"""Runs one core: collects its events, passes them in turn by turn, and performs the effects it asks for.

Everything that waits is here: transactions, the engine, timers, files. All decisions are in the core.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from lorimer import types
from lorimer.engine import messages
from lorimer.engine.config import EngineConfig
from lorimer.engine.messages import ModelInfo, SampleProgress
from lorimer.errors import Busy, EngineError, LorimerError, StorageError
from lorimer.scheduler import events, journal
from lorimer.scheduler.core import Core
from lorimer.scheduler.custom_loss import register_command
from lorimer.scheduler.engines import EngineSlot
from lorimer.scheduler.events import Effect, Event, OperationReply, Replied
from lorimer.scheduler.inbox import Inbox
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.manifests import is_whole
from lorimer.scheduler.payloads import CreateLoss, decode_payload
from lorimer.scheduler.placement import Load
from lorimer.scheduler.results import Results
from lorimer.scheduler.runs import Flight, Operation, QueueState
from lorimer.scheduler.samples import Sample
from lorimer.scheduler.stats import ServedModel, queue_state
from lorimer.scheduler.streaming import DirectSample, new_sample
from lorimer.scheduler.translate import engine_sample, to_forward_backward
from lorimer.scheduler.usage_buffer import UsageBuffer
from lorimer.store.database import Store
from lorimer.store.directory import DataDirectory
from lorimer.types.encoding import read_loss

log = logging.getLogger("lorimer.scheduler")

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 30.0


class Driver:
    """One replica of a base model: its core, its engine, and the task that runs them."""

    def __init__(
        self,
        name: str,
        place: str,
        config: EngineConfig,
        store: Store,
        directory: DataDirectory,
        limits: SchedulerLimits,
        results: Results,
        usage: UsageBuffer,
        known_losses: dict[str, CreateLoss],
    ) -> None:
        """``name`` is the base model, ``place`` the replica. All drivers of a process share ``known_losses``."""
        self.name, self.place = name, place
        self.core = Core(name, limits, directory.weights, directory.snapshots, secrets.randbits(128), place)
        self.inbox = Inbox()
        self.slot = EngineSlot(name, config, self.inbox, stall_seconds=limits.stall_seconds)
        self.streams: dict[str, DirectSample] = {}
        """Direct samples in progress, by request_id."""
        self._store, self._directory, self._results, self._usage = store, directory, results, usage
        self._known_losses = known_losses
        self._registered_losses: set[str] = set()
        self._submits: dict[Operation, asyncio.Future[events.Admit]] = {}
        self._engine_waiters: list[asyncio.Future[ModelInfo]] = []
        self._background: set[asyncio.Future[None]] = set()
        self._commits: set[asyncio.Future[object]] = set()
        """Transactions in progress."""
        self._is_storage_given_up = self._is_ended = False
        self._closed = asyncio.Event()

    # ── what the scheduler calls ──────────────────────────────────────────────────────────────────────

    def load(self) -> Load:
        core = self.core
        num_samples = core.sampling.num_waiting + core.sampling.num_running
        is_usable = self.slot.state != "failed"
        return Load(len(core.runs), core.limits.max_loaded_runs, num_samples, core.open_bytes.held, is_usable)

    def holds(self, model_id: str) -> bool:
        """Return whether a run must stay here: it is in the engine, has work, or a request for it is arriving."""
        run = self.core.runs.get(model_id)
        is_held = run is not None and not run.is_forgettable
        return is_held or any(operation.lane == model_id for operation in self._submits)

    def post(self, event: Event) -> None:
        self.inbox.post(event)

    async def submit(self, operation: Operation, event: Event) -> events.Admit:
        """Submit a request to the core and wait until it is accepted.

        The request continues if the caller is cancelled.
        """
        answer: asyncio.Future[events.Admit] = asyncio.get_running_loop().create_future()
        self._submits[operation] = answer
        self.inbox.post(event)
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
        waiter: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
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
            pid=slot.pid,
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
        """Run until cancelled. An exception is a bug: the core's state cannot be trusted after it."""
        while True:
            happened = [self._observe(event) for event in await self.inbox.take()]
            effects = self.core.handle([event for event in happened if event is not None], time.monotonic())
            for effect in effects:
                self._perform(effect)

    def _observe(self, event: object) -> Event | None:
        """Update the driver's own state, and return the event for the core."""
        match event:
            case SampleProgress(request_id=request_id, tokens=tokens):
                if (stream := self.streams.get(request_id)) is None:
                    return None
                stream.progress(event)
                return events.Streamed(request_id, len(tokens))
            case events.EngineReady(info=info):
                waiters, self._engine_waiters = self._engine_waiters, []
                for waiter in waiters:
                    if not waiter.done():
                        waiter.set_result(info)
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

    def _perform(self, effect: Effect) -> None:  # noqa: C901 (one case for each effect)
        match effect:
            case events.Commit(transaction=transaction):
                self._commit(transaction, FIRST_PAUSE_SECONDS)
            case events.Send(command=command, to=to):
                self.slot.send(command, to)
            case events.SendBatch(operations=operations):
                self._send_training([(operation, operation.flight) for operation in operations])
            case events.SendEarly(operation=operation, flight=flight):
                self._send_training([(operation, flight)], keep_payload=True)
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
                asyncio.get_running_loop().call_later(seconds, self.inbox.post, events.TimerFired(timer))
            case events.CancelSample(request_id=request_id):
                self.slot.cancel(request_id)
            case events.StartEngine():
                self.slot.start()
            case events.StopRetrying():
                self.slot.stop_retrying()
            case events.Verify(model_id=model_id, name=name):
                self._in_background(self._verify(model_id, name))
            case events.Discard(kind=kind, names=names):
                root = self._directory.weights if kind == "weights" else self._directory.snapshots
                self._in_background(self._discard([root / name for name in names]))
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
        run = self._store.submit_read if transaction.only_reads else self._store.submit
        try:
            waiter = run(transaction.apply)
        except StorageError as error:
            self._retry_commit(transaction, error, pause)
            return
        self._commits.add(waiter)
        waiter.add_done_callback(lambda done: self._on_commit(transaction, done, pause))

    def _on_commit(self, transaction: journal.Transaction, done: "asyncio.Future[object]", pause: float) -> None:
        self._commits.discard(done)
        error = done.exception()
        if error is None:
            self.inbox.post(events.Committed(transaction, done.result()))
        elif isinstance(error, StorageError):
            self._retry_commit(transaction, error, pause)
        else:
            assert isinstance(error, Exception)
            self.inbox.post(events.CommitFailed(transaction, error))

    def _retry_commit(self, transaction: journal.Transaction, error: StorageError, pause: float) -> None:
        is_submit = isinstance(transaction, journal.ACCEPTING)
        if self._is_storage_given_up or is_submit:
            self.inbox.post(events.CommitFailed(transaction, error))
            return
        log.error("the storage failed, retrying in %.1f s: %s", pause, error)
        later = min(2 * pause, MAX_PAUSE_SECONDS)
        asyncio.get_running_loop().call_later(pause, self._commit, transaction, later)

    # ── the engine ────────────────────────────────────────────────────────────────────────────────────

    def _send_training(
        self, operations: "list[tuple[Operation, Flight | None]]", *, keep_payload: bool = False
    ) -> None:
        commands: list[messages.EncodedForwardBackward] = []
        to: list[events.ReplyTo] = []
        for operation, flight in operations:
            assert flight is not None
            reply_to = OperationReply(operation, flight)
            try:
                commands.append(self._training_command(operation, keep_payload=keep_payload))
                to.append(reply_to)
            except Exception as error:
                self.inbox.post(Replied(reply_to, error))
        if commands:
            self.slot.train(messages.TrainBatch(operations=[*commands]), to)

    def _training_command(self, operation: Operation, *, keep_payload: bool) -> messages.EncodedForwardBackward:
        command = to_forward_backward(operation, keep_payload=keep_payload)
        loss_fn, config = read_loss(command.payload)
        loss_id = str(config.get("loss_id")) if loss_fn == "custom" else ""
        if loss_id in self._known_losses and loss_id not in self._registered_losses:
            register = register_command(f"loss:{loss_id}", self._known_losses[loss_id])
            self.slot.send(register, events.NoReply())
            self._registered_losses.add(loss_id)
        return command

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
            self.inbox.post(Replied(to, error))
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

    # ── files ─────────────────────────────────────────────────────────────────────────────────────────

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _verify(self, model_id: str, name: str) -> None:
        found = await asyncio.to_thread(is_whole, self._directory.snapshots / name)
        self.inbox.post(events.Verified(model_id, name, found))

    async def _discard(self, paths: list[Path]) -> None:
        """Delete directories that an engine has written, complete or not."""

        def remove() -> None:
            for path in paths:
                for found in [path, *path.parent.glob(f"{path.name}.tmp-*")]:
                    self._directory.remove(found)

        try:
            await asyncio.to_thread(remove)
        except StorageError as error:
            log.warning("cannot delete; the next start deletes it: %s", error)
