"""What the server talks to: takes requests in, puts them on record, says how they stand.

A submit never waits for other requests: it is answered as soon as it is durable. Who may ask for what is the server's
business; here every caller is taken at their word. All methods are called on one event loop. Requests about runs are
in ``run_requests.py``, what all requests have in common in ``intake.py``.
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping

from lorimer import types
from lorimer.engine.config import EngineConfig
from lorimer.engine.messages import ModelInfo
from lorimer.errors import Busy
from lorimer.scheduler import accepting, payloads, records
from lorimer.scheduler.completions import Completion, CompletionLogs
from lorimer.scheduler.intake import Accepted
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.loss_checks import check_loss
from lorimer.scheduler.losses import loss_id
from lorimer.scheduler.models import ModelScheduler, ServedModel
from lorimer.scheduler.operation import Operation, Outcome, QueueState
from lorimer.scheduler.recovery import recover
from lorimer.scheduler.retention import sweep
from lorimer.scheduler.run_requests import RunRequests
from lorimer.scheduler.sampling import SampleOperation, sequence_ids
from lorimer.scheduler.stats import SchedulerStats, take_stats
from lorimer.scheduler.translate import estimated_tokens
from lorimer.store import futures
from lorimer.store.database import Store
from lorimer.store.directory import DataDirectory
from lorimer.store.samplers import SamplingSession
from lorimer.store.sessions import Session
from lorimer.store.users import User

log = logging.getLogger("lorimer.scheduler")


class Scheduler(RunRequests):
    def __init__(
        self,
        store: Store,
        directory: DataDirectory,
        models: Mapping[str, EngineConfig],
        limits: SchedulerLimits | None = None,
    ) -> None:
        super().__init__(store, directory, models, limits)
        self.recorder.on_settled = self._settled
        self.completions_log = CompletionLogs(store)
        self.known_losses: dict[str, payloads.CreateLoss] = {}
        self._tasks: set[asyncio.Task[None]] = set()

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

    async def sweep(self) -> None:
        """Free what has expired."""
        await sweep(self)

    def served_models(self) -> list[ServedModel]:
        return [model.status() for model in self.models.values()]

    def stats(self) -> SchedulerStats:
        return take_stats(self.open.values(), self.models.values())

    def start_engine(self, name: str) -> None:
        self._model(name).slot.start()

    async def model_info(self, name: str) -> ModelInfo:
        return await self._model(name).info()

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

    async def sample(
        self, user: User, sampler: SamplingSession, request: types.SampleRequest, encoded: bytes
    ) -> Accepted:
        """The request and its JSON, as ``translate.encoded_sample`` gives them: with a seed."""
        if self._is_closing:
            raise Busy("the server is shutting down")
        model = self._model(sampler.base_model)
        model.sampling.check_room(user.user_id)
        accepting.check_sample(request)
        operation = SampleOperation(
            request_id=secrets.token_hex(16),
            user_id=user.user_id,
            session_id=sampler.session_id,
            base_model=sampler.base_model,
            lane=sampler.sampling_session_id,
            seq_id=request.seq_id if request.seq_id is not None else secrets.randbits(62),
            kind="sample",
            tokens=estimated_tokens(request.prompt),
            payload=payloads.encode_payload(payloads.Sample(request=encoded)),
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
        if (owner := self.recorder.owner(request_id)) is not None:
            return owner
        row = await self.store.read(futures.get, request_id)
        return None if row is None else row.user_id

    def recent(self, request_id: str) -> Outcome | None:
        """How a request ended, if that was lately."""
        if (outcome := self.recorder.recent(request_id)) is not None:
            self.notes.fetched(request_id)
        return outcome

    async def wait(self, request_id: str, timeout: float) -> Outcome:
        """How a request stands, after at most ``timeout`` seconds."""
        if (recent := self.recent(request_id)) is not None:
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
