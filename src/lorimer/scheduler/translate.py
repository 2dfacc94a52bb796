"""Between what travels on the wire (``lorimer.types``) and what the engine is told (``engine.messages``)."""

import math

import numpy as np

from lorimer import types
from lorimer.engine import messages
from lorimer.errors import InvalidInput, TooLarge, Unsupported
from lorimer.types.tensors import TensorData

_MOST_TARGETS = 2**24
_TYPICAL_IMAGE_TOKENS = 256


def engine_datum(datum: types.Datum, index: int) -> messages.Datum:
    dense, sparse = {}, {}
    for name, tensor in datum.loss_fn_inputs.items():
        if tensor.csr is None:
            dense[name] = tensor.values
        else:
            sparse[name] = _csr(tensor)
    tokens, images = engine_input(datum.model_input, f"data[{index}].model_input")
    return messages.Datum(tokens=tokens, loss_fn_inputs=dense, sparse_inputs=sparse, images=images)


def engine_input(model_input: types.ModelInput, field: str) -> tuple[np.ndarray, list[messages.ImageInput]]:
    """The tokens of the text, and the images with their places in it."""
    text: list[types.ModelInputChunk] = []
    images: list[messages.ImageInput] = []
    offset = 0
    for index, chunk in enumerate(model_input.chunks):
        if isinstance(chunk, types.EncodedTextChunk):
            text.append(chunk)
            offset += len(chunk.tokens)
        elif isinstance(chunk, types.ImageChunk):
            images.append(
                messages.ImageInput(
                    data=chunk.data,
                    format=chunk.format,
                    offset=offset,
                    chunk=index,
                    expected_tokens=chunk.expected_tokens,
                )
            )
        else:
            raise Unsupported(f"{field} has a chunk of type {chunk.type!r}; accepted are text and images")
    return types.ModelInput.model_construct(chunks=text).to_array(), images


def estimated_tokens(model_input: types.ModelInput) -> int:
    """The length of an input before a model has counted its images; exact where they say what they expect."""
    return sum(
        _TYPICAL_IMAGE_TOKENS if isinstance(chunk, types.ImageChunk) and chunk.expected_tokens is None else chunk.length
        for chunk in model_input.chunks
    )


def _csr(tensor: TensorData) -> messages.CsrArray:
    assert tensor.csr is not None
    crow, columns = tensor.csr
    rows, width = tensor.dense_shape
    return messages.CsrArray(values=tensor.values, crow_indices=crow, col_indices=columns, shape=(rows, width))


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
    if math.prod(targets.dense_shape) > _MOST_TARGETS:
        shape = list(targets.dense_shape)
        raise TooLarge(f"target_prompt_logprobs has shape {shape}; at most {_MOST_TARGETS} cells are accepted")
    return targets


def wire_sample_response(
    result: messages.SampleResult, request: types.SampleRequest, sequence_ids: list[str]
) -> types.SampleResponse:
    sequences = [
        types.SampledSequence(
            stop_reason=sequence.stop_reason,
            sequence_id=sequence_id,
            tokens_np=sequence.tokens,
            logprobs_np=sequence.logprobs,
            topk_logprobs_np=_topk(sequence.topk_logprobs),
        )
        for sequence, sequence_id in zip(result.sequences, sequence_ids, strict=True)
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
    """The scores in the layout of the ids that were asked for, 0 where the id was -1."""
    if scores is None or asked is None:
        return None
    if asked.csr is None:
        return TensorData.from_numpy(np.where(asked.values == -1, np.float32(0), scores.astype(np.float32)))
    crow, columns = asked.csr
    rows = np.repeat(np.arange(len(crow) - 1), np.diff(crow))
    values = np.where(asked.values == -1, np.float32(0), scores[rows, columns].astype(np.float32))
    return TensorData(values, "float32", asked.dense_shape, crow, columns)
