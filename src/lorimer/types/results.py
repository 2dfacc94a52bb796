"""Encodes results of training operations and samples: protobuf, and JSON for releases without protobuf."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from lorimer.errors import InvalidInput
from lorimer.types import tinker_pb2 as pb
from lorimer.types.datum import LossFnOutput
from lorimer.types.sampling import PromptAltTokens, SampledSequence, SampleResponse, StopReason
from lorimer.types.tensor_json import tensor_to_json
from lorimer.types.tensor_protobuf import (
    PROTOBUF_DTYPE,
    numpy_dtype,
    parse_message,
    read_array,
    read_tensor,
    widen,
    write_tensor,
)
from lorimer.types.tensors import Array, TensorData, TopkLogprobs
from lorimer.types.training import ForwardBackwardOutput

OUTPUT_TYPE = "ArrayRecord"

_STOP_REASONS: dict[int, StopReason] = {pb.STOP_REASON_STOP: "stop", pb.STOP_REASON_LENGTH: "length"}
_PROTOBUF_STOP_REASON = {reason: number for number, reason in _STOP_REASONS.items()}
_LARGEST = float(np.finfo(np.float32).max)

# ── forward and forward_backward ──────────────────────────────────────────────────────────────────────


def encode_forward_backward_output(output: ForwardBackwardOutput) -> bytes:
    """Encode an output. Consecutive datums with the same tensor names, dtypes and trailing shapes share a record."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=output.loss_fn_output_type, metrics=output.metrics)
    for datums in _alike(output.loss_fn_outputs):
        record = message.loss_fn_outputs.add(type_tag=output.loss_fn_output_type, num_datums=len(datums))
        for name in datums[0]:
            _write_batch([datum[name] for datum in datums], record.fields[name])
    return bytes(message.SerializeToString())


def _alike(datums: Sequence[LossFnOutput]) -> Iterator[list[LossFnOutput]]:
    """Yield runs of consecutive datums that fit into one record."""
    run: list[LossFnOutput] = []
    kind: object = None
    for datum in datums:
        this = {name: (tensor.dtype, tensor.dense_shape[1:]) for name, tensor in datum.items()}
        if run and this != kind:
            yield run
            run = []
        run.append(datum)
        kind = this
    if run:
        yield run


def _write_batch(tensors: list[TensorData], message: pb.BatchedTensor) -> None:
    arrays = [tensor.to_numpy() for tensor in tensors]
    offsets = np.zeros(len(arrays) + 1, "<i8")
    np.cumsum([array.nbytes for array in arrays], out=offsets[1:])
    message.data = b"".join([array.tobytes() for array in arrays])
    message.offsets = offsets.tobytes()
    message.dtype = PROTOBUF_DTYPE[tensors[0].dtype]
    message.trailing_shape.extend(arrays[0].shape[1:])


def decode_forward_backward_output(data: bytes) -> ForwardBackwardOutput:
    message = parse_message(pb.ForwardBackwardOutput, data)
    outputs: list[LossFnOutput] = []
    for index, record in enumerate(message.loss_fn_outputs):
        fields = {}
        for name, batch in record.fields.items():
            try:
                fields[name] = _read_batch(batch)
            except ValueError as error:
                raise InvalidInput(f"loss_fn_outputs[{index}][{name!r}]: {error}") from None
        number = record.num_datums or max((len(tensors) for tensors in fields.values()), default=0)
        for name, tensors in fields.items():
            if len(tensors) != number:
                raise InvalidInput(f"loss_fn_outputs[{index}][{name!r}] has {len(tensors)} tensors for {number} datums")
        outputs += [{name: tensors[i] for name, tensors in fields.items()} for i in range(number)]
    kind = message.loss_fn_output_type.rpartition(":")[2]
    return ForwardBackwardOutput(kind or OUTPUT_TYPE, outputs, dict(message.metrics))


