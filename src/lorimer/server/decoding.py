"""Decode and validate the bytes of a body; used on the event loop for small bodies and in a decoder for large ones.

A task names the kind of body. Its result is what the route needs: a small head, plus the payload that the journal
persists for training data and prompts. Everything that needs neither the database nor a model is validated here.
"""

from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import numpy as np
import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError

from lorimer import errors, types
from lorimer.errors import InvalidField, InvalidInput, InvalidJson, LorimerError, TooLarge
from lorimer.scheduler.translate import encoded_sample, encoded_training
from lorimer.server.body_limits import metrics_limits, rollout_limits, sample_limits, small_limits, training_limits
from lorimer.server.data_checks import check_count, check_metrics, check_sample, check_training, has_images, with_bytes
from lorimer.server.redaction import clean_events
from lorimer.server.settings import Settings
from lorimer.store.metrics import EncodedReport, Report, encode_reports
from lorimer.store.rollouts import EncodedRollout, encode
from lorimer.types.base import MAX_ERRORS, shown_input
from lorimer.types.encoding import InvalidTrainingRequest, TooLargeTrainingRequest, decode_training_request
from lorimer.types.json_bounds import JsonLimits, check_json, refuse_doubled_keys
from lorimer.types.metrics import ReportMetricsRequest
from lorimer.types.model_input import EncodedTextChunk, ImageChunk, ImageFormat, ModelInput
from lorimer.types.rollouts import LogRolloutsRequest
from lorimer.types.tensors import DTYPES, TensorData, TensorDtype

Model = TypeVar("Model")


class Task(msgspec.Struct, tag=True, frozen=True):
    """What to do with a body."""


class DecodeTraining(Task, frozen=True):
    media: str
    forward_only: bool


class DecodeSample(Task, frozen=True):
    pass


class DecodeTelemetry(Task, frozen=True):
    pass


class DecodeMetrics(Task, frozen=True):
    pass


class DecodeRollouts(Task, frozen=True):
    pass


class CheckJson(Task, frozen=True):
    """Validate that the body is JSON within limits. The caller parses it again."""

    depth: int
    values: int
    containers: int
    setting: str


AnyTask = DecodeTraining | DecodeSample | DecodeTelemetry | DecodeMetrics | DecodeRollouts | CheckJson


class Problem(msgspec.Struct, frozen=True):
    """An error serialized for transport between processes."""

    kind: str
    message: str
    model_id: str | None = None
    seq_id: int | None = None

    @classmethod
    def of(cls, error: LorimerError) -> "Problem":
        address = getattr(error, "model_id", None), getattr(error, "seq_id", None)
        return cls(type(error).__name__, str(error), *address)

    def error(self) -> LorimerError:
        if self.kind in _ADDRESSED:
            return _ADDRESSED[self.kind](self.message, self.model_id, self.seq_id)
        kind: type[LorimerError] = getattr(errors, self.kind)
        assert issubclass(kind, LorimerError)
        return kind(self.message)


_ADDRESSED = {kind.__name__: kind for kind in (InvalidTrainingRequest, TooLargeTrainingRequest)}


class TrainingHead(msgspec.Struct, frozen=True):
    """A training request without its data, which is the payload."""

    model_id: str
    seq_id: int
    loss_fn: str
    loss_fn_config: dict[str, float | str]
    forward_only: bool
    tokens: int
    first_image: str
    """The path of the first image chunk; empty if there is no image."""
    payload_sha256: str
    problem: Problem | None = None
    """Why the request is refused, reported only after the route has checked that the caller owns the run."""


class Text(msgspec.Struct, frozen=True, tag=True):
    tokens: memoryview


class Image(msgspec.Struct, frozen=True, tag=True):
    data: memoryview
    format: ImageFormat
    expected_tokens: int | None


class Targets(msgspec.Struct, frozen=True):
    dtype: TensorDtype
    shape: list[int]
    values: memoryview
    crow: memoryview | None
    columns: memoryview | None


class SampleHead(msgspec.Struct, frozen=True):
    """A sample request with its prompt as raw bytes, so that reading it is free. Its JSON is the payload."""

    fields: bytes
    """All fields except the prompt and the targets, as JSON."""
    chunks: list[Text | Image]
    targets: Targets | None
    first_image: str
    problem: Problem | None = None
    has_seed: bool = False
    """The client chose the seed."""


class TelemetryHead(msgspec.Struct, frozen=True):
    session_id: str
    events: list[dict[str, Any]]


class MetricsHead(msgspec.Struct, frozen=True):
    reports: list[EncodedReport]
    names: list[str]
    steps_done: int | None = None


class RolloutsHead(msgspec.Struct, frozen=True):
    rollouts: list[EncodedRollout]


class NoHead(msgspec.Struct, frozen=True):
    pass


