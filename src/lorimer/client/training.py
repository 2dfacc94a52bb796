"""The client of one run: forward and backward passes, optimiser steps, saving and loading.

Every call is numbered before it returns, so that program order is the order of execution; each has a twin ending in
``_async``, which gives the same future. Numbering and sending are in ``submit.py``.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from pydantic import BaseModel

from lorimer import types
from lorimer.client import custom_loss, tokenizers
from lorimer.client.futures import APIFuture, AwaitableConcurrentFuture, warn_if_in_loop
from lorimer.client.metrics import Reports, metric_point
from lorimer.client.polling import json_result, protobuf_result
from lorimer.client.retries import RetryConfig
from lorimer.client.rollouts import SAMPLE, GivenRollout, RolloutReports
from lorimer.client.runs import run_path
from lorimer.client.sampling import SamplingClient
from lorimer.client.sessions import Session
from lorimer.client.submit import Operations, Submission, check_data, json_submission, merge_results, split_data
from lorimer.types.compatibility import PROTOBUF
from lorimer.types.encoding import decode_forward_backward_output, encode_training_request
from lorimer.types.metrics import ReportMetricsResponse
from lorimer.types.rollouts import LogRolloutsResponse
from lorimer.types.runs import EndStatus, FinishRunRequest

if TYPE_CHECKING:
    from lorimer.client.custom_loss import LossHandle

FORWARD = protobuf_result("Forward", decode_forward_backward_output)
FORWARD_BACKWARD = protobuf_result("ForwardBackward", decode_forward_backward_output)
OPTIM_STEP = json_result("OptimStep", types.OptimStepResponse)
SAVE_WEIGHTS = json_result("SaveWeights", types.SaveWeightsResponse)
LOAD_WEIGHTS = json_result("LoadWeights", types.LoadWeightsResponse)
SAVE_FOR_SAMPLER = json_result("SaveWeightsForSampler", types.SaveWeightsForSamplerResponseInternal)
SAVE_EXTERNAL = json_result("SaveWeightsExternal", types.SaveWeightsExternalResponse)

LossConfig = Mapping[str, float | str]
CustomLossFn = custom_loss.CustomLossFn


class TrainingClient:
    """Trains one adapter; made by a ``ServiceClient``."""

    def __init__(self, holder: Session, model_seq_id: int, model_id: types.ModelID) -> None:
        self.holder = holder
        self.model_id = model_id
        self._connection = holder.connection
        self._operations = Operations(holder.connection, f"training of {model_id}")
        self.reports = Reports(holder.connection, model_id)
        self.rollout_reports = RolloutReports(holder.connection, model_id)

    def forward(
        self, data: list[types.Datum], loss_fn: types.LossFnType, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Logprobs and loss without gradients."""
        return self._train(data, loss_fn, loss_fn_config, forward_only=True)

    async def forward_async(
        self, data: list[types.Datum], loss_fn: types.LossFnType, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[types.ForwardBackwardOutput]:
        return self.forward(data, loss_fn, loss_fn_config)

    def forward_backward(
        self, data: list[types.Datum], loss_fn: types.LossFnType, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Logprobs and loss; gradients are added up until the next ``optim_step``."""
        return self._train(data, loss_fn, loss_fn_config, forward_only=False)

    async def forward_backward_async(
        self, data: list[types.Datum], loss_fn: types.LossFnType, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[types.ForwardBackwardOutput]:
        return self.forward_backward(data, loss_fn, loss_fn_config)

    def _train(
        self, data: Sequence[types.Datum], loss_fn: str, loss_fn_config: LossConfig | None, *, forward_only: bool
    ) -> AwaitableConcurrentFuture[types.ForwardBackwardOutput]:
        check_data(data)
        config = self._connection.config

        def encoder(chunk: list[types.Datum], size: int) -> Callable[[int], Submission]:
            def encode(number: int) -> Submission:
                request = types.TrainingRequest(
                    self.model_id, number, chunk, loss_fn, dict(loss_fn_config or {}), forward_only
                )
                content = encode_training_request(request)
                return Submission("/api/v1/forward_backward", content, size, {"Content-Type": PROTOBUF})

            return encode

        chunks = split_data(data, config.fwdbwd_max_chunk_len, config.fwdbwd_max_chunk_bytes_count)
        kind = FORWARD if forward_only else FORWARD_BACKWARD
        return self._operations.submit([encoder(*chunk) for chunk in chunks], kind, merge_results)

    def forward_backward_custom(
        self,
        data: list[types.Datum],
        loss_fn: "CustomLossFn | LossHandle",
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Gradients of a loss of one's own, ``loss_fn(data, logprobs_list) -> (loss, metrics)``, or of a traced one.

        A function runs here, between a forward and a backward pass of the server; a traced loss may run there.
        """
        warn_if_in_loop("forward_backward_custom")
        steps = custom_loss.begin(self, data, loss_fn, loss_type_input)
        if isinstance(steps, APIFuture):
            return steps
        return custom_loss.end(self, steps, steps.forward.result())

    async def forward_backward_custom_async(
        self,
        data: list[types.Datum],
        loss_fn: "CustomLossFn | LossHandle",
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        steps = custom_loss.begin(self, data, loss_fn, loss_type_input)
        if isinstance(steps, APIFuture):
            return steps
        return custom_loss.end(self, steps, await steps.forward)

    def optim_step(
        self, optim_params: types.OptimParams | None = None, *, adam_params: types.AdamParams | None = None
    ) -> APIFuture[types.OptimStepResponse]:
        """Apply the gradients and clear them. ``adam_params`` is the older name of the same argument."""
        if optim_params is not None and adam_params is not None:
            raise ValueError("optim_params and adam_params are both given; one of them is accepted")
        params = optim_params if optim_params is not None else adam_params
        if not isinstance(params, types.AdamParams | types.OptimParamsBase):
            raise TypeError(
                f"optim_params is {params!r}; AdamParams or the parameters of another optimiser are accepted"
            )
        return self._operations.submit_one(
            self._json("/api/v1/optim_step", types.OptimStepRequest, optim_params=params), OPTIM_STEP
        )

    async def optim_step_async(
        self, optim_params: types.OptimParams | None = None, *, adam_params: types.AdamParams | None = None
    ) -> APIFuture[types.OptimStepResponse]:
        return self.optim_step(optim_params, adam_params=adam_params)

    def _json(self, address: str, model: type[BaseModel], /, **values: Any) -> Callable[[int], Submission]:
        return lambda number: json_submission(address, model(model_id=self.model_id, seq_id=number, **values))

    # ── saving and loading ────────────────────────────────────────────────────────────────────────────

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[types.SaveWeightsResponse]:
        """Save weights and optimiser under a name; the result has the path to load them from."""
        encoder = self._json(
            "/api/v1/save_weights",
            types.SaveWeightsRequest,
            path=name,
            ttl_seconds=ttl_seconds,
            overwrite=overwrite,
            user_metadata=user_metadata,
        )
        return self._operations.submit_one(encoder, SAVE_WEIGHTS)

    async def save_state_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[types.SaveWeightsResponse]:
        return self.save_state(name, ttl_seconds, overwrite, user_metadata)

    def load_state(self, path: str, weights_access_token: str | None = None) -> APIFuture[types.LoadWeightsResponse]:
        """Load weights; the optimiser begins anew."""
        return self._load(path, False, weights_access_token)

    async def load_state_async(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        return self._load(path, False, weights_access_token)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """Load weights and the state of the optimiser."""
        return self._load(path, True, weights_access_token)

    async def load_state_with_optimizer_async(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        return self._load(path, True, weights_access_token)

    def _load(
        self, path: str, optimizer: bool, weights_access_token: str | None
    ) -> AwaitableConcurrentFuture[types.LoadWeightsResponse]:
        encoder = self._json(
            "/api/v1/load_weights",
            types.LoadWeightsRequest,
            path=path,
            optimizer=optimizer,
            weights_access_token=weights_access_token,
        )
        return self._operations.submit_one(encoder, LOAD_WEIGHTS)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> APIFuture[types.SaveWeightsForSamplerResponse]:
        """Save weights to sample from, under a name; the result has the path for ``create_sampling_client``."""
        encoder = self._json(
            "/api/v1/save_weights_for_sampler",
            types.SaveWeightsForSamplerRequest,
            path=name,
            ttl_seconds=ttl_seconds,
            user_metadata=user_metadata,
        )

        def finish(
            results: list[types.SaveWeightsForSamplerResponseInternal],
        ) -> types.SaveWeightsForSamplerResponse:
            path = results[0].path
            assert path is not None, "the server gave no path"
            return types.SaveWeightsForSamplerResponse(path=path)

        return self._operations.submit([encoder], SAVE_FOR_SAMPLER, finish)

    async def save_weights_for_sampler_async(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> APIFuture[types.SaveWeightsForSamplerResponse]:
        return self.save_weights_for_sampler(name, ttl_seconds, user_metadata)

    def save_weights_external(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: list[str] | None = None
    ) -> APIFuture[types.SaveWeightsExternalResponse]:
        """Export files that other programs read; ``RestClient.get_external_weights_urls`` says where they are."""
        encoder = self._json(
            "/api/v1/save_weights_external",
            types.SaveWeightsExternalRequest,
            path=name,
            ttl_seconds=ttl_seconds,
            age_encryption_recipients=age_encryption_recipients,
        )
        return self._operations.submit_one(encoder, SAVE_EXTERNAL)

    async def save_weights_external_async(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: list[str] | None = None
    ) -> APIFuture[types.SaveWeightsExternalResponse]:
        return self.save_weights_external(name, ttl_seconds, age_encryption_recipients)

    # ── sampling ──────────────────────────────────────────────────────────────────────────────────────

    def _save_for_session(self, name: str | None) -> AwaitableConcurrentFuture[str]:
        if name is not None:
            warnings.warn(
                "save_weights_and_get_sampling_client ignores its name; save_weights_for_sampler(name) keeps weights",
                DeprecationWarning,
                stacklevel=3,
            )
        encoder = self._json(
            "/api/v1/save_weights_for_sampler",
            types.SaveWeightsForSamplerRequest,
            sampling_session_seq_id=self.holder.next_number("sampling_session"),
        )

        def finish(results: list[types.SaveWeightsForSamplerResponseInternal]) -> str:
            sampling_session_id = results[0].sampling_session_id
            assert sampling_session_id is not None, "the server gave no sampling session"
            return sampling_session_id

        return self._operations.submit([encoder], SAVE_FOR_SAMPLER, finish)

    def save_weights_and_get_sampling_client(
        self, name: str | None = None, retry_config: RetryConfig | None = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """A client that samples from the weights as they are at this point of the program."""
        return SamplingClient(
            self.holder,
            sampling_session_id=self._save_for_session(name).result(),
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    async def save_weights_and_get_sampling_client_async(
        self, name: str | None = None, retry_config: RetryConfig | None = None, record_stability_info: bool = False
    ) -> SamplingClient:
        return SamplingClient(
            self.holder,
            sampling_session_id=await self._save_for_session(name),
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    def create_sampling_client(
        self, model_path: str, retry_config: RetryConfig | None = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """A client that samples from saved weights."""
        return SamplingClient.create(
            self.holder,
            model_path=model_path,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        ).result()

    async def create_sampling_client_async(
        self, model_path: str, retry_config: RetryConfig | None = None, record_stability_info: bool = False
    ) -> SamplingClient:
        return await SamplingClient.create(
            self.holder,
            model_path=model_path,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    # ── metrics ───────────────────────────────────────────────────────────────────────────────────────

    def log_metrics(self, metrics: Mapping[str, SupportsFloat], step: int) -> APIFuture[ReportMetricsResponse]:
        """Have the server keep what was measured in a step, beside what its engine measures; ours alone.

        ``RestClient.get_metrics`` and the console show it. A step that is reported again gets the later values.
        """
        return self.reports.send([metric_point(metrics, step)])

    async def log_metrics_async(
        self, metrics: Mapping[str, SupportsFloat], step: int
    ) -> APIFuture[ReportMetricsResponse]:
        return self.log_metrics(metrics, step)

    def log_rollouts(self, rollouts: Sequence[GivenRollout], step: int | None = None) -> APIFuture[LogRolloutsResponse]:
        """Have the server keep what the policy wrote in a step, with rewards and all, for people to read; ours alone.

        ``RestClient.list_rollouts`` and the console show it. Each is a ``types.Rollout`` or a mapping of its fields.
        """
        return self.rollout_reports.send(rollouts, step)

    async def log_rollouts_async(
        self, rollouts: Sequence[GivenRollout], step: int | None = None
    ) -> APIFuture[LogRolloutsResponse]:
        return self.log_rollouts(rollouts, step)

    def log_samples(self, samples: Sequence[GivenRollout], step: int | None = None) -> APIFuture[LogRolloutsResponse]:
        """Log answers that were evaluated: rollouts whose ``kind`` is ``sample`` and whose ``split``, unless they name
        another, is ``test``; ours alone."""
        return self.rollout_reports.send(samples, step, defaults=SAMPLE)

    async def log_samples_async(
        self, samples: Sequence[GivenRollout], step: int | None = None
    ) -> APIFuture[LogRolloutsResponse]:
        return self.log_samples(samples, step)

    def finish_run(self, status: EndStatus, error: str | None = None) -> APIFuture[None]:
        """Tell the server how the run ended, before the session does; ours alone."""
        path = f"/api/v1{run_path(self.model_id)}/finish"
        body = FinishRunRequest(status=status, error=error)

        async def finish() -> None:
            await self._connection.transport.call("POST", path, body)

        return self._connection.run(finish())

    async def finish_run_async(self, status: EndStatus, error: str | None = None) -> APIFuture[None]:
        return self.finish_run(status, error)

    # ── about the run ─────────────────────────────────────────────────────────────────────────────────

    def _get_info(self) -> AwaitableConcurrentFuture[types.GetInfoResponse]:
        body = types.GetInfoRequest(model_id=self.model_id)
        return self._connection.run(
            self._connection.transport.ask(types.GetInfoResponse, "POST", "/api/v1/get_info", body)
        )

    def get_info(self) -> types.GetInfoResponse:
        """The base model, its tokenizer and the adapter's rank."""
        warn_if_in_loop("get_info")
        return self._get_info().result()

    async def get_info_async(self) -> types.GetInfoResponse:
        return await self._get_info()

    def get_tokenizer(self) -> Any:
        """The tokenizer of the base model, from the server if it cannot be had otherwise."""
        data = self._get_info().result().model_data
        return tokenizers.load_tokenizer(self._connection, data.model_name or "", data.tokenizer_id)

    def get_console_url(self) -> str:
        return self._connection.console_url("training_runs", self.model_id)

    def get_telemetry(self) -> None:
        """Nothing: this SDK reports nothing of its user."""
