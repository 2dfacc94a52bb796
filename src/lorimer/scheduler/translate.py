"""Translates between the wire (``lorimer.types``) and the engine's messages (``engine.messages``)."""

import hashlib
import math
import secrets

import numpy as np

from lorimer import types
from lorimer.engine import messages
from lorimer.engine.translation import engine_input
from lorimer.errors import InvalidInput, TooLarge
from lorimer.types.encoding import EncodedTraining, encode_training_request
from lorimer.types.tensors import TensorData

MAX_TARGETS = 2**24
TYPICAL_IMAGE_TOKENS = 256


def estimated_tokens(model_input: types.ModelInput) -> int:
    """Estimate the length of an input before a model has counted its images; exact if they have ``expected_tokens``."""
    return sum(
        TYPICAL_IMAGE_TOKENS if isinstance(chunk, types.ImageChunk) and chunk.expected_tokens is None else chunk.length
        for chunk in model_input.chunks
    )


def encoded_training(request: types.TrainingRequest) -> EncodedTraining:
    """Encode the request for the scheduler."""
    payload = encode_training_request(request)
    return EncodedTraining(
        model_id=request.model_id,
        seq_id=request.seq_id,
        payload=payload,
        loss_fn=request.loss_fn,
        loss_fn_config=request.loss_fn_config,
        forward_only=request.forward_only,
        tokens=sum(estimated_tokens(datum.model_input) for datum in request.data),
        payload_sha256=hashlib.sha256(payload).hexdigest(),
    )


def encoded_sample(request: types.SampleRequest) -> tuple[types.SampleRequest, bytes]:
    """Return the request with a seed, and its JSON, which the journal stores."""
    request = with_seed(request)
    return request, request.model_dump_json(exclude_none=True).encode()


def with_seed(request: types.SampleRequest) -> types.SampleRequest:
    """Choose a seed if there is none, so that a sample that is computed again gives the same result."""
    if request.sampling_params.seed is not None:
        return request
    params = request.sampling_params.model_copy(update={"seed": secrets.randbits(62)})
    return request.model_copy(update={"sampling_params": params})


def wire_training_output(result: messages.TrainResult) -> types.ForwardBackwardOutput:
    outputs = [{"logprobs": TensorData.from_numpy(logprobs)} for logprobs in result.logprobs]
    return types.ForwardBackwardOutput("ArrayRecord", outputs, result.metrics)


def engine_sample(
    request: types.SampleRequest,
    request_id: str,
    sampler_id: str | None,
    cache_salt: str,
    grammar: str = "",
    stream: bool = False,
) -> messages.SampleRequest:
    params = request.sampling_params
    prompt, images = engine_input(request.prompt, "prompt")
    stop = list(params.stop) if isinstance(params.stop, list | tuple) else params.stop
    targets = request.target_prompt_logprobs
    return messages.SampleRequest(
        request_id=request_id,
        prompt=prompt,
        images=images,
        sampler_id=sampler_id,
        num_samples=request.num_samples,
        params=messages.SamplingParams(
            max_tokens=params.max_tokens,
            seed=params.seed,
            stop=stop,  # type: ignore[arg-type]
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
        ),
        prompt_logprobs=bool(request.prompt_logprobs),
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        target_prompt_logprobs=None if targets is None else _check_targets(targets).to_numpy(pad_value=-1),
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
        cache_salt=cache_salt,
        grammar=grammar,
        stream=stream,
    )


def _check_targets(targets: TensorData) -> TensorData:
    if targets.dtype != "int64" or len(targets.dense_shape) != 2:
        shape = list(targets.dense_shape)
        raise InvalidInput(f"target_prompt_logprobs is {targets.dtype} of shape {shape}; int64 [length, K] is accepted")
    if math.prod(targets.dense_shape) > MAX_TARGETS:
        shape = list(targets.dense_shape)
        raise TooLarge(f"target_prompt_logprobs has shape {shape}; at most {MAX_TARGETS} cells are accepted")
    return targets


def sequence_ids(request_id: str, num_samples: int) -> list[str]:
    return [f"{request_id}:{index}" for index in range(num_samples)]


def wire_sample_response(
    result: messages.SampleResult, request: types.SampleRequest, request_id: str
) -> types.SampleResponse:
    sequences = [
        types.SampledSequence(
            stop_reason=sequence.stop_reason,
            sequence_id=sequence_id,
            tokens_np=sequence.tokens,
            logprobs_np=sequence.logprobs,
            topk_logprobs_np=_topk(sequence.topk_logprobs),
        )
        for sequence, sequence_id in zip(result.sequences, sequence_ids(request_id, request.num_samples), strict=True)
    ]
    alternatives = result.prompt_alt_tokens
    return types.SampleResponse(
        sequences=sequences,
        prompt_logprobs_np=result.prompt_logprobs,
        topk_prompt_logprobs_np=_topk(result.topk_prompt_logprobs),
        target_prompt_logprobs=_scored(result.target_prompt_logprobs, request.target_prompt_logprobs),
        prompt_cache_hit_tokens=result.prompt_cache_hit_tokens,
        prompt_alt_tokens=None
        if alternatives is None
        else types.PromptAltTokens(
            TensorData.from_numpy(alternatives.token_ids), TensorData.from_numpy(alternatives.logprobs)
        ),
    )


def _topk(found: messages.TopkLogprobs | None) -> types.TopkLogprobs | None:
    return None if found is None else types.TopkLogprobs(found.token_ids, found.logprobs)


def _scored(scores: np.ndarray | None, asked: TensorData | None) -> TensorData | None:
    """Return the scores in the layout of the requested ids, 0 where the id was -1."""
    if scores is None or asked is None:
        return None
    if asked.csr is None:
        return TensorData.from_numpy(np.where(asked.values == -1, np.float32(0), scores.astype(np.float32)))
    crow, columns = asked.csr
    rows = np.repeat(np.arange(len(crow) - 1), np.diff(crow))
    values = np.where(asked.values == -1, np.float32(0), scores[rows, columns].astype(np.float32))
    return TensorData(values, "float32", asked.dense_shape, crow, columns)
