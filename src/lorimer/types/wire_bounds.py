"""Counts what a protobuf training request holds, on its bytes, before any message is built from it.

Walks nested messages only if something in them is counted and skips everything else by its length. Every field visited
counts, so the walk itself is bounded. The parser validates the bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from lorimer.errors import InvalidInput, TooLarge

_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = range(6)
_MODEL_ID, _SEQ_ID, _DATA, _LOSS_FN, _CONFIG, _CONFIG_V2 = 1, 2, 3, 4, 5, 7
"""Field numbers of ``ForwardBackwardRequest``."""
_LOSS_FN_INPUTS = 2
"""A field number of ``Datum``; a map entry has its tensor in field 2."""
_TENSOR, _SHAPE = 2, 4
_MAX_SHAPE_BYTES = 64
_SHAPE_CHECK_BYTES = 2**24
"""Smaller bodies are not searched for shapes: parsed, a shape takes at most eight times its bytes."""


@dataclass(frozen=True)
class WireLimits:
    """What a training request may hold."""

    datums: int
    fields: int
    """Everything with a tag: datums, chunks, tensors, spans, map entries, and the values in those."""


@dataclass
class Found:
    """What the walk has found so far, even if it was aborted."""

    model_id: str | None = None
    seq_id: int | None = None
    num_datums: int = 0
    num_fields: int = 0
    _limits: WireLimits = field(default_factory=lambda: WireLimits(0, 0))


class TooMany(TooLarge):
    """A request above a limit; names the run and number if they came first."""

    def __init__(self, message: str, found: Found) -> None:
        super().__init__(message)
        self.model_id, self.seq_id = found.model_id, found.seq_id


def check_training_request(body: bytes, limits: WireLimits) -> Found:
    """Count, and refuse the body when the first limit is exceeded."""
    found = Found(_limits=limits)
    for number, kind, start, end in _fields(body, 0, len(body), found):
        if number == _DATA and kind == _BYTES:
            found.num_datums += 1
            if found.num_datums > limits.datums:
                raise TooMany(
                    f"the number of datums is more than {limits.datums}; at most {limits.datums} is accepted "
                    "(max_datums_per_operation)",
                    found,
                )
            _count_datum(body, start, end, found)
        elif number == _MODEL_ID and kind == _BYTES:
            found.model_id = body[start : min(end, start + 1000)].decode("utf-8", "replace")
        elif number == _SEQ_ID and kind == _VARINT:
            found.seq_id = _read_varint(body, start, end)[0]
    return found


def loss_of(body: bytes) -> bytes:
    """Return the fields of a request that define its loss, skipping its datums."""
    found = Found(_limits=WireLimits(len(body), len(body)))
    parts, end = [], 0
    for number, kind, _, after in _fields(body, 0, len(body), found):
        if number in (_LOSS_FN, _CONFIG, _CONFIG_V2) and kind == _BYTES:
            parts.append(body[end:after])
        end = after
    return b"".join(parts)


def _count_datum(body: bytes, start: int, end: int, found: Found) -> None:
    may_have_large_shapes = len(body) > _SHAPE_CHECK_BYTES
    for number, kind, entry, after in _fields(body, start, end, found):
        if may_have_large_shapes and number == _LOSS_FN_INPUTS and kind == _BYTES:
            for part, part_kind, tensor, tensor_end in _fields(body, entry, after, found):
                if part == _TENSOR and part_kind == _BYTES:
                    _check_shape(body, tensor, tensor_end, found)


def _check_shape(body: bytes, start: int, end: int, found: Found) -> None:
    """Refuse large shapes: a parsed shape takes eight times its bytes."""
    for number, kind, begin, stop in _fields(body, start, end, found):
        if number == _SHAPE and kind == _BYTES and stop - begin > _MAX_SHAPE_BYTES:
            raise TooMany(
                f"data[{found.num_datums - 1}].loss_fn_inputs has a shape of {stop - begin} bytes; a tensor has one or "
                "two dimensions",
                found,
            )


def _fields(body: bytes, at: int, end: int, found: Found) -> Iterator[tuple[int, int, int, int]]:
    """Yield the number, wire type, start and end of each field's value."""
    max_fields = found._limits.fields
    while at < end:
        found.num_fields += 1
        if found.num_fields > max_fields:
            raise TooMany(
                f"the request holds more than {max_fields} chunks, tensors, spans and other fields; fewer are accepted "
                "(64 for each of max_datums_per_operation)",
                found,
            )
        tag, start = body[at], at + 1
        if tag > 0x7F:
            tag, start = _read_varint(body, at, end)
        kind = tag & 7
        if kind == _BYTES:
            size = body[start] if start < end else 0x80
            if size > 0x7F:
                size, start = _read_varint(body, start, end)
            else:
                start += 1
            at = start + size
        elif kind == _VARINT:
            _, at = _read_varint(body, start, end)
        elif kind in (_GROUP, _END_GROUP):
            at = start
        elif kind in (_FIXED64, _FIXED32):
            at = start + (8 if kind == _FIXED64 else 4)
        else:
            raise _torn()
        if at > end:
            raise _torn()
        yield tag >> 3, kind, start, at


def _read_varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number and its end."""
    if at < end and body[at] < 0x80:
        return body[at], at + 1
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise _torn()


def _torn() -> InvalidInput:
    return InvalidInput("the bytes are not a ForwardBackwardRequest in protobuf")
