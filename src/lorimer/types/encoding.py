"""The entry point of the encodings: training requests and results, to and from bytes and JSON.

``request_protobuf``, ``request_json`` and ``results`` do the work. An invalid body raises ``InvalidInput`` that names
the field; what a model or a loss accepts is checked elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from lorimer.errors import InvalidInput, TooLarge
from lorimer.types import request_json, request_protobuf
from lorimer.types.compatibility import PROTOBUF
from lorimer.types.json_bounds import JsonLimits
from lorimer.types.results import (
    OUTPUT_TYPE,
    decode_forward_backward_output,
    decode_sample_response,
    encode_forward_backward_output,
    encode_sample_response,
    forward_backward_output_to_json,
    sample_response_to_json,
)
from lorimer.types.training import TrainingRequest
from lorimer.types.wire_bounds import WireLimits

__all__ = [
    "OUTPUT_TYPE",
    "EncodedTraining",
    "InvalidTrainingRequest",
    "TooLargeTrainingRequest",
    "TrainingLimits",
    "decode_forward_backward_output",
    "decode_sample_response",
    "decode_training_request",
    "encode_forward_backward_output",
    "encode_sample_response",
    "encode_training_request",
    "forward_backward_output_to_json",
    "read_loss",
    "sample_response_to_json",
]

P = TypeVar("P")
_FIELDS_PER_DATUM = 64
_OTHER_FIELDS = 1024
_VALUES_PER_TOKEN = 4


@dataclass(frozen=True)
class TrainingLimits:
    """What a request may hold; checked on its bytes, before anything is built from them."""

    max_datums: int
    max_tokens: int
    max_depth: int

    @property
    def wire(self) -> WireLimits:
        return WireLimits(self.max_datums, _FIELDS_PER_DATUM * self.max_datums + _OTHER_FIELDS)

    @property
    def json(self) -> JsonLimits:
        containers = _FIELDS_PER_DATUM * self.max_datums + _OTHER_FIELDS
        values = _VALUES_PER_TOKEN * self.max_tokens + containers
        return JsonLimits(self.max_depth, values, containers, "max_datums_per_operation, max_tokens_per_operation")


@dataclass(frozen=True)
class EncodedTraining:
    """A training request as the journal stores it, with what is known of it without decoding it again."""

    model_id: str
    seq_id: int
    payload: bytes
    """Protobuf, written by ``encode_training_request``."""
    loss_fn: str
    loss_fn_config: dict[str, float | str]
    forward_only: bool
    tokens: int
    """The number of tokens, estimated for images."""
    payload_sha256: str
    """The hash of the payload, by which a retry is recognized.

    Computed with it, because that takes long for a large one.
    """


class InvalidTrainingRequest(InvalidInput):
    """A training request that cannot be decoded.

    Carries its run and number, if known, so that the number is consumed.
    """

    def __init__(self, message: str, model_id: str | None = None, seq_id: int | None = None) -> None:
        super().__init__(message)
        self.model_id = model_id
        self.seq_id = seq_id


class TooLargeTrainingRequest(InvalidTrainingRequest, TooLarge):
    """A training request that holds too much."""


def decode_training_request(
    body: bytes, content_type: str, forward_only: bool = False, limits: TrainingLimits | None = None
) -> TrainingRequest:
    """Decode a protobuf or JSON body. ``forward_only`` is that of the endpoint it was sent to.

    Without ``limits``, the body must have been accepted before.
    """
    match content_type.partition(";")[0].strip().lower():
        case "application/x-protobuf":
            wire = limits.wire if limits else None
            return _decode(
                forward_only,
                partial(request_protobuf.parse, body, wire),
                request_protobuf.address,
                request_protobuf.read,
            )
        case "application/json" | "":
            max_datums = limits.max_datums if limits else None
            return _decode(
                forward_only,
                lambda: request_json.parse(body, limits.json if limits else None),
                request_json.address,
                lambda values, forward_only: request_json.read(values, forward_only, max_datums),
            )
    raise InvalidTrainingRequest(f"Content-Type {content_type[:100]!r} is neither application/json nor {PROTOBUF}")


encode_training_request = request_protobuf.write
read_loss = request_protobuf.read_loss


def _decode(
    forward_only: bool,
    parse: Callable[[], P],
    address: Callable[[P], tuple[object, object]],
    read: Callable[[P, bool], TrainingRequest],
) -> TrainingRequest:
    model_id: str | None = None
    seq_id: int | None = None
    try:
        parsed = parse()
        given_id, given_seq = address(parsed)
        if not isinstance(given_id, str) or not given_id:
            raise InvalidInput(f"model_id is {given_id!r:.60}; the id of a run is accepted")
        model_id = given_id
        if type(given_seq) is not int or not 1 <= given_seq < 2**63:
            raise InvalidInput(f"seq_id is {given_seq!r:.60}; integers from 1 are accepted")
        seq_id = given_seq
        return read(parsed, forward_only)
    except TooLarge as error:
        found_id, found_seq = getattr(error, "model_id", model_id), getattr(error, "seq_id", seq_id)
        raise TooLargeTrainingRequest(str(error), found_id, found_seq) from None
    except InvalidInput as error:
        raise InvalidTrainingRequest(str(error), model_id, seq_id) from None
