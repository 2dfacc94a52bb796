"""The client that samples from one set of weights. Samples are independent: any number may be under way.

Waiting costs one poll for all of them where the server offers it (``completions.py``). A client can be pickled, or
handed on as a text; its copies number their samples in blocks of their own.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from lorimer import types
from lorimer.client import sessions, tokenizers
from lorimer.client.errors import APIError, APIStatusError, RateLimitError
from lorimer.client.futures import APIFuture, AwaitableConcurrentFuture
from lorimer.client.polling import Completions, QueueNotes, protobuf_result, wait_for_result
from lorimer.client.retries import RetryConfig, SampleRetries
from lorimer.client.sessions import Session
from lorimer.client.transport import parse
from lorimer.types.encoding import decode_sample_response
from lorimer.types.tensor_json import tensor_to_json

CLONE_STRIDE = 1_000_000_000
PROMPT_TOKEN_BYTES = 10
MAX_SUBMITS = 64
"""Concurrent submits. A server commits together what arrives together, and gains nothing from more."""
MAX_SUBMITS_AFTER_REFUSAL = 10
CAREFUL_SECONDS = 10.0
CAREFUL_FACTOR = 20
LARGE_PROMPT_BYTES = 128 * 1024
MAX_FETCHES = 64
QUIET_SECONDS = 20.0
"""After so long without news of a sample it is asked about by itself, which also tells why it is waiting."""
MAX_QUESTIONS = 4


class SubmitGate:
    """Lets samples of one sampling client be submitted; fewer at a time after the server refused one."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(MAX_SUBMITS)
        self._careful_room = asyncio.Semaphore(MAX_SUBMITS_AFTER_REFUSAL)
        self._careful_until = 0.0
        self._closed_until = 0.0

    @asynccontextmanager
    async def enter(self, session: Session, size: int) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._room)
            is_careful = time.monotonic() < self._careful_until
            if is_careful:
                await stack.enter_async_context(self._careful_room)
            counted = size * CAREFUL_FACTOR if is_careful else size
            await stack.enter_async_context(session.connection.sampling_budget.take(counted))
            while (left := self._closed_until - time.monotonic()) > 0:
                await asyncio.sleep(left)
            yield

    def refused(self, size: int) -> None:
        now = time.monotonic()
        self._closed_until = now + (1.0 if size <= LARGE_PROMPT_BYTES else 5.0)
        self._careful_until = now + CAREFUL_SECONDS


