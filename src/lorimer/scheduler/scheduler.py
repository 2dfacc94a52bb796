"""The scheduler's interface for the server: submit, sample, wait, cancel, status.

A submit is answered as soon as its row is committed and never waits for other requests. The server checks permissions.
Each replica of a base model has a core with its driver (``owner.py``); this module turns requests into operations,
chooses the replica, and looks up results. Call all methods on one event loop.
"""

import logging
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lorimer import types
from lorimer.engine.config import EngineConfig
from lorimer.engine.messages import ModelInfo, StepField
from lorimer.errors import Busy, Gone, InvalidInput, NotFound, Unsupported
from lorimer.scheduler import events, journal, payloads
from lorimer.scheduler.admission import (
    check_fits,
    check_optimizer_state,
    values_of_request,
    values_of_weights,
)
from lorimer.scheduler.custom_loss import check_loss_id, loss_id
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.owner import Owner
from lorimer.scheduler.placement import (
    Kind,
    Load,
    able_to_sample,
    choose_for_run,
    choose_for_sample,
    full_configs,
    is_plain,
    replica_configs,
    sample_key,
    vllm_lacks,
)
from lorimer.scheduler.results import Completion, FinishedSamples, Results
from lorimer.scheduler.runs import Operation, Outcome, QueueState
from lorimer.scheduler.samples import Sample
from lorimer.scheduler.stats import STATES, ReplicaStatus, SchedulerStats, ServedModel, combine, take_stats
from lorimer.scheduler.streaming import DirectSample
from lorimer.scheduler.translate import estimated_tokens, sequence_ids, with_seed
from lorimer.scheduler.usage_buffer import UsageBuffer
from lorimer.store import futures
from lorimer.store.database import Store
from lorimer.store.directory import DataDirectory
from lorimer.store.objects import DirectoryObjects
from lorimer.store.runs import Method, Run, RunValues
from lorimer.store.samplers import SamplingSession
from lorimer.store.scratch import Scratch
from lorimer.store.sessions import Session
from lorimer.store.users import User
from lorimer.store.weights import Weights, WeightsShape, get_weights
from lorimer.types.encoding import EncodedTraining

log = logging.getLogger("lorimer.scheduler")

MAX_SHAPES = 10_000


