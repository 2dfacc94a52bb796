"""What can be asked of runs: make one, train, step, save, load, unload.

Who may ask for what is the server's business; here every caller is taken at their word.
"""

import secrets
import time
from collections.abc import Callable

from sqlalchemy import Connection

from lorimer import types
from lorimer.errors import Busy, InvalidInput
from lorimer.scheduler import accepting, payloads, records
from lorimer.scheduler.intake import Accepted, Intake
from lorimer.scheduler.losses import check_loss_id
from lorimer.scheduler.models import ModelScheduler
from lorimer.scheduler.operation import Operation
from lorimer.scheduler.runs import RunState
from lorimer.store import quotas
from lorimer.store.runs import Run
from lorimer.store.sessions import Session
from lorimer.store.users import User
from lorimer.store.weights import Weights
from lorimer.types.encoding import EncodedTraining


class RunRequests(Intake):
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
        most = self.limits.max_runs_per_session
        run, row, is_new = await self.store.write(accepting.accept_run, creation, session, values, most)
        if self._is_ours(creation, row, is_new):
            creation.is_accepted = True
            model.training.create(model.training.add_run(run), creation)
        return Accepted(row.request_id, run.model_id)

    async def train(self, user: User, run: Run, request: EncodedTraining) -> Accepted:
        kind = "forward" if request.forward_only else "forward_backward"
        accepting.check_seq_id(request.seq_id)
        if request.loss_fn == "custom":
            check_loss_id(run.session_id, request.loss_fn_config.get("loss_id"))
        return await self._submit(
            user, run, request.seq_id, kind, request.payload, request.tokens, request.payload_sha256
        )

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
        place = (run.user_id, run.model_id, kind, name, overwrite)
        return await self._submit(
            user,
            run,
            seq_id,
            accepting.SAVE_KINDS[kind],
            payload,
            check=lambda c: quotas.check_save(c, *place, self.limits.max_stored_bytes),
        )

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
        payload_sha256: str = "",
        check: Callable[[Connection], None] | None = None,
    ) -> Accepted:
        """Take an operation of a run: on record first, unless ``check`` refuses it, then in its order."""
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
            payload_sha256=payload_sha256,
            reads=payload.weights_name if isinstance(payload, payloads.Load) else None,
        )
        self._model(run.base_model).training.check_room(state, operation.size)
        return await self._surely(self._accept(state, operation, check))

    async def _accept(
        self, state: RunState, operation: Operation, check: Callable[[Connection], None] | None
    ) -> Accepted:
        # From here on a run that is being restored knows that this number is about to be on record.
        seq_id = operation.seq_id
        state.operations.setdefault(seq_id, operation)
        is_ours = False
        try:
            has_passed = state.has_passed(seq_id)
            row, is_new = await self.store.write(accepting.accept, operation, has_passed, check)
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