Head = TrainingHead | SampleHead | TelemetryHead | MetricsHead | RolloutsHead | NoHead


def perform(task: AnyTask, body: bytes, settings: Settings) -> tuple[Head, bytes]:
    """Decode ``body`` as ``task`` says and return its head and payload. Raise on invalid input."""
    match task:
        case DecodeTraining(media=media, forward_only=forward_only):
            return decode_training(body, media, forward_only, settings)
        case DecodeSample():
            return decode_sample(body, settings)
        case DecodeTelemetry():
            return decode_telemetry(body, settings), b""
        case DecodeMetrics():
            return decode_metrics(body, settings), b""
        case DecodeRollouts():
            return decode_rollouts(body, settings), b""
        case CheckJson():
            body = body or b"{}"
            parse_json(body, JsonLimits(task.depth, task.values, task.containers, task.setting))
            return NoHead(), body


def parse_json(body: bytes, limits: JsonLimits) -> Any:
    """Parse JSON strictly: refuse NaN, infinity, duplicate keys, and more values or nesting than ``limits`` allow."""
    try:
        counts = check_json(body, limits)
        value = orjson.loads(body)
        refuse_doubled_keys(body, value, counts)
    except orjson.JSONDecodeError as error:
        if "Not enough memory" in str(error):  # the memory limit was hit; the body itself may be valid
            raise MemoryError from None
        raise invalid_json(str(error)) from None
    except TooLarge:
        raise
    except InvalidInput as error:
        raise invalid_json(str(error)) from None
    return value


def invalid_json(reason: str) -> InvalidJson:
    return InvalidJson(f"the body is not JSON that is accepted: {reason}")


def validate(value: object, model: type[Model]) -> Model:
    """Validate a parsed body against a pydantic model, or any type that pydantic supports."""
    try:
        if isinstance(model, type) and issubclass(model, BaseModel):
            return model.model_validate(value)
        return TypeAdapter(model).validate_python(value)
    except ValidationError as error:
        raise InvalidField(describe(error)) from None


def describe(error: ValidationError) -> str:
    """Describe the first few invalid fields, each with its path, in one sentence."""
    found = error.errors(include_url=False, include_context=False, include_input=True)
    parts = [f"{field_path(item['loc'])}: {item['msg']}{_got(item)}" for item in found[:MAX_ERRORS]]
    more = f"; and {len(found) - MAX_ERRORS} more" if len(found) > MAX_ERRORS else ""
    return "; ".join(parts) + more