@dataclass(frozen=True)
class Accepted:
    """The answer to a submit."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class Replica(Protocol):
    """A replica of a base model, computed by this process (`Driver`) or by another one."""

    name: str
    """The base model."""
    place: str
    kind: Kind

    async def submit(self, operation: Operation, event: events.Event) -> events.Admit: ...
    async def info(self) -> ModelInfo: ...
    def cancel(self, request_id: str) -> None: ...
    def load(self) -> Load: ...
    def holds(self, model_id: str) -> bool: ...
    def status(self) -> ServedModel: ...
    def queue_state(self, operation: Operation) -> tuple[QueueState, str]: ...
    def start_sample(
        self, user_id: str, weights_id: str | None, request: types.SampleRequest, grammar: str, stream: bool
    ) -> DirectSample: ...


class Scheduler:
    """Turns requests into operations, hands them to a replica of their base model, and waits for results."""

    def __init__(
        self,
        store: Store,
        directory: DataDirectory,
        models: Mapping[str, EngineConfig],
        limits: SchedulerLimits | None = None,
        num_replicas: Mapping[str, int] | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        """``models`` are the served base models, each with one replica unless ``num_replicas`` says otherwise."""
        self.limits = limits or SchedulerLimits()
        self.store, self.directory, self.models = store, directory, models
        self.scratch = scratch or Scratch(DirectoryObjects(directory), directory)
        self.scratch.reads = lambda: {one.reads for one in self.results.open.values() if one.reads is not None}
        self.results = Results(FinishedSamples(store), self.limits.recent_result_bytes)
        self.usage = UsageBuffer(store)
        self.owner = Owner(store, self.scratch, self.limits, self.results, self.usage)
        self._replicas: Mapping[str, Replica] = self.owner.drivers
        """Those of all base models, by place."""
        self._num_replicas = num_replicas or {}
        self._places: dict[str, str] = {}
        """The replica of each run that was used since the start, by model_id."""
        self._shapes: dict[str, WeightsShape] = {}
        """The shapes of weights that were sampled, by weights_id."""
        self._chance = random.Random()
        self._is_closing = False

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Recover the requests of an earlier server. Engines start on demand."""
        full = full_configs(self.models, self.limits.max_full_runs)
        for place, (name, config) in (replica_configs(self.models, self._num_replicas) | full).items():
            self.owner.open(place, name, config)
        await self.owner.recover()

    async def close(self, timeout: float = 30.0) -> None:
        """Finish what is being computed, take a snapshot of every run, and stop the engines."""
        self._is_closing = True
        await self.owner.close(timeout)
        await self.usage.flush()

    async def sweep(self) -> None:
        """Delete what has expired."""
        await self.owner.sweep()
        for model_id in [model_id for model_id, place in self._places.items() if not self._holds(place, model_id)]:
            del self._places[model_id]

    def replicas(self, name: str) -> Sequence[Replica]:
        """Return the engines of a base model. Raise `NotFound` if it is not served."""
        if name not in self.models:
            raise NotFound(f"base model {name!r} is not served here; accepted are {', '.join(self.models)}")
        return [one for one in self._replicas.values() if one.name == name and one.kind == "plain"]

    def full_replicas(self, name: str) -> Sequence[Replica]:
        """Return the replicas for full runs of a base model. Raise `Unsupported` if there are none."""
        self.replicas(name)
        if (quantize := self.models[name].quantize) != "none":
            raise Unsupported(f"the base model {name!r} is quantised ({quantize}), so it trains adapters only")
        found = [replica for replica in self._replicas_of(name) if replica.kind == "full"]
        if not found:
            raise Unsupported(self.no_full_runs)
        return found

    no_full_runs = "full fine-tuning is switched off on this server (max_full_runs is 0); LoRA is accepted"
    """Why there are no replicas for full runs."""

    def _replicas_of(self, name: str) -> Sequence[Replica]:
        """Return the replicas of a base model, also those that only sample, and those for full runs."""
        return [replica for replica in self._replicas.values() if replica.name == name]

    def _shown_replicas(self, name: str) -> Sequence[Replica]:
        """Return the replicas of a base model, those for full runs only while they have an engine."""
        return [one for one in self._replicas_of(name) if one.kind != "full" or one.status().state != "idle"]

    def replica_states(self) -> list[ReplicaStatus]:
        """Return the replicas of all base models with their owners."""
        owner = self.owner
        return [
            ReplicaStatus(status, status.state, owner.owner_id, None, owner.started_at, None)
            for name in self.models
            for status in (replica.status() for replica in self._shown_replicas(name))
        ]

    def served_models(self) -> list[ServedModel]:
        found = {name: [replica.status() for replica in self._shown_replicas(name)] for name in self.models}
        return [combine(statuses, lambda status: is_plain(status.replica)) for statuses in found.values()]

    def stats(self) -> SchedulerStats:
        cores = [driver.core for driver in self.owner.drivers.values()]
        return take_stats(self.results.open.values(), cores, self.served_models())

    def start_engine(self, name: str) -> None:
        """Start an engine for each replica of a base model."""
        for driver in self.owner.drivers.values():
            if driver.name == name and driver.kind != "full":
                driver.slot.start()

    async def model_info(self, name: str) -> ModelInfo:
        replicas = self.replicas(name)
        ready = [replica for replica in replicas if replica.status().info is not None]
        return await (ready or replicas)[0].info()

    # ── runs ──────────────────────────────────────────────────────────────────────────────────────────

    async def create_model(
        self,
        user: User,
        session: Session,
        request: types.CreateModelRequest,
        adapter_directory: str | None = None,
    ) -> Accepted:
        """Create a run with a new adapter, or with the weights of a directory that PEFT wrote, or a full run."""
        values = values_of_request(request, self.models)
        payload = payloads.CreateModel(adapter_directory=adapter_directory)
        return await self._create(user, session, request.model_seq_id, values, payload, request.run)

    async def create_from_weights(
        self, user: User, session: Session, request: types.LoadWeightsRequest, weights: Weights
    ) -> Accepted:
        """Create a run with the shape of saved weights and load them."""
        if request.model_seq_id is None:
            raise InvalidInput("model_seq_id is missing; a new run needs one")
        values = values_of_weights(request, weights)
        payload = payloads.CreateModel(
            path=request.path, weights_name=weights.name, optimizer=request.optimizer, answers_load=True
        )
        return await self._create(user, session, request.model_seq_id, values, payload, request.run)

    async def _create(
        self,
        user: User,
        session: Session,
        model_seq_id: int,
        values: RunValues,
        payload: payloads.CreateModel,
        identity: types.RunIdentity | None,
    ) -> Accepted:
        self._check_active(session)
        model_id = f"{session.session_id}:train:{model_seq_id}"
        replica = self._replica_of_run(model_id, values.base_model, method=values.method)
        creation = Operation(
            request_id=secrets.token_hex(16),
            user_id=user.user_id,
            session_id=session.session_id,
            base_model=values.base_model,
            lane=f"{session.session_id}:models",
            seq_id=model_seq_id,
            kind="load_weights" if payload.answers_load else "create_model",
            payload=payloads.encode_payload(payload),
            reads=payload.weights_name,
            place=replica.place,
        )
        max_runs = self.limits.max_runs_per_session
        accept = journal.AcceptRun(creation, session, values, max_runs, identity, loaded_from=payload.path)
        return await self._submit(replica, creation, events.CreateSubmitted(accept))

    async def train(self, user: User, run: Run, request: EncodedTraining) -> Accepted:
        """Submit a ``forward`` or ``forward_backward``."""
        if request.loss_fn == "custom":
            check_loss_id(run.session_id, request.loss_fn_config.get("loss_id"))
        kind = "forward" if request.forward_only else "forward_backward"
        return await self._submit_to_run(
            user, run, request.seq_id, kind, request.payload, request.tokens, request.payload_sha256
        )

    async def optim_step(
        self, user: User, run: Run, seq_id: int, params: dict[str, StepField], optimizer_type: str = "adamw"
    ) -> Accepted:
        if optimizer_type != run.optimizer_type:
            raise InvalidInput(f"the parameters are of {optimizer_type!r}; the run was made for {run.optimizer_type!r}")
        return await self._submit_to_run(user, run, seq_id, "optim_step", payloads.OptimStep(params=params))

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
        return await self._submit_to_run(user, run, seq_id, journal.SAVE_KINDS[kind], payload)

    async def save_ephemeral(self, user: User, run: Run, seq_id: int, sampling_session_seq_id: int) -> Accepted:
        payload = payloads.SaveEphemeral(sampling_session_seq_id=sampling_session_seq_id)
        return await self._submit_to_run(user, run, seq_id, "save_weights_for_sampler", payload)

    async def load_weights(
        self, user: User, run: Run, seq_id: int, *, path: str, weights: Weights, optimizer: bool
    ) -> Accepted:
        check_fits(run, weights)
        check_optimizer_state(weights, optimizer, run.optimizer_type)
        payload = payloads.Load(path=path, weights_name=weights.name, optimizer=optimizer)
        return await self._submit_to_run(user, run, seq_id, "load_weights", payload)

    async def _submit_to_run(
        self,
        user: User,
        run: Run,
        seq_id: int,
        kind: str,
        payload: payloads.AnyPayload | bytes,
        tokens: int = 0,
        payload_sha256: str = "",
    ) -> Accepted:
        replica = self._replica_of_run(run.model_id, run.base_model, run.replica, run.method)
        operation = Operation(
            request_id=secrets.token_hex(16),
            user_id=user.user_id,
            session_id=run.session_id,
            base_model=run.base_model,
            lane=run.model_id,
            seq_id=seq_id,
            kind=kind,
            tokens=tokens,
            payload=payload if isinstance(payload, bytes) else payloads.encode_payload(payload),
            payload_sha256=payload_sha256,
            reads=payload.weights_name if isinstance(payload, payloads.Load) else None,
            place=replica.place,
        )
        return await self._submit(replica, operation, events.Submitted(operation, run))

    def known_run(self, model_id: str) -> Run | None:
        """Return the row of a run that is active here; others are only in the store."""
        for driver in self.owner.drivers.values():
            if (run := driver.core.runs.get(model_id)) is not None:
                return run.row
        return None

    async def reject(self, user: User, run: Run, seq_id: int, reason: str) -> None:
        """Consume the seq_id of a submit that the server refuses with an error the client will not retry."""
        operation = Operation(
            request_id=secrets.token_hex(16),
            user_id=user.user_id,
            session_id=run.session_id,
            base_model=run.base_model,
            lane=run.model_id,
            seq_id=seq_id,
            kind="rejected",
        )
        if any((one.kind == "full") == (run.method == "full") for one in self._replicas_of(run.base_model)):
            replica = self._replica_of_run(run.model_id, run.base_model, run.replica, run.method)
            await self._submit(replica, operation, events.ConsumeSubmitted(operation, run, reason))
        else:
            await self.store.submit(journal.Consume(operation, run, reason).apply)

    async def unload(self, user: User, run: Run) -> Accepted:
        """Evict an idle run from memory. Its next use loads it again."""
        operation = Operation(
            request_id=secrets.token_hex(16),
            user_id=user.user_id,
            session_id=run.session_id,
            base_model=run.base_model,
            lane=f"{run.model_id}:unload",
            seq_id=0,
            kind="unload_model",
        )
        replica = self._replica_of_run(run.model_id, run.base_model, run.replica, run.method)
        return await self._submit(replica, operation, events.UnloadSubmitted(operation, run))

    # ── losses and samples ────────────────────────────────────────────────────────────────────────────

    async def create_loss(self, user: User, session: Session, request: types.CreateCustomLossRequest) -> Accepted:
        """Have any engine validate an uploaded loss."""
        self._check_active(session)
        payload = payloads.CreateLoss(
            loss_id=loss_id(session.session_id, request.custom_loss_seq_id),
            name=request.name,
            inputs=[(item.name, item.rank) for item in request.inputs],
            graph=request.graph.model_dump(),
        )
        replica = self.loss_checker()
        operation = Operation(
            request_id=secrets.token_hex(16),
            user_id=user.user_id,
            session_id=session.session_id,
            base_model=replica.name,
            lane=f"{session.session_id}:losses",
            seq_id=request.custom_loss_seq_id,
            kind="create_custom_loss",
            payload=payloads.encode_payload(payload),
            place=replica.place,
        )
        return await self._submit(replica, operation, events.Submitted(operation))

    def loss_checker(self) -> Replica:
        """Return any replica, preferably one with an engine."""
        replicas = [replica for name in self.models for replica in self.replicas(name)]
        return min(replicas, key=lambda replica: STATES.index(replica.status().state))

    async def sample(
        self,
        user: User,
        sampler: SamplingSession,
        request: types.SampleRequest,
        encoded: bytes,
        *,
        has_seed: bool = True,
    ) -> Accepted:
        """Submit a sample, given with its JSON as `translate.encoded_sample` returns both: with a seed.

        ``has_seed``: the client chose the seed.
        """
        base_model, weights_id = sampler.base_model, sampler.weights_id
        shape = await self._shape_of(base_model, weights_id)
        replica = self._replica_of_sample(
            user.user_id, base_model, weights_id, request, shape=shape, has_seed=has_seed, model_id=sampler.model_id
        )
        sample = Sample(
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
            weights_id=sampler.weights_id,
            model_id=sampler.model_id,
            place=replica.place,
        )
        accepted = await self._submit(replica, sample, events.Submitted(sample))
        return Accepted(accepted.request_id, sample_sequence_ids=sequence_ids(accepted.request_id, request.num_samples))

    async def cancel(self, request_id: str) -> None:
        """Cancel a sample. Other requests cannot be cancelled and continue."""
        operation = self.results.open.get(request_id)
        if isinstance(operation, Sample) and (replica := self._replica_at(operation.place)) is not None:
            replica.cancel(request_id)

    def start_sample(
        self,
        user_id: str,
        base_model: str,
        weights_id: str | None,
        request: types.SampleRequest,
        *,
        shape: WeightsShape | None = None,
        grammar: str = "",
        stream: bool = False,
    ) -> DirectSample:
        """Enqueue a direct sample, which is not journaled; with ``stream`` its tokens come in ``pieces``.

        ``shape`` is that of the weights. Raise `Busy` if the queue is full.
        """
        has_seed = request.sampling_params.seed is not None
        replica = self._replica_of_sample(
            user_id, base_model, weights_id, request, shape=shape, has_seed=has_seed, grammar=grammar
        )
        return replica.start_sample(user_id, weights_id, with_seed(request), grammar, stream)

    async def completions(
        self, sampling_session_id: str, clone_id: int, prev_cursor: int, timeout: float, retrieved_ids: list[str]
    ) -> tuple[list[Completion], int]:
        """Return what finished since ``prev_cursor``, waiting for the first if there is nothing yet."""
        if retrieved_ids:
            for request_id in await self.store.write(journal.release, sampling_session_id, retrieved_ids):
                self.results.forget(request_id)
        return await self.results.finished_samples.after(sampling_session_id, clone_id, prev_cursor, timeout)

    # ── how things stand ──────────────────────────────────────────────────────────────────────────────

    async def owner_of(self, request_id: str) -> str | None:
        if (owner := self.results.owner(request_id)) is not None:
            return owner
        row = await self.store.read(futures.get, request_id)
        return None if row is None else row.user_id

    def recent(self, request_id: str) -> Outcome | None:
        """Return the outcome of a request that ended recently, if it is cached."""
        if (outcome := self.results.recent(request_id)) is not None:
            self.usage.fetched(request_id)
        return outcome

    async def wait(self, request_id: str, timeout: float) -> Outcome:
        """Wait at most ``timeout`` seconds, and return the outcome or state of a request."""
        if (recent := self.recent(request_id)) is not None:
            return recent
        operation = self.results.open.get(request_id)
        if operation is None:
            return await self._stored_outcome(request_id)
        outcome = await self.results.wait(request_id, timeout)
        if outcome is None:
            return Outcome("pending", *self._queue_state(operation))
        self.usage.fetched(request_id)
        return outcome

    async def _stored_outcome(self, request_id: str) -> Outcome:
        outcome = await self.store.read(journal.outcome_of, request_id)
        if outcome is None:
            return Outcome("gone", error=f"there is no request {request_id!r}; its result may have expired")
        if outcome.state == "done":
            self.usage.fetched(request_id)
        return outcome

    def _queue_state(self, operation: Operation) -> tuple[QueueState, str]:
        replica = self._replica_at(operation.place)
        if replica is None:
            return "paused_capacity", f"base model {operation.base_model!r} is not served; start the server with it"
        return replica.queue_state(operation)

    # ── where requests are computed ───────────────────────────────────────────────────────────────────

    def _replica_at(self, place: str | None) -> Replica | None:
        return self._replicas.get(place or "")

    def _holds(self, place: str, model_id: str) -> bool:
        replica = self._replica_at(place)
        return replica is not None and replica.holds(model_id)

    def _replica_of_run(
        self, model_id: str, base_model: str, replica: str | None = None, method: Method = "lora"
    ) -> Replica:
        """Return the replica that holds a run, or place the run. Its row names ``replica``."""
        replicas = self.full_replicas(base_model) if method == "full" else self.replicas(base_model)
        if len(replicas) == 1:
            return replicas[0]
        before = self._replica_at(self._places.get(model_id))
        if before is not None and before.holds(model_id):
            return before
        chosen = choose_for_run(replicas, self._chance)
        self._places[model_id] = chosen.place
        return chosen

    def _replica_of_sample(
        self,
        user_id: str,
        base_model: str,
        weights_id: str | None,
        request: types.SampleRequest,
        *,
        shape: WeightsShape | None,
        has_seed: bool,
        grammar: str = "",
        model_id: str | None = None,
    ) -> Replica:
        """Return a replica that can answer the request exactly. ``model_id`` is the run of the weights, if known."""
        if shape is not None and shape.rank == 0:
            full, holder = self.full_replicas(base_model), self._places.get(model_id or "")
            return next((one for one in full if one.place == holder), None) or choose_for_sample(full, weights_id or "")
        replicas, config = self.replicas(base_model), self.models[base_model]
        if config.vllm is not None:
            lacks = vllm_lacks(request, config.vllm, shape=shape, has_seed=has_seed, grammar=grammar)
            samplers = [replica for replica in self._replicas_of(base_model) if replica.kind == "sampler"]
            if lacks is None and any(replica.status().state == "idle" for replica in samplers):
                self.start_engine(base_model)
            replicas = able_to_sample(replicas, samplers, lacks, config, request)
        if len(replicas) == 1:
            return replicas[0]
        return choose_for_sample(replicas, sample_key(user_id, weights_id, request.prompt))

    async def _shape_of(self, base_model: str, weights_id: str | None) -> WeightsShape | None:
        """Return the shape of weights, on which the placement of their samples depends."""
        if weights_id is None or base_model not in self.models:
            return None
        if weights_id not in self._shapes:
            found = await self.store.read(get_weights, weights_id)
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            # Without a row they were removed, as the core will say.
            self._shapes[weights_id] = WeightsShape(1) if found is None else found.shape
        return self._shapes[weights_id]

    # ── what all submits share ────────────────────────────────────────────────────────────────────────

    async def _submit(self, replica: Replica, operation: Operation, event: events.Event) -> Accepted:
        if self._is_closing:
            raise Busy("the server is shutting down")
        if operation.reads is None:
            admitted = await replica.submit(operation, event)
        else:  # engines read these weights in the order of commands, which must not wait for an object store
            with self.scratch.pinned("weights", operation.reads):
                await self.scratch.bring("weights", operation.reads)
                admitted = await replica.submit(operation, event)
        return Accepted(admitted.request_id, admitted.model_id)

    def _check_active(self, session: Session) -> None:
        if session.status != "active":
            raise Gone(f"session {session.session_id} has ended; make a new one")
