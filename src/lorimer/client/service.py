"""The door to a server: makes the clients that train and sample, in one session that begins when it is needed."""

import asyncio
import os
import threading
import warnings
from collections.abc import Mapping
from dataclasses import replace
from traceback import format_exception_only
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from lorimer import types
from lorimer.client import custom_loss
from lorimer.client.connection import Connection
from lorimer.client.custom_loss import LossHandle, PerDatumLossFn
from lorimer.client.futures import APIFuture, AwaitableConcurrentFuture, warn_if_in_loop
from lorimer.client.polling import QueueNotes, json_result, wait_for_result
from lorimer.client.rest import RestClient
from lorimer.client.retries import RetryConfig
from lorimer.client.runs import RunOptions, identity_of
from lorimer.client.sampling import SamplingClient
from lorimer.client.sessions import Session
from lorimer.client.training import LOAD_WEIGHTS, TrainingClient
from lorimer.client.transport import parse
from lorimer.types.optim import optimizer_config

CREATE_MODEL = json_result("CreateModel", types.CreateModelResponse)
MAX_DETAIL_CHARS = 2000
CREATE_LOSS = json_result("CreateCustomLoss", types.CreateCustomLossResponse)


class ServiceClient:
    """A server at ``base_url``, or with ``base_url="local"`` one in this process, whose base model is ``model``.

    Used as a context manager it tells the server on leaving how the session ended.
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        model: str | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            names = ", ".join(sorted(kwargs))
            warnings.warn(f"ServiceClient does not know {names}, and ignores it", FutureWarning, stacklevel=2)
        self._project_id = project_id or os.environ.get("TINKER_PROJECT_ID") or None
        self._connection = Connection(base_url, api_key, default_headers_overrides, model)
        self._session = Session(
            self._connection, user_metadata=user_metadata, project_id=self._project_id, display_name=display_name
        )
        self._lock = threading.Lock()
        self._is_closed = False

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None:
            self.close("success").result()
        else:
            detail = "".join(format_exception_only(exc_type, exc_value)).strip()[:MAX_DETAIL_CHARS]
            is_cancelled = issubclass(exc_type, asyncio.CancelledError)  # as asyncio does at Ctrl-C, which says nothing
            self.close(
                "errored" if issubclass(exc_type, Exception) else "interrupted", None if is_cancelled else detail
            ).result()

    def close(
        self, status: Literal["success", "errored", "interrupted"], detail: str | None = None
    ) -> AwaitableConcurrentFuture[None]:
        """Finish the session; its clients cannot be used any more."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True

        async def close() -> None:
            if not was_closed:
                await self._session.finish(status, detail)

        return self._connection.run(close())

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("ServiceClient is closed")

    @property
    def holder(self) -> Session:
        """The session, which is created now if it was not before."""
        self._check_open()
        if not self._session.session_id:
            if self._connection.loop.is_current:
                raise RuntimeError("a session cannot be created from within the SDK's own event loop")
            self._connection.run(self._session.start()).result()
        return self._session

    def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        """The base models of the server."""
        warn_if_in_loop("get_server_capabilities")
        return self._capabilities().result()

    async def get_server_capabilities_async(self) -> types.GetServerCapabilitiesResponse:
        return await self._capabilities()

    def _capabilities(self) -> AwaitableConcurrentFuture[types.GetServerCapabilitiesResponse]:
        self._check_open()
        path = "/api/v1/get_server_capabilities"
        return self._connection.run(self._connection.transport.ask(types.GetServerCapabilitiesResponse, "GET", path))

    # ── training ──────────────────────────────────────────────────────────────────────────────────────

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: types.OptimizerConfig | str | None = None,
        *,
        use_rslora: bool = False,
        use_dora: bool = False,
        init_from: str | None = None,
        **run: Unpack[RunOptions],
    ) -> TrainingClient:
        """A new adapter on a base model.

        ``optimizer`` may be the name of one, as in ``optimizer="muon"``; ``use_rslora`` scales the adapter by
        alpha / sqrt(rank), ``use_dora`` trains the norms of rows apart from their directions, and ``init_from`` names
        an adapter of the server's ``peft_adapters`` to begin with. ``run`` are ``name``, ``notes``, ``tags``,
        ``config`` and others of ours.
        """
        warn_if_in_loop("create_lora_training_client")
        lora = _lora_config(rank, seed, train_mlp, train_attn, train_unembed, use_rslora, use_dora, init_from)
        return self._create(base_model, lora, user_metadata, optimizer, identity_of(run)).result()

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: types.OptimizerConfig | str | None = None,
        *,
        use_rslora: bool = False,
        use_dora: bool = False,
        init_from: str | None = None,
        **run: Unpack[RunOptions],
    ) -> TrainingClient:
        lora = _lora_config(rank, seed, train_mlp, train_attn, train_unembed, use_rslora, use_dora, init_from)
        return await self._create(base_model, lora, user_metadata, optimizer, identity_of(run))

    def create_training_client(
        self,
        base_model: str,
        method: Literal["lora", "full"] = "lora",
        rank: int | None = None,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        train_embed: bool | None = None,
        train_norms: bool | None = None,
        user_metadata: dict[str, str] | None = None,
        optimizer: types.OptimizerConfig | str | None = None,
        **run: Unpack[RunOptions],
    ) -> TrainingClient:
        """A new run: an adapter on a base model, or with ``method="full"`` its weights themselves.

        ``rank`` (32) and ``seed`` are for adapters, ``train_embed`` and ``train_norms`` (true) for full runs.
        """
        warn_if_in_loop("create_training_client")
        config = _config(method, rank, seed, train_mlp, train_attn, train_unembed, train_embed, train_norms)
        return self._create(base_model, config, user_metadata, optimizer, identity_of(run)).result()

    async def create_training_client_async(
        self,
        base_model: str,
        method: Literal["lora", "full"] = "lora",
        rank: int | None = None,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        train_embed: bool | None = None,
        train_norms: bool | None = None,
        user_metadata: dict[str, str] | None = None,
        optimizer: types.OptimizerConfig | str | None = None,
        **run: Unpack[RunOptions],
    ) -> TrainingClient:
        config = _config(method, rank, seed, train_mlp, train_attn, train_unembed, train_embed, train_norms)
        return await self._create(base_model, config, user_metadata, optimizer, identity_of(run))

    def _create(
        self,
        base_model: str,
        config: types.LoraConfig | types.FullConfig,
        user_metadata: dict[str, str] | None,
        optimizer: types.OptimizerConfig | str | None,
        run: types.RunIdentity | None,
    ) -> AwaitableConcurrentFuture[TrainingClient]:
        self._check_open()
        number = self._session.next_number("model")
        return self._connection.run(self._create_model(number, base_model, config, user_metadata, optimizer, run))

    async def _create_model(
        self,
        number: int,
        base_model: str,
        config: types.LoraConfig | types.FullConfig,
        user_metadata: dict[str, str] | None,
        optimizer: types.OptimizerConfig | str | None,
        run: types.RunIdentity | None,
    ) -> TrainingClient:
        request = types.CreateModelRequest(
            session_id=await self._session.start(),
            model_seq_id=number,
            base_model=base_model,
            lora_config=config if isinstance(config, types.LoraConfig) else None,
            full_config=config if isinstance(config, types.FullConfig) else None,
            user_metadata=user_metadata,
            optimizer_config=_optimizer_config(optimizer) or types.AdamOptimizerConfig(),
            run=run,
        )
        promise = await self._submit("/api/v1/create_model", request)
        notes = QueueNotes(f"creating a run on {base_model}")
        created = await wait_for_result(self._connection, promise.request_id, CREATE_MODEL, notes)
        return TrainingClient(self._session, number, created.model_id)

    async def _submit(self, path: str, request: Any) -> types.UntypedAPIFuture:
        return parse(types.UntypedAPIFuture, await self._connection.transport.call("POST", path, request))

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: types.OptimizerConfig | str | None = None,
        **run: Unpack[RunOptions],
    ) -> TrainingClient:
        """A new run that begins with saved weights and a new optimiser."""
        warn_if_in_loop("create_training_client_from_state")
        return self._from_state(path, base_model, user_metadata, weights_access_token, optimizer, False, run).result()

    async def create_training_client_from_state_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: types.OptimizerConfig | str | None = None,
        **run: Unpack[RunOptions],
    ) -> TrainingClient:
        return await self._from_state(path, base_model, user_metadata, weights_access_token, optimizer, False, run)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        **run: Unpack[RunOptions],
    ) -> TrainingClient:
        """A new run that goes on from saved weights with the saved state of the optimiser."""
        warn_if_in_loop("create_training_client_from_state_with_optimizer")
        return self._from_state(path, base_model, user_metadata, weights_access_token, None, True, run).result()

    async def create_training_client_from_state_with_optimizer_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        **run: Unpack[RunOptions],
    ) -> TrainingClient:
        return await self._from_state(path, base_model, user_metadata, weights_access_token, None, True, run)

    def _from_state(
        self,
        path: str,
        base_model: str | None,
        user_metadata: dict[str, str] | None,
        token: str | None,
        optimizer: types.OptimizerConfig | str | None,
        with_optimizer: bool,
        run: RunOptions,
    ) -> AwaitableConcurrentFuture[TrainingClient]:
        self._check_open()
        request = types.LoadWeightsRequest(
            path=path,
            optimizer=with_optimizer,
            optimizer_config=_optimizer_config(optimizer),
            base_model=base_model,
            user_metadata=user_metadata,
            weights_access_token=token,
            run=identity_of(run),
        )
        number = self._session.next_number("model")
        return self._connection.run(self._load_model(number, request))

    async def _load_model(self, number: int, request: types.LoadWeightsRequest) -> TrainingClient:
        session_id = await self._session.start()
        if not self._connection.config.create_model_via_load_weights:
            return await self._create_and_load(number, request)
        request = request.model_copy(update={"session_id": session_id, "model_seq_id": number})
        promise = await self._submit("/api/v1/load_weights", request)
        model_id = f"{session_id}:train:{number}"
        notes = QueueNotes(f"creating a run from {request.path}")
        await wait_for_result(self._connection, promise.request_id, LOAD_WEIGHTS, notes)
        return TrainingClient(self._session, number, model_id)

    async def _create_and_load(self, number: int, request: types.LoadWeightsRequest) -> TrainingClient:
        """The same in three requests, for servers that do not have it in one."""
        token = request.weights_access_token
        info = await self._connection.transport.ask(
            types.WeightsInfoResponse,
            "POST",
            "/api/v1/weights_info",
            {"tinker_path": request.path},
            headers={"X-API-Key": token} if token else None,
        )
        if info.lora_rank is None and info.method != "full":
            raise ValueError(f"{request.path} is neither an adapter nor a full run")
        given = {"train_mlp": info.train_mlp, "train_attn": info.train_attn, "train_unembed": info.train_unembed}
        flags = {name: value is not False for name, value in given.items()}
        config: types.LoraConfig | types.FullConfig
        if info.lora_rank is None:
            more = {"train_embed": info.train_embed is not False, "train_norms": info.train_norms is not False}
            config = types.FullConfig(**flags, **more)
        else:
            config = _lora_config(
                info.lora_rank,
                None,
                flags["train_mlp"],
                flags["train_attn"],
                flags["train_unembed"],
                info.use_rslora is True,
                info.use_dora is True,
                None,
            )
        client = await self._create_model(
            number,
            request.base_model or info.base_model,
            config,
            request.user_metadata,
            info.optimizer_config if request.optimizer else request.optimizer_config,
            request.run,
        )
        load = client.load_state_with_optimizer if request.optimizer else client.load_state
        await load(request.path, token)
        return client

    # ── sampling, losses, weights ─────────────────────────────────────────────────────────────────────

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """A client that samples from saved weights, or from a base model."""
        return self._create_sampler(model_path, base_model, retry_config, record_stability_info).result()

    async def create_sampling_client_async(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        return await self._create_sampler(model_path, base_model, retry_config, record_stability_info)

    def _create_sampler(
        self, model_path: str | None, base_model: str | None, retry_config: RetryConfig | None, record: bool
    ) -> APIFuture[SamplingClient]:
        self._check_open()
        if model_path is None and base_model is None:
            raise ValueError("model_path or base_model is needed; neither is given")
        return SamplingClient.create(
            self._session,
            model_path=model_path,
            base_model=base_model,
            retry_config=retry_config,
            record_stability_info=record,
        )

    def create_custom_loss(
        self, fn: PerDatumLossFn, input_ranks: Mapping[str, types.CustomLossInputRank]
    ) -> APIFuture[LossHandle]:
        """Trace a loss of one datum, and upload it where the server takes losses."""
        handle = custom_loss.trace(fn, input_ranks, self.holder.session_id)
        if not self._connection.config.custom_loss_server_side:
            return self._connection.run(_value(handle))
        request = types.CreateCustomLossRequest(
            session_id=handle.session_id,
            custom_loss_seq_id=self._session.next_number("custom_loss"),
            name=handle.name,
            inputs=list(handle.inputs),
            graph=custom_loss.encode_graph(handle),
        )

        async def upload() -> LossHandle:
            promise = await self._submit("/api/v1/create_custom_loss", request)
            notes = QueueNotes(f"uploading the loss {handle.name}")
            created = await wait_for_result(self._connection, promise.request_id, CREATE_LOSS, notes)
            return replace(handle, loss_id=created.loss_id)

        return self._connection.run(upload())

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: str | None = None
    ) -> AwaitableConcurrentFuture[str]:
        """Copy a checkpoint into this client's project; the path of the copy."""
        return self.create_rest_client().copy_weights(
            path, self._project_id, ttl_seconds=ttl_seconds, weights_access_token=weights_access_token
        )

    def create_rest_client(self) -> RestClient:
        """A client of what the server keeps; ``RestClient()`` makes one too."""
        self._check_open()
        return RestClient(self._connection)

    def get_console_url(self) -> str:
        session_id = self._session.session_id
        return self._connection.console_url("sessions", *([session_id] if session_id else []))

    def get_telemetry(self) -> None:
        """Nothing: this SDK reports nothing of its user."""