def _read_batch(message: pb.BatchedTensor) -> list[TensorData]:
    stored = numpy_dtype(message.dtype)
    flat, dtype = widen(read_array(message.data, stored, "data"), message.dtype)
    offsets = read_array(message.offsets, "<i8", "offsets")
    if not len(offsets) or offsets[0] < 0 or offsets[-1] > len(message.data) or np.any(offsets[1:] < offsets[:-1]):
        raise ValueError(f"offsets do not rise within 0 to {len(message.data)}")
    if np.any(offsets % stored.itemsize):
        raise ValueError(f"an offset is no multiple of {stored.itemsize}")
    trailing = list(message.trailing_shape)
    if any(size < 0 for size in trailing):
        raise ValueError(f"trailing_shape {trailing} has a negative size")
    width = int(np.prod(trailing, dtype=object)) if trailing else 1
    bounds = (offsets // stored.itemsize).tolist()
    return [_slice(flat[begin:end], dtype, width, trailing) for begin, end in pairwise(bounds)]


def _slice(values: Array, dtype: Any, width: int, trailing: list[int]) -> TensorData:
    length = values.size // width if width else 0
    return TensorData(values.copy(), dtype, [length, *trailing])


def forward_backward_output_to_json(output: ForwardBackwardOutput) -> dict[str, Any]:
    return {
        "loss_fn_output_type": output.loss_fn_output_type,
        "loss_fn_outputs": [
            {name: tensor_to_json(_dense(tensor)) for name, tensor in datum.items()} for datum in output.loss_fn_outputs
        ],
        "metrics": output.metrics,
    }


def _dense(tensor: TensorData) -> TensorData:
    """Convert to dense and finite, for JSON and for releases without sparse tensors."""
    return TensorData.from_numpy(_finite(tensor.to_numpy()))


# ── samples ───────────────────────────────────────────────────────────────────────────────────────────


def encode_sample_response(response: SampleResponse) -> bytes:
    message = pb.SampleResponse(prompt_cache_hit_tokens=response.prompt_cache_hit_tokens)
    for sequence in response.sequences:
        added = message.sequences.add(
            stop_reason=_PROTOBUF_STOP_REASON[sequence.stop_reason], tokens=_bytes(sequence.tokens_np, "<i4")
        )
        if sequence.logprobs_np is not None:
            added.logprobs = _bytes(sequence.logprobs_np, "<f4")
        if sequence.topk_logprobs_np is not None:
            _write_topk(sequence.topk_logprobs_np, added.topk_sampled_logprobs)
    if response.prompt_logprobs_np is not None:
        message.prompt_logprobs = _bytes(response.prompt_logprobs_np, "<f4")
    if response.topk_prompt_logprobs_np is not None:
        _write_topk(response.topk_prompt_logprobs_np, message.topk_prompt_logprobs)
    if response.target_prompt_logprobs is not None:
        write_tensor(response.target_prompt_logprobs, message.target_prompt_logprobs)
    if response.prompt_alt_tokens is not None:
        write_tensor(response.prompt_alt_tokens.tokens, message.prompt_alt_tokens.tokens)
        write_tensor(response.prompt_alt_tokens.logprobs, message.prompt_alt_tokens.logprobs)
    return bytes(message.SerializeToString())


def decode_sample_response(data: bytes, sequence_ids: Sequence[str]) -> SampleResponse:
    """Decode a sample. ``sequence_ids`` come from the response to the submit; the result does not repeat them."""
    message = parse_message(pb.SampleResponse, data)
    if len(message.sequences) != len(sequence_ids):
        raise InvalidInput(f"the result has {len(message.sequences)} sequences for {len(sequence_ids)} sequence ids")
    try:
        return SampleResponse(
            sequences=[_read_sequence(*pair) for pair in zip(message.sequences, sequence_ids, strict=True)],
            prompt_logprobs_np=_floats(message.prompt_logprobs, "prompt_logprobs"),
            topk_prompt_logprobs_np=_read_topk(message.topk_prompt_logprobs),
            target_prompt_logprobs=_optional(message, "target_prompt_logprobs", read_tensor),
            prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
            prompt_alt_tokens=_optional(message, "prompt_alt_tokens", _read_alt_tokens),
        )
    except ValueError as error:
        raise InvalidInput(f"the result of the sample cannot be read: {error}") from None


def _read_sequence(message: pb.SampledSequence, sequence_id: str) -> SampledSequence:
    if message.stop_reason not in _STOP_REASONS:
        raise ValueError(f"stop_reason {message.stop_reason} is not known")
    tokens = read_array(message.tokens, "<i4", "tokens").copy()
    logprobs = _floats(message.logprobs, "logprobs")
    topk = _read_topk(message.topk_sampled_logprobs)
    return SampledSequence(_STOP_REASONS[message.stop_reason], sequence_id, tokens, logprobs, topk)


def _read_topk(message: pb.TopkLogprobs) -> TopkLogprobs | None:
    if not message.k or not message.length:
        return None
    token_ids = read_array(message.token_ids, "<i4", "token_ids")
    logprobs = read_array(message.logprobs, "<f4", "logprobs")
    if token_ids.size != message.k * message.length or logprobs.size != token_ids.size:
        raise ValueError(f"top-k arrays do not have {message.length} x {message.k} values")
    shape = (message.length, message.k)
    return TopkLogprobs(token_ids.reshape(shape).copy(), logprobs.reshape(shape).copy())


def _read_alt_tokens(message: pb.PromptAltTokens) -> PromptAltTokens:
    return PromptAltTokens(read_tensor(message.tokens), read_tensor(message.logprobs))


def _write_topk(topk: TopkLogprobs, message: pb.TopkLogprobs) -> None:
    message.length, message.k = topk.token_ids.shape
    message.token_ids = _bytes(topk.token_ids, "<i4")
    message.logprobs = _bytes(topk.logprobs, "<f4")


def sample_response_to_json(response: SampleResponse) -> dict[str, Any]:
    """Return the JSON form, which omits target logprobs, top-k of sampled positions and alternative tokens."""
    values: dict[str, Any] = {
        "type": "sample",
        "sequences": [_sequence_to_json(sequence) for sequence in response.sequences],
        "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens,
    }
    if response.prompt_logprobs_np is not None:
        finite = SampleResponse([], _finite(response.prompt_logprobs_np))
        values["prompt_logprobs"] = finite.prompt_logprobs
    if response.topk_prompt_logprobs_np is not None:
        topk = response.topk_prompt_logprobs_np
        values["topk_prompt_logprobs"] = TopkLogprobs(topk.token_ids, _finite(topk.logprobs)).to_lists()
    return values


def _sequence_to_json(sequence: SampledSequence) -> dict[str, Any]:
    values: dict[str, Any] = {"stop_reason": sequence.stop_reason, "tokens": sequence.tokens}
    if sequence.logprobs_np is not None:
        values["logprobs"] = _finite(sequence.logprobs_np).tolist()
    return values


# ── parts ─────────────────────────────────────────────────────────────────────────────────────────────


T = TypeVar("T")


def _optional(message: pb.SampleResponse, field: str, read: Callable[[Any], T]) -> T | None:
    return read(getattr(message, field)) if message.HasField(field) else None


def _bytes(array: Array | None, dtype: str) -> bytes:
    return b"" if array is None else np.asarray(array, dtype).tobytes()


def _floats(data: bytes, what: str) -> Array | None:
    """Return the array, or None for no bytes: the protocol does not distinguish an empty array from none."""
    return read_array(data, "<f4", what).copy() if data else None


def _finite(array: Array) -> Array:
    """Clip infinities, which JSON lacks, to the largest float32."""
    return array if array.dtype.kind != "f" else np.clip(array, -_LARGEST, _LARGEST)
