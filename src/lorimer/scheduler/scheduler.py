"""What the server talks to: takes requests in, puts them on record, says how they stand.

A submit never waits for other requests: it is answered as soon as it is durable. Who may ask for what is the server's
business; here every caller is taken at their word. All methods are called on one event loop.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from lorimer import types
from lorimer.engine.config import EngineConfig
from lorimer.engine.messages import ModelInfo
from lorimer.errors import Busy, Gone, InvalidInput
from lorimer.scheduler import accepting, payloads, records
from lorimer.scheduler.completions import Completion, CompletionLogs
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.loss_checks import check_loss
from lorimer.scheduler.losses import check_loss_id, loss_id
from lorimer.scheduler.models import ModelScheduler, ServedModel
from lorimer.scheduler.notes import Notes
from lorimer.scheduler.operation import Operation, Outcome, QueueState
from lorimer.scheduler.recorder import Recorder
from lorimer.scheduler.recovery import recover
from lorimer.scheduler.retention import sweep
from lorimer.scheduler.runs import RunState
from lorimer.scheduler.sampling import SampleOperation, sequence_ids
from lorimer.store import futures
from lorimer.store.database import Store
from lorimer.store.directory import DataDirectory
from lorimer.store.futures import FutureRow
from lorimer.store.runs import Run
from lorimer.store.samplers import SamplingSession
from lorimer.store.sessions import Session
from lorimer.store.users import User
from lorimer.store.weights import Weights
from lorimer.types.encoding import encode_training_request

log = logging.getLogger("lorimer.scheduler")

T = TypeVar("T")


@dataclass(frozen=True)
class Accepted:
    """The answer to a submit."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


@dataclass(frozen=True)
class SchedulerStats:
    """What there is to do."""

    open_requests: dict[str, int]
    """By kind."""
    operations_by_user: dict[str, int]
    operations_by_run: dict[str, int]
    samples_by_user: dict[str, int]
    models: list[ServedModel]