def _lora_config(
    rank: int,
    seed: int | None,
    mlp: bool,
    attn: bool,
    unembed: bool,
    use_rslora: bool,
    use_dora: bool,
    init_from: str | None,
) -> types.LoraConfig:
    if not (mlp or attn or unembed):
        raise ValueError("train_mlp, train_attn and train_unembed are all false; at least one must be true")
    return types.LoraConfig(
        rank=rank,
        seed=seed,
        train_mlp=mlp,
        train_attn=attn,
        train_unembed=unembed,
        use_rslora=use_rslora,
        use_dora=use_dora,
        init_from=init_from,
    )


def _config(
    method: Literal["lora", "full"],
    rank: int | None,
    seed: int | None,
    mlp: bool,
    attn: bool,
    unembed: bool,
    embed: bool | None,
    norms: bool | None,
) -> types.LoraConfig | types.FullConfig:
    """Return what a run trains; refuse what only the other method has."""
    if method not in ("lora", "full"):
        raise ValueError(f"method is {method!r}; 'lora' and 'full' are accepted")
    others = {"rank": rank, "seed": seed} if method == "full" else {"train_embed": embed, "train_norms": norms}
    if given := [name for name, value in others.items() if value is not None]:
        raise ValueError(f"{' and '.join(given)}: a run of the method {method!r} has none; leave it out")
    if method == "lora":
        return _lora_config(32 if rank is None else rank, seed, mlp, attn, unembed, False, False, None)
    flags = {"train_mlp": mlp, "train_attn": attn, "train_unembed": unembed}
    flags |= {"train_embed": embed is not False, "train_norms": norms is not False}
    if not any(flags.values()):
        raise ValueError(f"{', '.join(flags)} are all false; at least one must be true")
    return types.FullConfig(**flags)


def _optimizer_config(optimizer: types.OptimizerConfig | str | None) -> types.OptimizerConfig | None:
    return optimizer_config(optimizer) if isinstance(optimizer, str) else optimizer


async def _value(handle: LossHandle) -> LossHandle:
    return handle