def field_path(location: tuple[int | str, ...]) -> str:
    """Format a location: ``("data", 3, "weights")`` becomes ``data[3].weights``."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.removeprefix(".") or "body"


def _got(item: Any) -> str:
    value = item["input"]
    if item["type"] in ("missing", "extra_forbidden") or not isinstance(value, str | int | float | bool | None):
        return ""
    return f", got {shown_input(value)}"


# ── training ──────────────────────────────────────────────────────────────────────────────────────────


def decode_training(body: bytes, media: str, forward_only: bool, settings: Settings) -> tuple[TrainingHead, bytes]:
    request = decode_training_request(body, media, forward_only, training_limits(settings))
    first_image, problem, payload, tokens, digest = "", None, b"", 0, ""
    try:
        request, first_image = _with_images(request, settings)
        check_training(settings, request)
        encoded = encoded_training(request)
        payload, tokens, digest = encoded.payload, encoded.tokens, encoded.payload_sha256
    except LorimerError as error:
        problem = Problem.of(error)
    head = TrainingHead(
        model_id=request.model_id,
        seq_id=request.seq_id,
        loss_fn=request.loss_fn,
        loss_fn_config=request.loss_fn_config,
        forward_only=request.forward_only,
        tokens=tokens,
        first_image=first_image,
        payload_sha256=digest,
        problem=problem,
    )
    return head, payload


def _with_images(request: types.TrainingRequest, settings: Settings) -> tuple[types.TrainingRequest, str]:
    """Resolve every image of the request to bytes. Return the request and the path of its first image."""
    if not any(has_images(datum.model_input) for datum in request.data):
        return request, ""
    data = [
        replace(datum, model_input=with_bytes(settings, f"data[{index}].model_input", datum.model_input))
        for index, datum in enumerate(request.data)
    ]
    inputs = ((f"data[{index}].model_input", datum.model_input) for index, datum in enumerate(data))
    return replace(request, data=data), next(filter(None, (_first_image(*one) for one in inputs)), "")


def _first_image(where: str, model_input: ModelInput) -> str:
    chunks = enumerate(model_input.chunks)
    return next((f"{where}.chunks[{index}]" for index, chunk in chunks if isinstance(chunk, ImageChunk)), "")


# ── samples ───────────────────────────────────────────────────────────────────────────────────────────


def decode_sample(body: bytes, settings: Settings) -> tuple[SampleHead, bytes]:
    raw = parse_json(body or b"{}", sample_limits(settings).json)
    request = validate(raw, types.SampleRequest)
    first_image, problem, payload = "", None, b""
    has_seed = request.sampling_params.seed is not None
    try:
        if has_images(request.prompt):
            request = request.model_copy(update={"prompt": with_bytes(settings, "prompt", request.prompt)})
            first_image = _first_image("prompt", request.prompt)
        check_sample(settings, request)
        request, payload = encoded_sample(request)
    except LorimerError as error:
        problem = Problem.of(error)
    return sample_head(request, first_image, problem, has_seed), payload


def sample_head(request: types.SampleRequest, first_image: str, problem: Problem | None, has_seed: bool) -> SampleHead:
    chunks: list[Text | Image] = []
    for chunk in request.prompt.chunks if problem is None else ():
        if isinstance(chunk, EncodedTextChunk):
            chunks.append(Text(memoryview(np.asarray(chunk.tokens, "<i4").tobytes())))
        else:
            assert isinstance(chunk, ImageChunk)
            chunks.append(Image(memoryview(chunk.data), chunk.format, chunk.expected_tokens))
    bare = request.model_copy(update={"prompt": ModelInput.empty(), "target_prompt_logprobs": None})
    fields = bare.model_dump_json(exclude_none=True).encode()
    tensor = request.target_prompt_logprobs
    return SampleHead(fields, chunks, None if tensor is None else _targets(tensor), first_image, problem, has_seed)


def _targets(tensor: TensorData) -> Targets:
    crow, columns = tensor.csr or (None, None)
    return Targets(
        tensor.dtype,
        list(tensor.dense_shape),
        memoryview(tensor.values.tobytes()),
        None if crow is None else memoryview(crow.tobytes()),
        None if columns is None else memoryview(columns.tobytes()),
    )


def sample_request(head: SampleHead) -> types.SampleRequest:
    """Rebuild the request from its head. Its arrays are views of the head's bytes."""
    chunks: list[types.ModelInputChunk] = []
    for chunk in head.chunks:
        if isinstance(chunk, Text):
            chunks.append(EncodedTextChunk.from_array(np.frombuffer(chunk.tokens, "<i4")))
        else:
            chunks.append(
                ImageChunk.model_construct(
                    data=bytes(chunk.data), format=chunk.format, expected_tokens=chunk.expected_tokens
                )
            )
    found: dict[str, Any] = {"prompt": ModelInput.model_construct(chunks=chunks), "target_prompt_logprobs": None}
    if (targets := head.targets) is not None:
        indices = [None if part is None else np.frombuffer(part, "<i8") for part in (targets.crow, targets.columns)]
        values = np.frombuffer(targets.values, DTYPES[targets.dtype])
        found["target_prompt_logprobs"] = TensorData(values, targets.dtype, targets.shape, *indices)
    return types.SampleRequest.model_validate_json(head.fields).model_copy(update=found)


# ── telemetry ─────────────────────────────────────────────────────────────────────────────────────────


def decode_telemetry(body: bytes, settings: Settings) -> TelemetryHead:
    raw = parse_json(body, small_limits(settings).json)
    events = raw.get("events") if isinstance(raw, dict) else None
    if not isinstance(events, list):
        raise InvalidInput("events is missing or no list; a list of events is accepted")
    session_id = str(raw.get("session_id"))[: settings.max_string_chars]
    return TelemetryHead(session_id, clean_events(events, settings.max_telemetry_events))


# ── metrics ───────────────────────────────────────────────────────────────────────────────────────────


def decode_metrics(body: bytes, settings: Settings) -> MetricsHead:
    request = validate(parse_json(body or b"{}", metrics_limits(settings).json), ReportMetricsRequest)
    check_metrics(settings, request)
    reports = (
        Report(point.step, point.time, {name: float(value) for name, value in point.values.items()}, point.optim_steps)
        for point in request.points
    )
    return MetricsHead(*encode_reports(reports), request.steps_done)


# ── rollouts ──────────────────────────────────────────────────────────────────────────────────────────


def decode_rollouts(body: bytes, settings: Settings) -> RolloutsHead:
    request = validate(parse_json(body or b"{}", rollout_limits(settings).json), LogRolloutsRequest)
    max_rollouts = settings.max_rollouts_per_request
    check_count("the number of rollouts", len(request.rollouts), max_rollouts, "max_rollouts_per_request")
    encoded = [encode(rollout) for rollout in request.rollouts]
    for index, one in enumerate(encoded):
        what = f"the size of rollouts[{index}] in bytes"
        check_count(what, one.content_bytes, settings.max_rollout_bytes, "max_rollout_bytes")
    return RolloutsHead(encoded)