class Scheduler:
    def __init__(
        self,
        store: Store,
        directory: DataDirectory,
        models: Mapping[str, EngineConfig],
        limits: SchedulerLimits | None = None,
    ) -> None:
        self.limits = limits or SchedulerLimits()
        self.store, self.directory = store, directory
        self.recorder = Recorder(store, self.limits.recent_result_bytes)
        self.recorder.on_settled = self._settled
        self.completions_log = CompletionLogs(store)
        self.notes = Notes(self.recorder)
        self.open = self.recorder.open
        self.known_losses: dict[str, payloads.CreateLoss] = {}
        self.models: dict[str, ModelScheduler] = {}
        self._configs = models
        self._tasks: set[asyncio.Task[None]] = set()
        self._submits: set[asyncio.Task[Any]] = set()
        self._is_closing = False

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Take up what an earlier server left. Engines start when something needs them."""
        for name, config in self._configs.items():
            self.models[name] = ModelScheduler(
                name, config, self.directory, self.limits, self.recorder, self.known_losses
            )
        await recover(self)

    async def close(self, timeout: float = 30.0) -> None:
        """Finish what is being computed, secure every run, end the engines."""
        self._is_closing = True
        self.recorder.close()
        try:
            async with asyncio.timeout(timeout):
                await asyncio.gather(*self._submits, return_exceptions=True)
                await asyncio.gather(*(model.close() for model in self.models.values()))
        except TimeoutError:
            log.warning("not everything could be finished in %.0f s; it is taken up at the next start", timeout)
            await asyncio.gather(*(model.end() for model in self.models.values()))
        for task in self._tasks:
            task.cancel()
        await self.notes.flush()

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

    async def sweep(self) -> None:
        """Free what has expired."""
        await sweep(self)

    def served_models(self) -> list[ServedModel]:
        return [model.status() for model in self.models.values()]

    def stats(self) -> SchedulerStats:
        operations: Counter[str] = Counter()
        samples: Counter[str] = Counter()
        for model in self.models.values():
            operations.update(model.training.shares.num_open)
            samples.update(model.sampling.shares.num_open)
        runs = [state for model in self.models.values() for state in model.training.runs.values()]
        return SchedulerStats(
            open_requests=dict(Counter(operation.kind for operation in self.open.values())),
            operations_by_user=dict(operations),
            operations_by_run={state.model_id: len(state.operations) for state in runs if state.operations},
            samples_by_user=dict(samples),
            models=self.served_models(),
        )

    def start_engine(self, name: str) -> None:
        self._model(name).slot.start()

    async def model_info(self, name: str) -> ModelInfo:
        return await self._model(name).info()

    def _model(self, name: str) -> ModelScheduler:
        if name not in self.models:
            raise InvalidInput(f"base model {name!r} is not served here; accepted are {', '.join(self.models)}")
        return self.models[name]

    # ── runs ──────────────────────────────────────────────────────────────────────────────────────────

    async def create_model(self, user: User, session: Session, request: types.CreateModelRequest) -> Accepted:
        model = self._model(request.base_model)
        lora = request.lora_config or types.LoraConfig(rank=32)
        if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
            raise InvalidInput("train_attn, train_mlp and train_unembed are all false; at least one is needed")
        values = accepting.RunValues(
            base_model=request.base_model,
            rank=accepting.check_rank(lora.rank),
            seed=accepting.check_seed(lora.seed),
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembed=lora.train_unembed,
            user_metadata=accepting.metadata(request.user_metadata),
            optimizer_type=request.optimizer_config.type,
        )
        return await self._create(user, session, model, request.model_seq_id, values, payloads.CreateModel())

    async def create_from_weights(
        self, user: User, session: Session, request: types.LoadWeightsRequest, weights: Weights
    ) -> Accepted:
        """Make a run of the shape of saved weights, and begin with them."""
        if request.model_seq_id is None:
            raise InvalidInput("model_seq_id is missing; a new run needs one")
        if request.base_model is not None and request.base_model != weights.base_model:
            raise InvalidInput(f"base_model {request.base_model!r} is not that of the weights, {weights.base_model!r}")
        accepting.check_optimizer_state(weights, request.optimizer)
        values = accepting.RunValues(
            base_model=weights.base_model,
            rank=weights.rank,
            seed=accepting.check_seed(None),
            train_attn=weights.train_attn,
            train_mlp=weights.train_mlp,
            train_unembed=weights.train_unembed,
            user_metadata=accepting.metadata(request.user_metadata),
            optimizer_type=request.optimizer_config.type if request.optimizer_config else weights.optimizer_type,
        )
        payload = payloads.CreateModel(
            path=request.path, weights_name=weights.name, optimizer=request.optimizer, answers_load=True
        )
        return await self._create(user, session, self._model(weights.base_model), request.model_seq_id, values, payload)

    async def _create(
        self,
        user: User,
        session: Session,
        model: ModelScheduler,
        model_seq_id: int,
        values: accepting.RunValues,
        payload: payloads.CreateModel,
    ) -> Accepted:
        self._check_open(session)
        creation = Operation(
            request_id=secrets.token_hex(16),
            user_id=user.user_id,
            session_id=session.session_id,
            base_model=model.name,
            lane=f"{session.session_id}:models",
            seq_id=model_seq_id,
            kind="load_weights" if payload.answers_load else "create_model",
            payload=payloads.encode_payload(payload),
            reads=payload.weights_name,
        )
        return await self._surely(self._accept_run(model, creation, session, values))

    async def _accept_run(
        self, model: ModelScheduler, creation: Operation, session: Session, values: accepting.RunValues
    ) -> Accepted:
        run, row, is_new = await self.store.write(accepting.accept_run, creation, session, values)
        if self._is_ours(creation, row, is_new):
            creation.is_accepted = True
            model.training.create(model.training.add_run(run), creation)
        return Accepted(row.request_id, run.model_id)

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

    async def train(self, user: User, run: Run, request: types.TrainingRequest) -> Accepted:
        kind = "forward" if request.forward_only else "forward_backward"
        accepting.check_seq_id(request.seq_id)
        if request.loss_fn == "custom":
            check_loss_id(run.session_id, request.loss_fn_config.get("loss_id"))
        tokens = sum(datum.model_input.length for datum in request.data)
        payload = encode_training_request(request)
        return await self._submit(user, run, request.seq_id, kind, payload, tokens, request)

    async def optim_step(
        self, user: User, run: Run, seq_id: int, params: dict[str, float], optimizer_type: str = "adamw"
    ) -> Accepted:
        if optimizer_type != run.optimizer_type:
            raise InvalidInput(f"the parameters are of {optimizer_type!r}; the run was made for {run.optimizer_type!r}")
        return await self._submit(user, run, seq_id, "optim_step", payloads.OptimStep(params=params))

    async def save_weights(
        self,
        user: User,
        run: Run,
        seq_id: int,
        *,
        kind: types.CheckpointType,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> Accepted:
        payload = payloads.Save(
            checkpoint_kind=kind,
            name=name,
            expires_at=None if ttl_seconds is None else time.time() + ttl_seconds,
            overwrite=overwrite,
            user_metadata=user_metadata,
        )
        return await self._submit(user, run, seq_id, accepting.SAVE_KINDS[kind], payload)

    async def save_ephemeral(self, user: User, run: Run, seq_id: int, sampling_session_seq_id: int) -> Accepted:
        payload = payloads.SaveEphemeral(sampling_session_seq_id=sampling_session_seq_id)
        return await self._submit(user, run, seq_id, "save_weights_for_sampler", payload)

    async def load_weights(
        self, user: User, run: Run, seq_id: int, *, path: str, weights: Weights, optimizer: bool
    ) -> Accepted:
        accepting.check_fits(run, weights)
        accepting.check_optimizer_state(weights, optimizer)
        payload = payloads.Load(path=path, weights_name=weights.name, optimizer=optimizer)
        return await self._submit(user, run, seq_id, "load_weights", payload)

    async def _submit(
        self,
        user: User,
        run: Run,
        seq_id: int,
        kind: str,
        payload: payloads.AnyPayload | bytes,
        tokens: int = 0,
        request: types.TrainingRequest | None = None,
    ) -> Accepted:
        """Take an operation of a run: on record first, then in its order."""
        state = self._state(run)
        operation = Operation(
            request_id=secrets.token_hex(16),
            user_id=user.user_id,
            session_id=run.session_id,
            base_model=run.base_model,
            lane=run.model_id,
            seq_id=accepting.check_seq_id(seq_id),
            kind=kind,
            tokens=tokens,
            payload=payload if isinstance(payload, bytes) else payloads.encode_payload(payload),
            request=request,
            reads=payload.weights_name if isinstance(payload, payloads.Load) else None,
        )
        self._model(run.base_model).training.check_room(state, operation.size)
        return await self._surely(self._accept(state, operation))

    async def _accept(self, state: RunState, operation: Operation) -> Accepted:
        # From here on a run that is being restored knows that this number is about to be on record.
        seq_id = operation.seq_id
        state.operations.setdefault(seq_id, operation)
        is_ours = False
        try:
            has_passed = state.has_passed(seq_id)
            row, is_new = await self.store.write(accepting.accept, operation, has_passed=has_passed)
            is_ours = self._is_ours(operation, row, is_new)
        finally:
            if not is_ours and not operation.is_accepted and state.operations.get(seq_id) is operation:
                del state.operations[seq_id]
        if is_ours:
            state.operations[seq_id] = operation
            self._model(operation.base_model).training.arrive(state, operation)
            self.notes.run_used(operation.lane)
        return Accepted(row.request_id, operation.lane)

    def _state(self, run: Run) -> RunState:
        if self._is_closing:
            raise Busy("the server is shutting down")
        state = self._model(run.base_model).training.add_run(run)
        if state.phase == "corrupted":
            raise InvalidInput(state.error)
        return state

    def known_run(self, model_id: str) -> Run | None:
        """A run that is at work here; of others only the store knows."""
        for model in self.models.values():
            if (state := model.training.runs.get(model_id)) is not None:
                return state.run
        return None

    async def reject(self, user: User, run: Run, seq_id: int, reason: str) -> None:
        """A submit that the server refuses has used its number."""
        await self._surely(self._reject(user, run, seq_id, reason))

    async def _reject(self, user: User, run: Run, seq_id: int, reason: str) -> None:
        is_new = await self.store.write(accepting.reject, user.user_id, run, seq_id, reason)
        model = self.models.get(run.base_model)
        if is_new and model is not None and (state := model.training.runs.get(run.model_id)) is not None:
            model.training.skip(state, seq_id)

    async def unload(self, user: User, run: Run) -> Accepted:
        """Take an idle run out of memory; it comes back when it is used."""
        operation = Operation(
            request_id=secrets.token_hex(16),
            user_id=user.user_id,
            session_id=run.session_id,
            base_model=run.base_model,
            lane=f"{run.model_id}:unload",
            seq_id=0,
            kind="unload_model",
        )
        return await self._surely(self._unload(self._model(run.base_model), run, operation))

    async def _unload(self, model: ModelScheduler, run: Run, operation: Operation) -> Accepted:
        await self.store.write(accepting.accept_unnumbered, operation)
        if (state := model.training.runs.get(run.model_id)) is not None:
            model.training.unload(state)
        answer = {"type": "unload_model", "model_id": run.model_id}
        await self.recorder.finish(operation, records.finish_plain, answer)
        return Accepted(operation.request_id, run.model_id)

    # ── losses ────────────────────────────────────────────────────────────────────────────────────────

    async def create_loss(self, user: User, session: Session, request: types.CreateCustomLossRequest) -> Accepted:
        """Have an uploaded loss checked; any engine can say whether it is in order."""
        self._check_open(session)
        payload = payloads.CreateLoss(
            loss_id=loss_id(session.session_id, request.custom_loss_seq_id),
            name=request.name,
            inputs=[(item.name, item.rank) for item in request.inputs],
            graph=request.graph.model_dump(),
        )
        operation = Operation(
            request_id=secrets.token_hex(16),
            user_id=user.user_id,
            session_id=session.session_id,
            base_model=next(iter(self.models)),
            lane=f"{session.session_id}:losses",
            seq_id=request.custom_loss_seq_id,
            kind="create_custom_loss",
            payload=payloads.encode_payload(payload),
        )
        return await self._surely(self._accept_loss(operation))

    async def _accept_loss(self, operation: Operation) -> Accepted:
        row, is_new = await self.store.write(accepting.accept_loss, operation, self.limits.max_losses_per_session)
        if self._is_ours(operation, row, is_new):
            self.check_loss(operation)
        return Accepted(row.request_id)

    def check_loss(self, operation: Operation) -> None:
        """Have an engine check the loss, in the background."""
        models = list(self.models.values())
        task = asyncio.ensure_future(check_loss(operation, models, self.recorder, self.limits.max_engine_deaths))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ── samples ───────────────────────────────────────────────────────────────────────────────────────

    async def sample(self, user: User, sampler: SamplingSession, request: types.SampleRequest) -> Accepted:
        if self._is_closing:
            raise Busy("the server is shutting down")
        model = self._model(sampler.base_model)
        model.sampling.check_room(user.user_id)
        accepting.check_sample(request)
        request = accepting.with_seed(request)
        operation = SampleOperation(
            request_id=secrets.token_hex(16),
            user_id=user.user_id,
            session_id=sampler.session_id,
            base_model=sampler.base_model,
            lane=sampler.sampling_session_id,
            seq_id=request.seq_id if request.seq_id is not None else secrets.randbits(62),
            kind="sample",
            tokens=request.prompt.length,
            payload=payloads.encode_payload(
                payloads.Sample(request=request.model_dump_json(exclude_none=True).encode())
            ),
            request=request,
            sampler=sampler,
        )
        return await self._surely(self._accept_sample(model, operation))

    async def _accept_sample(self, model: ModelScheduler, operation: SampleOperation) -> Accepted:
        row, is_new = await self.store.write(accepting.accept, operation)
        operation.payload = b""
        if self._is_ours(operation, row, is_new):
            self.notes.sampler_used(operation.lane)
            model.sampling.arrive(operation)
        return Accepted(row.request_id, sample_sequence_ids=sequence_ids(row.request_id, operation.request.num_samples))

    async def cancel(self, request_id: str) -> None:
        """Give a sample up; other requests are carried out all the same."""
        operation = self.open.get(request_id)
        if isinstance(operation, SampleOperation):
            await self._model(operation.sampler.base_model).sampling.cancel(operation)

    async def completions(
        self, sampling_session_id: str, clone_id: int, prev_cursor: int, timeout: float, retrieved_ids: list[str]
    ) -> tuple[list[Completion], int]:
        """What finished since ``prev_cursor``, waiting for the first if there is nothing yet."""
        if retrieved_ids:
            for request_id in await self.store.write(records.release, sampling_session_id, retrieved_ids):
                self.recorder.forget(request_id)
        return await self.completions_log.after(sampling_session_id, clone_id, prev_cursor, timeout)

    # ── how things stand ──────────────────────────────────────────────────────────────────────────────

    async def owner_of(self, request_id: str) -> str | None:
        operation = self.open.get(request_id)
        if operation is not None:
            return operation.user_id
        row = await self.store.read(futures.get, request_id)
        return None if row is None else row.user_id

    async def wait(self, request_id: str, timeout: float) -> Outcome:
        """How a request stands, after at most ``timeout`` seconds."""
        if (recent := self.recorder.recent(request_id)) is not None:
            self.notes.fetched(request_id)
            return recent
        operation = self.open.get(request_id)
        if operation is None:
            return await self._from_store(request_id)
        if timeout > 0:
            await asyncio.wait([operation.outcome], timeout=timeout)
        if operation.outcome.done():
            self.notes.fetched(request_id)
            return operation.outcome.result()
        return Outcome("pending", *self._queue_state(operation))

    async def _from_store(self, request_id: str) -> Outcome:
        outcome = await self.store.read(records.recorded, request_id)
        if outcome is None:
            return Outcome("gone", error=f"there is no request {request_id!r}; its result may have expired")
        if outcome.state == "done":
            self.notes.fetched(request_id)
        return outcome

    def _queue_state(self, operation: Operation) -> tuple[QueueState, str]:
        model = self.models.get(operation.base_model)
        if model is None:
            return "paused_capacity", f"base model {operation.base_model!r} is not served; start the server with it"
        return model.queue_state(operation)

    def _settled(self, operation: Operation, outcome: Outcome) -> None:
        if isinstance(operation, SampleOperation):
            self.completions_log.add(operation, outcome)