class SamplingClient:
    """Samples from a base model or from saved weights; made by a ``ServiceClient`` or a ``TrainingClient``."""

    def __init__(
        self,
        holder: Session,
        *,
        sampling_session_id: str,
        shadow: bool = False,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> None:
        self.holder = holder
        self._connection = holder.connection
        self._sampling_session_id = sampling_session_id
        self._record_stability_info = record_stability_info
        self._is_copy = shadow
        self._clone_id: int | None = None if shadow else 0
        self._next_number = 0
        self._joining = asyncio.Lock()
        self._gate = SubmitGate()
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        self._questions = asyncio.Semaphore(MAX_QUESTIONS)
        self._notes = QueueNotes(f"sampling from {sampling_session_id}")
        self._completions: Completions | None = None
        config = self._connection.config
        # The server's limit goes before the caller's: it is on polls held, of which there is one with completions.
        most = None if config.sample_use_retrieve_futures else config.sample_max_concurrent_requests
        retry_config = replace(retry_config or RetryConfig(), max_connections=most)
        if not config.sample_enable_stuck_detection:
            retry_config = replace(retry_config, enable_stuck_detection=False)
        if config.sample_no_retries:
            retry_config = replace(retry_config, enable_retry_logic=False)
        self._retries = SampleRetries(retry_config)

    @staticmethod
    def create(
        holder: Session,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> "APIFuture[SamplingClient]":
        """A client of the weights, or of a sampling session that exists."""
        if model_path is not None and not model_path.startswith("tinker://"):
            raise ValueError(f"model_path is {model_path!r}; a path that begins with tinker:// is accepted")
        number = holder.next_number("sampling_session") if sampling_session_id is None else 0

        async def create() -> SamplingClient:
            found = sampling_session_id
            session_id = await holder.start()
            if found is None:
                body = types.CreateSamplingSessionRequest(
                    session_id=session_id,
                    sampling_session_seq_id=number,
                    base_model=base_model,
                    model_path=model_path,
                )
                answer = await holder.connection.transport.ask(
                    types.CreateSamplingSessionResponse, "POST", "/api/v1/create_sampling_session", body
                )
                found = answer.sampling_session_id
            return SamplingClient(
                holder,
                sampling_session_id=found,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )

        return holder.connection.run(create())

    def sample(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> "Future[types.SampleResponse]":
        """Draw ``num_samples`` continuations of the prompt, and score the prompt if asked to."""
        check_sample(prompt, num_samples, sampling_params)
        check_prompt_options(
            target_prompt_logprobs, prompt_alt_tokens_k, prompt_logprobs_last_n, include_prompt_logprobs
        )
        body: dict[str, Any] = {
            "type": "sample",
            "sampling_session_id": self._sampling_session_id,
            "num_samples": num_samples,
            "prompt": {"chunks": [_chunk_json(chunk) for chunk in prompt.chunks]},
            "sampling_params": sampling_params.model_dump(exclude_none=True),
            "prompt_logprobs": include_prompt_logprobs,
            "topk_prompt_logprobs": topk_prompt_logprobs,
            "topk_sample_logprobs": topk_sample_logprobs,
            "prompt_alt_tokens_k": prompt_alt_tokens_k,
            "record_stability_info": self._record_stability_info,
        }
        if target_prompt_logprobs is not None:
            body["target_prompt_logprobs"] = tensor_to_json(target_prompt_logprobs)
        if prompt_logprobs_last_n is not None:
            body["prompt_logprobs_last_n"] = prompt_logprobs_last_n
        size = _prompt_bytes(prompt)
        return self._connection.loop.run(self._retries.run(lambda: self._attempt(body, size)))

    async def sample_async(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> types.SampleResponse:
        # Not shielded: a sample that nobody awaits any more is given up, on the server too.
        return await asyncio.wrap_future(
            self.sample(
                prompt,
                num_samples,
                sampling_params,
                include_prompt_logprobs,
                topk_prompt_logprobs,
                topk_sample_logprobs,
                target_prompt_logprobs,
                prompt_alt_tokens_k,
                prompt_logprobs_last_n,
            )
        )

    def compute_logprobs(
        self, prompt: types.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> "Future[list[float | None]]":
        """The logprob of each prompt token given those before it; the first has none."""
        params = types.SamplingParams(max_tokens=1)
        sampled = self.sample(prompt, 1, params, True, prompt_logprobs_last_n=prompt_logprobs_last_n)

        async def logprobs() -> list[float | None]:
            return (await asyncio.wrap_future(sampled)).prompt_logprobs or []

        return self._connection.loop.run(logprobs())

    async def compute_logprobs_async(
        self, prompt: types.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> list[float | None]:
        return await asyncio.wrap_future(self.compute_logprobs(prompt, prompt_logprobs_last_n))

    # ── one sample ────────────────────────────────────────────────────────────────────────────────────

    async def _attempt(self, body: dict[str, Any], size: int) -> types.SampleResponse:
        if self._clone_id is None:
            await self._join()
        number = self._next_number
        self._next_number += 1
        promise = await self._submit(body | {"seq_id": number}, size)
        ids = promise.sample_sequence_ids or []
        kind = protobuf_result("Sample", lambda data: decode_sample_response(data, ids))
        try:
            response = await self._result(promise.request_id, kind)
        except asyncio.CancelledError:
            if self._connection.dynamic.sample_cancel_enabled:
                self._connection.loop.loop.create_task(self._cancel(promise.request_id))
            raise
        _check_honoured(response, body)
        return response

    async def _submit(self, body: dict[str, Any], size: int) -> types.UntypedAPIFuture:
        headers = {"X-Tinker-Sampling-Backpressure": "1"}
        while True:
            async with self._gate.enter(self.holder, size):
                try:
                    answer = await self._connection.transport.call(
                        "POST", "/api/v1/asample", body, headers=headers, final=(429,)
                    )
                    return parse(types.UntypedAPIFuture, answer)
                except RateLimitError:
                    self._gate.refused(size)

    async def _result(self, request_id: str, kind: Any) -> types.SampleResponse:
        connection = self._connection
        if not connection.config.sample_use_retrieve_futures:
            return await wait_for_result(connection, request_id, kind, self._notes)
        assert self._clone_id is not None
        if self._completions is None:
            self._completions = Completions(connection, self._sampling_session_id, self._clone_id)
        async with self._completions.expect(request_id) as done:
            while not done.done():
                await asyncio.wait({done}, timeout=QUIET_SECONDS)
                if not done.done() and not self._questions.locked():
                    async with self._questions:
                        return await wait_for_result(connection, request_id, kind, self._notes)
            async with self._fetches, connection.result_budget.take(done.result() or 0):
                return await wait_for_result(connection, request_id, kind, self._notes, metadata_first=False)

    async def _join(self) -> None:
        """Get a block of numbers that no other copy of this client uses."""
        async with self._joining:
            if self._clone_id is not None:
                return
            if self._connection.config.sample_join_sampling_session:
                body = types.JoinSamplingSessionRequest(sampling_session_id=self._sampling_session_id)
                answer = await self._connection.transport.ask(
                    types.JoinSamplingSessionResponse, "POST", "/api/v1/join_sampling_session", body
                )
                clone_id = answer.client_counter
            else:
                clone_id = sessions.random_clone_id()
            self._next_number = CLONE_STRIDE * clone_id
            self._clone_id = clone_id

    async def _cancel(self, request_id: str) -> None:
        try:
            await self._connection.transport.call("POST", "/api/v1/cancel_future", {"request_id": request_id})
        except (APIStatusError, APIError):
            return  # it has finished, or ends with its session

    # ── about the weights ─────────────────────────────────────────────────────────────────────────────

    @property
    def sampling_session_id(self) -> str:
        """What the server calls these weights; episodes of programs outside can be answered by it."""
        return self._sampling_session_id

    def _get_sampler(self) -> AwaitableConcurrentFuture[types.GetSamplerResponse]:
        path = f"/api/v1/samplers/{self._sampling_session_id}"
        return self._connection.run(self._connection.transport.ask(types.GetSamplerResponse, "GET", path))

    def get_base_model(self) -> str:
        return self._get_sampler().result().base_model

    async def get_base_model_async(self) -> str:
        return (await self._get_sampler()).base_model

    def get_tokenizer(self) -> Any:
        """The tokenizer of the base model, from the server if it cannot be had otherwise."""
        return tokenizers.load_tokenizer(self._connection, self.get_base_model(), None)

    def get_telemetry(self) -> None:
        """Nothing: this SDK reports nothing of its user."""

    # ── copies in other processes ─────────────────────────────────────────────────────────────────────

    def _state(self) -> sessions.SamplerState:
        return sessions.state_of(self.holder, self._sampling_session_id, self._record_stability_info)

    def __reduce__(self) -> tuple[Any, ...]:
        return _copy, (self._state(),)

    def get_sampler_handle(self) -> str:
        """A text from which another process makes a client of the same weights; it holds no key."""
        return sessions.to_text(self._state())

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> "SamplingClient":
        return _copy(sessions.from_text(handle, api_key))


def _copy(state: sessions.SamplerState) -> SamplingClient:
    return SamplingClient(
        sessions.session_of(state),
        sampling_session_id=state.sampling_session_id,
        shadow=True,
        record_stability_info=state.record_stability_info,
    )


def _chunk_json(chunk: types.ModelInputChunk) -> dict[str, Any]:
    if isinstance(chunk, types.EncodedTextChunk):
        tokens = chunk.tokens
        return {"type": "encoded_text", "tokens": tokens if isinstance(tokens, list) else list(tokens)}
    return chunk.model_dump(mode="json", exclude_none=True)


def _prompt_bytes(prompt: types.ModelInput) -> int:
    size = 0
    for chunk in prompt.chunks:
        match chunk:
            case types.EncodedTextChunk():
                size += PROMPT_TOKEN_BYTES * len(chunk.tokens)
            case types.ImageChunk():
                size += len(chunk.data)
            case types.DmelChunk():
                size += len(chunk.dmel)
    return size


def _check_honoured(response: types.SampleResponse, body: dict[str, Any]) -> None:
    """Refuse a result that leaves out what was asked for, as one of an older server does."""
    if body["prompt_alt_tokens_k"] and response.prompt_alt_tokens is None:
        raise RuntimeError("the server gave no prompt_alt_tokens; it does not know prompt_alt_tokens_k")
    last_n, logprobs = body.get("prompt_logprobs_last_n"), response.prompt_logprobs_np
    if last_n is not None and logprobs is not None and not np.isnan(logprobs[: len(logprobs) - last_n]).all():
        raise RuntimeError("the server scored the whole prompt; it does not know prompt_logprobs_last_n")


def check_sample(prompt: types.ModelInput, num_samples: int, params: types.SamplingParams) -> None:
    if not isinstance(prompt, types.ModelInput):
        raise TypeError(
            f"prompt is a {type(prompt).__name__}; a ModelInput is accepted: ModelInput.from_ints(tokenizer.encode(…))"
        )
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise ValueError(f"num_samples is {num_samples!r}; integers from 1 are accepted")
    if not isinstance(params, types.SamplingParams):
        raise TypeError(f"sampling_params is a {type(params).__name__}; lorimer.types.SamplingParams is accepted")


def check_prompt_options(
    target_prompt_logprobs: types.TensorData | None,
    prompt_alt_tokens_k: int,
    prompt_logprobs_last_n: int | None,
    include_prompt_logprobs: bool,
) -> None:
    if target_prompt_logprobs is not None:
        if target_prompt_logprobs.dtype != "int64":
            raise ValueError(f"target_prompt_logprobs is {target_prompt_logprobs.dtype}; token ids are int64")
        if len(target_prompt_logprobs.dense_shape) != 2:
            shape = list(target_prompt_logprobs.dense_shape)
            raise ValueError(f"target_prompt_logprobs has shape {shape}; [len(prompt) - 1, K] is accepted")
    if prompt_alt_tokens_k < 0:
        raise ValueError(f"prompt_alt_tokens_k is {prompt_alt_tokens_k}; 0 or more is accepted")
    if prompt_logprobs_last_n is not None:
        if prompt_logprobs_last_n < 1:
            raise ValueError(f"prompt_logprobs_last_n is {prompt_logprobs_last_n}; 1 or more is accepted")
        if not include_prompt_logprobs:
            raise ValueError("prompt_logprobs_last_n is accepted only with include_prompt_logprobs=True")
