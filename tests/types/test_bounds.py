"""What a body holds is counted before anything is built from it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from lorimer import types
from lorimer.errors import InvalidInput, TooLarge
from lorimer.server.anthropic.schemas import MessagesRequest
from lorimer.server.openai.schemas import ChatRequest, CompletionRequest
from lorimer.types import tinker_pb2 as pb
from lorimer.types.base import MAX_ERRORS
from lorimer.types.encoding import (
    InvalidTrainingRequest,
    TooLargeTrainingRequest,
    TrainingLimits,
    decode_training_request,
)
from lorimer.types.json_bounds import JsonLimits, check_json, count_keys, count_outside_strings, refuse_doubled_keys
from lorimer.types.metrics import ReportMetricsRequest
from lorimer.types.wire_bounds import WireLimits, check_training_request
from tests.memory import python_peak

PROTOBUF, JSON = "application/x-protobuf", "application/json"
LIMITS = TrainingLimits(max_datums=4096, max_tokens=4_194_304, max_depth=64)
FEW = TrainingLimits(max_datums=64, max_tokens=4096, max_depth=64)
SMALL = JsonLimits(depth=64, values=50_000, containers=5000)


def peak_bytes(call) -> int:
    """Most memory of Python that the call, which is refused, had at any time."""

    def refused() -> None:
        with pytest.raises(InvalidInput):
            call()

    return python_peak(refused)


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────────

TEXT = st.text(st.sampled_from('"\\,:[]{}a\n\u00e9'), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=30,
)


def measured(value, depth=0) -> tuple[int, int, int, int]:
    """Values, containers, keys and depth of a tree."""
    if not isinstance(value, dict | list):
        return 1, 0, 0, depth
    parts = [measured(item, depth + 1) for item in (value.values() if isinstance(value, dict) else value)]
    sums = [sum(part[index] for part in parts) for index in range(3)]
    keys = len(value) if isinstance(value, dict) else 0
    return 1 + sums[0], 1 + sums[1], keys + sums[2], max([depth + 1, *(part[3] for part in parts)])


@given(VALUES, st.booleans())
def test_counts_are_those_of_the_tree(value, is_ascii):
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    counts = count_outside_strings(body)
    values, containers, keys, depth = measured(value)
    assert (counts.containers, counts.keys, counts.depth) == (containers, keys, depth)
    assert values <= counts.values <= values + containers
    assert count_keys(value) == keys
    refuse_doubled_keys(body, value, counts)
    check_json(body, JsonLimits(depth, counts.values, containers))
    if depth:
        with pytest.raises(InvalidInput, match="deeper"):
            count_outside_strings(body, JsonLimits(depth - 1, counts.values, containers))
        with pytest.raises(TooLarge, match="lists and objects"):
            count_outside_strings(body, JsonLimits(depth, counts.values, containers - 1))


@given(st.lists(st.tuples(TEXT, VALUES), min_size=1, max_size=5), st.data())
def test_a_key_that_comes_twice_is_found_wherever_it_is(pairs, data):
    twice, _ = data.draw(st.sampled_from(pairs))
    members = [*pairs, (twice, 0)]
    text = "{" + ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in members) + "}"
    body = f'{{"a": [1, {{"b": [[], {text}]}}], "c": ":"}}'.encode()
    with pytest.raises(InvalidInput, match="comes twice"):
        refuse_doubled_keys(body, json.loads(body), check_json(body, SMALL))


@pytest.mark.parametrize(
    "body",
    [b"[" + b"[]," * (16 * 2**20 // 3) + b"[]]", b"[" + b"1," * 2**23 + b"1]", b"[" * 2**24, b'{"a":{},' * 2**21],
    ids=["lists", "numbers", "brackets", "objects"],
)
def test_sixteen_megabytes_are_refused_without_an_object_for_each_value(body):
    assert peak_bytes(lambda: check_json(body, SMALL)) < 4 * 2**20


@pytest.mark.parametrize(
    ("data", "refused"),
    [
        (b"[" + b"[]," * 2**22 + b"[]]", "lists and objects"),
        (b'[{"a":{}}' + b',{"a":{}}' * 300_000 + b"]", "lists and objects"),
        (b"[" + b"1," * 2**25 + b"1]", "values"),
    ],
    ids=["lists", "objects", "numbers"],
)
def test_training_in_json_is_counted_first(data, refused):
    body = b'{"model_id":"m","seq_id":1,"forward_backward_input":{"loss_fn":"x","data":' + data + b"}}"

    def decode() -> None:
        with pytest.raises(TooLarge, match=refused) as raised:
            decode_training_request(body, JSON, limits=LIMITS)
        raise raised.value

    assert peak_bytes(decode) < 4 * 2**20


def test_training_in_json_with_too_many_datums_has_its_address():
    body = {"model_id": "m", "seq_id": 3, "forward_backward_input": {"loss_fn": "x", "data": [{}] * 5000}}
    with pytest.raises(TooLargeTrainingRequest, match="5000; at most 4096") as raised:
        decode_training_request(json.dumps(body).encode(), JSON, limits=LIMITS)
    assert (raised.value.model_id, raised.value.seq_id) == ("m", 3)


@pytest.mark.parametrize(
    "text",
    [
        '{"model_id":"a","model_id":"m","seq_id":1,"forward_backward_input":{"data":[],"loss_fn":"x"}}',
        '{"model_id":"m","seq_id":1,"forward_backward_input":{"data":[],"loss_fn":"x","loss_fn":"y"}}',
        '{"model_id":"m","seq_id":1,"forward_backward_input":{"loss_fn":"x","data":[{"model_input":{"chunks":'
        '[{"tokens":[1],"tokens":[2]}]},"loss_fn_inputs":{}}]}}',
    ],
)
def test_training_in_json_with_a_key_twice_is_refused(text):
    with pytest.raises(InvalidTrainingRequest, match="comes twice"):
        decode_training_request(text.encode(), JSON, limits=LIMITS)


MANY = 10_000
UNKNOWN = {f"unknown_{index}": 1 for index in range(MANY)}
WRONG: list[tuple[type[BaseModel], dict[str, object]]] = [
    (types.SampleRequest, {"prompt": {"chunks": [{"tokens": ["x"] * MANY}]}, "sampling_params": {}}),
    (types.SampleRequest, {"prompt": {"chunks": [{}] * MANY}, "sampling_params": {"stop": [{}] * MANY}}),
    (types.SampleRequest, {"prompt": {"chunks": [], **UNKNOWN}, "sampling_params": {}}),
    (ReportMetricsRequest, {"points": [{"step": 1, "values": dict.fromkeys(UNKNOWN, "x")}]}),
    (ReportMetricsRequest, {"points": [UNKNOWN] * 10}),
    (types.SaveWeightsRequest, {"model_id": "a", "user_metadata": UNKNOWN}),
    (types.CreateSessionRequest, {"tags": [1] * MANY, "sdk_version": "1", **UNKNOWN}),
    (types.FuturesRetrieveRequest, {"target": {"sampling_session_id": "a"}, "retrieved_request_ids": [1] * MANY}),
    (types.SessionSearchRequest, {"project_ids": [1] * MANY, "user_metadata": UNKNOWN, "statuses": []}),
    (ChatRequest, {"model": "x", "messages": [{}] * MANY}),
    (ChatRequest, {"model": "x", "messages": [{"role": "user", "content": [{"type": "text"}] * MANY}]}),
    (ChatRequest, {"model": "x", "messages": [{"role": "user", **UNKNOWN}]}),
    (CompletionRequest, {"model": "x", "prompt": [[1.5]] * MANY}),
    (MessagesRequest, {"model": "x", "max_tokens": 1, "messages": [{"role": "user", **UNKNOWN}] * 10}),
]


@pytest.mark.parametrize(("model", "values"), WRONG, ids=lambda item: getattr(item, "__name__", ""))
def test_few_errors_are_built_of_ten_thousand(model, values):
    with pytest.raises(ValidationError) as raised:
        model.model_validate(values)
    assert raised.value.error_count() <= MAX_ERRORS


# ── protobuf ──────────────────────────────────────────────────────────────────────────────────────────

EMPTY_DATUM = b"\x1a\x00"
ADDRESS = pb.ForwardBackwardRequest(model_id="s:train:0", seq_id=7).SerializeToString()


def datum(content: bytes) -> bytes:
    size, length = len(content), b""
    while size > 0x7F:
        size, length = size >> 7, length + bytes([size & 0x7F | 0x80])
    return b"\x1a" + length + bytes([size]) + content


def test_eight_million_datums_are_refused_at_the_first_too_many():
    body = ADDRESS + EMPTY_DATUM * 2**23
    with pytest.raises(TooLargeTrainingRequest, match="max_datums_per_operation") as raised:
        decode_training_request(body, PROTOBUF, limits=LIMITS)
    assert (raised.value.model_id, raised.value.seq_id) == ("s:train:0", 7)
    assert peak_bytes(lambda: decode_training_request(body, PROTOBUF, limits=FEW)) < 2**16


@pytest.mark.parametrize(
    "body",
    [
        datum(b"\x0a\x00" * 2**19),
        datum(b"\x12\x00" * 2**19),
        datum(b"\x1a\x00" * 2**19),
        datum(b"\x22\x00" * 2**19),
        b"\x2a\x00" * 2**19,
        b"\x3a\x00" * 2**19,
        b"\xa0\x06\x01" * 2**19,
        b"\xa3\x06\xa4\x06" * 2**19,
        datum(b"\xa0\x06\x01" * 2**19),
    ],
    ids=["chunks", "tensors", "spans", "more spans", "config", "config v2", "unknown", "groups", "unknown in datum"],
)
def test_other_messages_are_counted_too(body):
    body = ADDRESS + body
    with pytest.raises(TooLarge, match="fields"):
        decode_training_request(body, PROTOBUF, limits=LIMITS)
    assert peak_bytes(lambda: decode_training_request(body, PROTOBUF, limits=FEW)) < 2**16


def test_a_shape_of_millions_of_sizes_is_refused_on_the_wire():
    tensor = b"\x22\x80\x80\x80\x08" + b"\x01" * 2**24
    entry = pb.Datum(loss_fn_inputs={"a": pb.Tensor.FromString(tensor)}).SerializeToString()
    body = ADDRESS + datum(entry)
    assert peak_bytes(lambda: decode_training_request(body, PROTOBUF, limits=FEW)) < 2**16


@given(st.integers(0, 20), st.integers(0, 3), st.integers(0, 3))
def test_the_count_is_that_of_the_parser(num_datums, num_chunks, num_tensors):
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=2, loss_fn="x", loss_fn_config={"a": 1.0})
    for _ in range(num_datums):
        added = message.data.add()
        for _ in range(num_chunks):
            added.model_input.add().encoded_text.tokens = b"\0" * 4000
        for index in range(num_tensors):
            added.loss_fn_inputs[str(index)].shape.extend([1, 2])
    body = message.SerializeToString()
    found = check_training_request(body, WireLimits(num_datums, 10_000))
    assert (found.model_id, found.seq_id, found.num_datums) == ("m", 2, num_datums)
    check_training_request(body, WireLimits(num_datums, found.num_fields))
    with pytest.raises(TooLarge):
        check_training_request(body, WireLimits(num_datums, found.num_fields - 1))
