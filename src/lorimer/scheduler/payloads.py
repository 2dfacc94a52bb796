"""Payloads of requests in the journal, except training data, which is stored in the wire's protobuf form."""

from typing import Any, Literal

import msgspec

from lorimer.engine.messages import StepField


class Payload(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Base class of all payloads. Later versions read them too, so unknown fields are ignored."""


class CreateModel(Payload):
    """Create a run from its row, and first load these weights, if any."""

    path: str | None = None
    weights_name: str | None = None
    optimizer: bool = False
    adapter_directory: str | None = None
    """A directory that PEFT wrote, on the engine's machine; read until the run has its first snapshot."""
    answers_load: bool = False
    """The run was requested by ``load_weights`` with a session, and the result has that form."""


class OptimStep(Payload):
    params: dict[str, StepField]


class Save(Payload):
    checkpoint_kind: Literal["training", "sampler", "external"]
    name: str
    expires_at: float | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveEphemeral(Payload):
    """Freeze the weights as an unnamed sampler."""

    sampling_session_seq_id: int


class Load(Payload):
    path: str
    weights_name: str
    optimizer: bool


class CreateLoss(Payload):
    loss_id: str
    name: str
    inputs: list[tuple[str, int]]
    graph: dict[str, Any]


class Sample(Payload):
    request: bytes
    """The JSON of the request, including the seed that was chosen for it."""


AnyPayload = CreateModel | OptimStep | Save | SaveEphemeral | Load | CreateLoss | Sample

_decoder = msgspec.msgpack.Decoder(AnyPayload)


def encode_payload(payload: AnyPayload) -> bytes:
    return msgspec.msgpack.encode(payload)


def decode_payload(data: bytes) -> AnyPayload:
    payload: AnyPayload = _decoder.decode(data)
    return payload
