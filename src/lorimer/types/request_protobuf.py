"""Training requests as protobuf. Arrays are converted as a whole; every size is checked against the bytes."""

import math
from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from lorimer.errors import InvalidInput, Unsupported
from lorimer.types import tinker_pb2 as pb
from lorimer.types.base import validate
from lorimer.types.datum import Datum, PromptProvenanceSpan, ProvenanceSpans, SampledProvenanceSpan
from lorimer.types.model_input import DmelChunk, EncodedTextChunk, ImageChunk, ModelInput, ModelInputChunk
from lorimer.types.tensor_protobuf import parse_message, read_array, read_tensor, write_tensor
from lorimer.types.training import TrainingRequest
from lorimer.types.wire_bounds import WireLimits, check_training_request, loss_of

address = attrgetter("model_id", "seq_id")


def parse(body: bytes, limits: WireLimits | None = None) -> pb.ForwardBackwardRequest:
    """Parse the message; with ``limits``, only after counting what it holds."""
    if limits is not None:
        check_training_request(body, limits)
    return parse_message(pb.ForwardBackwardRequest, body)


def read(message: pb.ForwardBackwardRequest, forward_only: bool) -> TrainingRequest:
    return TrainingRequest(
        message.model_id,
        message.seq_id,
        [_read_datum(datum, f"data[{index}]") for index, datum in enumerate(message.data)],
        message.loss_fn,
        _read_config(message),
        message.forward_only or forward_only,
    )


def read_loss(body: bytes) -> tuple[str, dict[str, float | str]]:
    """Read the loss of a request and its configuration without parsing the data."""
    message = parse_message(pb.ForwardBackwardRequest, loss_of(body))
    return message.loss_fn, _read_config(message)


def _read_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """Read the loss configuration. Only the newer of the two maps has text values; it has the numbers too."""
    config: dict[str, float | str] = {}
    for key, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise InvalidInput(f"loss_fn_config[{key!r}] has no value; a number or a text is accepted")
        config[key] = value.number if kind == "number" else value.text
    config = config or dict(message.loss_fn_config)
    for key, value in config.items():
        if not isinstance(value, str) and not math.isfinite(value):
            raise InvalidInput(f"loss_fn_config[{key!r}] is {value!r}; finite numbers are accepted")
    return config


def _read_datum(message: pb.Datum, where: str) -> Datum:
    chunks = [_read_chunk(chunk, f"{where}.model_input[{i}]") for i, chunk in enumerate(message.model_input)]
    inputs = {}
    for name, tensor in message.loss_fn_inputs.items():
        try:
            inputs[name] = read_tensor(tensor)
        except ValueError as error:
            raise InvalidInput(f"{where}.loss_fn_inputs[{name!r}]: {error}") from None
    model_input = ModelInput.model_construct(chunks=chunks)
    if not message.model_input_spans and not message.loss_fn_input_spans:
        return Datum(model_input, inputs)
    return Datum(
        model_input,
        inputs,
        _read_spans(message.model_input_spans, f"{where}.model_input_spans"),
        _read_spans(message.loss_fn_input_spans, f"{where}.loss_fn_input_spans"),
    )


def _read_chunk(message: pb.Chunk, where: str) -> ModelInputChunk:
    try:
        match message.WhichOneof("chunk"):
            case "encoded_text":
                return EncodedTextChunk.from_array(read_array(message.encoded_text.tokens, "<i4", "tokens"))
            case "image":
                return _read_image(message.image, where)
            case "dmel":
                return DmelChunk.model_construct(dmel=message.dmel.dmel)
    except ValueError as error:
        raise InvalidInput(f"{where}: {error}") from None
    raise InvalidInput(f"{where} is empty; a chunk is one of encoded_text, image, dmel")


def _read_image(message: pb.ImageChunk, where: str) -> ImageChunk:
    if message.HasField("override_dimensions"):
        raise Unsupported("override_dimensions of an image is not supported; send the image in its own size")
    expected = message.expected_tokens if message.HasField("expected_tokens") else None
    values = {"data": message.data, "format": message.format, "expected_tokens": expected}
    return validate(ImageChunk, values, where)


_SPANS: dict[str, type[PromptProvenanceSpan | SampledProvenanceSpan]] = {
    "prompt_tokens": PromptProvenanceSpan,
    "sampled_tokens": SampledProvenanceSpan,
}


def _read_spans(messages: Iterable[pb.ProvenanceSpan], where: str) -> ProvenanceSpans:
    spans: ProvenanceSpans = []
    for index, message in enumerate(messages):
        kind = message.WhichOneof("span")
        if kind is None:
            raise InvalidInput(f"{where}[{index}] is empty; a span is one of {', '.join(_SPANS)}")
        span = getattr(message, kind)
        try:
            spans.append(_SPANS[kind](sequence_id=span.sequence_id, offset=span.offset, length=span.length))
        except ValueError as error:
            raise InvalidInput(f"{where}[{index}]: {error}") from None
    return spans


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────


def write(request: TrainingRequest) -> bytes:
    """Encode a request."""
    message = pb.ForwardBackwardRequest(
        model_id=request.model_id,
        seq_id=request.seq_id,
        loss_fn=request.loss_fn,
        forward_only=request.forward_only,
    )
    for key, value in request.loss_fn_config.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config[key] = message.loss_fn_config_v2[key].number = float(value)
    for datum in request.data:
        _write_datum(datum, message.data.add())
    # Maps serialize in a different order in each process otherwise, and a retry after a restart would have another
    # hash.
    return bytes(message.SerializeToString(deterministic=True))


def _write_datum(datum: Datum, message: pb.Datum) -> None:
    for chunk in datum.model_input.chunks:
        _write_chunk(chunk, message.model_input.add())
    for name, tensor in datum.loss_fn_inputs.items():
        write_tensor(tensor, message.loss_fn_inputs[name])
    for spans, field in (
        (datum.model_input_spans, message.model_input_spans),
        (datum.loss_fn_input_spans, message.loss_fn_input_spans),
    ):
        for span in spans or ():
            added = field.add()
            part = added.sampled_tokens if isinstance(span, SampledProvenanceSpan) else added.prompt_tokens
            part.sequence_id, part.offset, part.length = span.sequence_id, span.offset, span.length


def _write_chunk(chunk: ModelInputChunk, message: pb.Chunk) -> None:
    match chunk:
        case EncodedTextChunk():
            message.encoded_text.tokens = np.asarray(chunk.tokens, "<i4").tobytes()
        case ImageChunk():
            message.image.data, message.image.format = chunk.data, chunk.format
            if chunk.expected_tokens is not None:
                message.image.expected_tokens = chunk.expected_tokens
        case DmelChunk():
            message.dmel.dmel = chunk.dmel
        case _:
            raise Unsupported(f"a chunk of type {chunk.type!r} cannot be trained on; send the image itself")
