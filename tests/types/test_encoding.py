"""Training requests: those the official SDK encodes, in protobuf and JSON, and hostile ones."""

import json
import math
import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tinker import types as official
from tinker.proto import tinker_public_pb2 as official_pb
from tinker.proto.request_conv import forward_backward_request_to_proto

from lorimer.errors import InvalidInput
from lorimer.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    TensorData,
    TrainingRequest,
)
from lorimer.types.encoding import InvalidTrainingRequest, decode_training_request, encode_training_request
from tests.memory import python_peak

PROTOBUF = "application/x-protobuf"
JSON = "application/json"


def official_bytes(data, loss_fn="cross_entropy", config=None, seq_id=1) -> bytes:
    request = official.ForwardBackwardRequest(official.ForwardBackwardInput(data, loss_fn, config), "s:train:0", seq_id)
    return forward_backward_request_to_proto(request).SerializeToString()


def official_datum(**inputs) -> official.Datum:
    return official.Datum(official.ModelInput.from_ints([5, 6, 7]), inputs)


def spans(kind, *parts):
    return [kind(sequence_id=name, offset=offset, length=length) for name, offset, length in parts]


OFFICIAL_DATA = {
    "dense": [official_datum(target_tokens=[1, 2, 3], weights=[0.5, 0.0, -1.0])],
    "two-dimensional": [official_datum(target_tokens=[[1, 2], [3, 4], [5, 6]], weights=np.ones((3, 2)))],
    "sparse": [official_datum(target_tokens=torch.eye(8, dtype=torch.int64), weights=torch.eye(8))],
    "scalar": [official_datum(target_tokens=[1, 2, 3], reward=np.array(0.5))],
    "empty": [official_datum(target_tokens=np.empty(0, np.int64))],
    "several": [official_datum(target_tokens=[i, i, i], weights=[i, i, i]) for i in range(50)],
    "nothing": [],
    "images and audio": [
        official.Datum(
            official.ModelInput(
                chunks=[
                    official.EncodedTextChunk(tokens=[1]),
                    official.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=3),
                    official.ImageChunk(data=b"\xff\xd8", format="jpeg"),
                    official.DmelChunk(dmel=b"\0\1\4"),
                    official.EncodedTextChunk(tokens=[]),
                ]
            )
        )
    ],
    "provenance": [
        official_datum(target_tokens=[1, 2, 3]).with_provenance(
            [
                *spans(official.PromptProvenanceSpan, ("a", 4, 2)),
                *spans(official.SampledProvenanceSpan, ("b", 0, 1)),
            ],
            spans(official.SampledProvenanceSpan, ("b", 0, 3)),
        )
    ],
}


def assert_same(ours: Datum, theirs: official.Datum) -> None:
    assert ours.model_input.model_dump() == theirs.model_input.model_dump()
    assert ours.loss_fn_inputs.keys() == theirs.loss_fn_inputs.keys()
    for name, tensor in theirs.loss_fn_inputs.items():
        found = ours.loss_fn_inputs[name]
        assert (found.dtype, found.data) == (tensor.dtype, tensor.data)
        assert found.dense_shape == (tuple(tensor.shape) or (1,))
        assert found.sparse_crow_indices == tensor.sparse_crow_indices
        assert found.sparse_col_indices == tensor.sparse_col_indices
    for field in ("model_input_spans", "loss_fn_input_spans"):
        assert repr(getattr(ours, field)) == repr(getattr(theirs, field))


@pytest.mark.parametrize("data", OFFICIAL_DATA.values(), ids=OFFICIAL_DATA)
def test_request_of_the_official_sdk_is_read(data):
    request = decode_training_request(official_bytes(data, "ppo", {"clip_low_threshold": 0.8}), PROTOBUF)
    assert (request.model_id, request.seq_id, request.loss_fn) == ("s:train:0", 1, "ppo")
    assert request.loss_fn_config == {"clip_low_threshold": 0.8}
    assert not request.forward_only
    assert len(request.data) == len(data)
    for ours, theirs in zip(request.data, data, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("data", OFFICIAL_DATA.values(), ids=OFFICIAL_DATA)
def test_request_is_written_as_the_official_sdk_does(data):
    body = official_bytes(data, "custom", {"loss_id": "l", "beta": 0.5})
    ours, theirs = official_pb.ForwardBackwardRequest(), official_pb.ForwardBackwardRequest()
    ours.ParseFromString(encode_training_request(decode_training_request(body, PROTOBUF)))
    theirs.ParseFromString(body)
    for datum in ours.data:
        if "reward" in datum.loss_fn_inputs:  # one value without a shape is read as a row of one
            del datum.loss_fn_inputs["reward"].shape[:]
    assert ours == theirs


def test_config_of_old_releases_is_read():
    message = official_pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn_config={"beta": 0.5})
    assert decode_training_request(message.SerializeToString(), PROTOBUF).loss_fn_config == {"beta": 0.5}
    message.loss_fn_config_v2["loss_id"].text = "l"
    assert decode_training_request(message.SerializeToString(), PROTOBUF).loss_fn_config == {"loss_id": "l"}


@pytest.mark.parametrize("forward_only", [True, False])
def test_forward_is_told_by_message_or_endpoint(forward_only):
    message = official_pb.ForwardBackwardRequest(model_id="m", seq_id=1, forward_only=forward_only)
    body = message.SerializeToString()
    assert decode_training_request(body, PROTOBUF).forward_only is forward_only
    assert decode_training_request(body, PROTOBUF + "; charset=x", forward_only=True).forward_only


def test_narrow_types_are_widened():
    message = official_pb.ForwardBackwardRequest(model_id="m", seq_id=1)
    inputs = message.data.add().loss_fn_inputs
    inputs["a"].dtype, inputs["a"].dense = official_pb.DTYPE_INT32, np.array([-1, 2], "<i4").tobytes()
    inputs["b"].dtype, inputs["b"].dense = official_pb.DTYPE_BFLOAT16, np.array([0x3FC0, 0xC000], "<u2").tobytes()
    tensors = decode_training_request(message.SerializeToString(), PROTOBUF).data[0].loss_fn_inputs
    assert (tensors["a"].dtype, tensors["a"].data) == ("int64", [-1, 2])
    assert (tensors["b"].dtype, tensors["b"].data) == ("float32", [1.5, -2.0])


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────────

OLD_BODY: dict[str, Any] = {
    "forward_backward_input": {
        "data": [
            {
                "loss_fn_inputs": {
                    "target_tokens": {"data": [1, 2, 3], "dtype": "int64", "shape": [3]},
                    "weights": {"data": [1.0, 1, 0.5], "dtype": "float32", "shape": [3]},
                },
                "model_input": {"chunks": [{"tokens": [1, 2, 3]}]},
            }
        ],
        "loss_fn": "cross_entropy",
        "loss_fn_config": None,
    },
    "model_id": "sess-22:train:0",
    "seq_id": 2,
}


def test_json_of_old_releases_is_read():
    request = decode_training_request(json.dumps(OLD_BODY).encode(), "application/json; charset=utf-8")
    (datum,) = request.data
    assert (request.model_id, request.seq_id, request.loss_fn) == ("sess-22:train:0", 2, "cross_entropy")
    assert request.loss_fn_config == {}
    assert datum.model_input.to_ints() == [1, 2, 3]
    assert datum.loss_fn_inputs["weights"].data == [1.0, 1.0, 0.5]


def test_forward_in_json_is_read():
    body = {"model_id": "m", "seq_id": 1, "forward_input": OLD_BODY["forward_backward_input"]}
    assert decode_training_request(json.dumps(body).encode(), JSON, forward_only=True).forward_only
    with pytest.raises(InvalidTrainingRequest, match="'forward_input' is not known"):
        decode_training_request(json.dumps(body).encode(), JSON)


@pytest.mark.parametrize("name", ["dense", "two-dimensional", "sparse"])
def test_json_of_later_releases_is_read(name):
    (datum,) = OFFICIAL_DATA[name]
    inputs = {}
    for key, tensor in datum.loss_fn_inputs.items():
        names = ("data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices")
        inputs[key] = {field: getattr(tensor, field) for field in names}
    chunks = datum.model_input.model_dump(mode="json")["chunks"]
    data = [{"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}]
    body = {"forward_backward_input": {"data": data, "loss_fn": "ppo", "loss_fn_config": {"clip": 1}}}
    request = decode_training_request(json.dumps(body | {"model_id": "m", "seq_id": 1}).encode(), JSON)
    assert_same(request.data[0], datum)
    assert request.loss_fn_config == {"clip": 1.0}


def with_datum(**changes) -> dict:
    datum = OLD_BODY["forward_backward_input"]["data"][0] | changes
    return with_input(data=[OLD_BODY["forward_backward_input"]["data"][0], datum])


def with_input(**changes) -> dict:
    return OLD_BODY | {"forward_backward_input": OLD_BODY["forward_backward_input"] | changes}


WRONG_JSON = {
    "an unknown field": (OLD_BODY | {"priority": 1}, "'priority' is not known"),
    "no input": ({"model_id": "m", "seq_id": 2}, "forward_backward_input is missing"),
    "data as object": (with_input(data={}), "data is missing or no list"),
    "no loss": (with_input(loss_fn=None), "loss_fn is missing"),
    "config as list": (with_input(loss_fn_config=[]), "loss_fn_config is missing or no object"),
    "config of booleans": (with_input(loss_fn_config={"a": True}), r"loss_fn_config\['a'\] is True"),
    "config beyond floats": (with_input(loss_fn_config={"a": 10**400}), r"loss_fn_config\['a'\] is 1000"),
    "a datum as list": (with_input(data=[[]]), r"data\[0\] is missing or no object"),
    "no model input": (with_datum(model_input=None), r"data\[1\]\.model_input: "),
    "a wrong token": (
        with_datum(model_input={"chunks": [{"tokens": [1, "x"]}]}),
        r"data\[1\]\.model_input\.chunks\[0\]\.encoded_text\.tokens\[1\]: .*\(got 'x'\)",
    ),
    "a wrong tensor": (
        with_datum(loss_fn_inputs={"advantages": {"data": [1, 2], "dtype": "float32", "shape": [3]}}),
        r"data\[1\]\.loss_fn_inputs\['advantages'\]: shape \[3\] takes 3 values, but there are 2",
    ),
    "spans in JSON": (with_datum(model_input_spans=[]), r"'data\[1\]\.model_input_spans' is not known"),
}


@pytest.mark.parametrize(("body", "message"), WRONG_JSON.values(), ids=WRONG_JSON)
def test_wrong_json_is_refused(body, message):
    with pytest.raises(InvalidTrainingRequest, match=message) as raised:
        decode_training_request(json.dumps(body).encode(), JSON)
    assert raised.value.seq_id == 2


UNREADABLE = {
    "nothing": (b"", JSON, "not JSON"),
    "half a body": (b'{"model_id": "m"', JSON, "not JSON"),
    "nan": (b'{"model_id": NaN}', JSON, "not JSON"),
    "no utf-8": (b'{"model_id": "\xff"}', JSON, "not JSON"),
    "a list": (b"[]", JSON, "no object"),
    "very deep": (b'{"a":' * 200_000, JSON, "nested too deeply"),
    "a number out of range": (b'{"model_id": 1e999}', JSON, "not JSON"),
    "no protobuf": (b"\xff\xff\xff", PROTOBUF, "not a ForwardBackwardRequest"),
    "text that is no utf-8": (b"\x0a\x01\xff", PROTOBUF, "not a ForwardBackwardRequest"),
    "a length past the end": (b"\x0a\xff\xff\xff\xff\x07m", PROTOBUF, "not a ForwardBackwardRequest"),
    "an empty message": (b"", PROTOBUF, "model_id is ''"),
    "another type": (b"", "text/plain", "'text/plain' is neither"),
}


@pytest.mark.parametrize(("body", "content_type", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_body_is_refused_without_an_address(body, content_type, message):
    with pytest.raises(InvalidTrainingRequest, match=message) as raised:
        decode_training_request(body, content_type)
    assert raised.value.model_id is None
    assert raised.value.seq_id is None
    assert isinstance(raised.value, InvalidInput)


@pytest.mark.parametrize("seq_id", [0, -1, None, "1", 1.0, True, 2**63], ids=repr)
def test_wrong_seq_id_is_refused_with_the_model(seq_id):
    with pytest.raises(InvalidTrainingRequest, match="seq_id is") as raised:
        decode_training_request(json.dumps(OLD_BODY | {"seq_id": seq_id}).encode(), JSON)
    assert (raised.value.model_id, raised.value.seq_id) == ("sess-22:train:0", None)


# ── hostile protobuf ──────────────────────────────────────────────────────────────────────────────────


def hostile(change) -> bytes:
    message = official_pb.ForwardBackwardRequest(model_id="m", seq_id=4, loss_fn="cross_entropy")
    for _ in range(4):
        message.data.add().model_input.add().encoded_text.tokens = bytes(8)
    change(message, message.data[3])
    return message.SerializeToString()


def tensor(dtype=1, dense=bytes(8), shape=(), name="advantages"):
    def change(_, datum) -> None:
        datum.loss_fn_inputs[name].dtype = dtype
        datum.loss_fn_inputs[name].dense = dense
        datum.loss_fn_inputs[name].shape.extend(shape)

    return change


def sparse(values=(1.0,), crow=(0, 1), columns=(0,), shape=(1, 1)):
    def change(_, datum) -> None:
        message = datum.loss_fn_inputs["weights"]
        message.dtype = 1
        message.sparse_csr.values = np.array(values, "<f4").tobytes()
        message.sparse_csr.crow_indices = crow if isinstance(crow, bytes) else np.array(crow, "<i8").tobytes()
        message.sparse_csr.col_indices = np.array(columns, "<i8").tobytes()
        message.shape.extend(shape)

    return change


def chunk(**fields):
    def change(_, datum) -> None:
        datum.model_input.add(**fields)

    return change


def config(value):
    def change(message, _) -> None:
        message.loss_fn_config_v2["beta"].CopyFrom(value)

    return change


WEIGHTS = r"data\[3\]\.loss_fn_inputs\['weights'\]: .*"
ADVANTAGES = r"data\[3\]\.loss_fn_inputs\['advantages'\]: .*"
CHUNK = r"data\[3\]\.model_input\[1\]"
HOSTILE = {
    "half a number": (tensor(dense=bytes(7)), ADVANTAGES + "data has 7 bytes, which is no multiple of 4"),
    "half an integer": (tensor(dtype=2, dense=bytes(12)), ADVANTAGES + "data has 12 bytes"),
    "no dtype": (tensor(dtype=0), ADVANTAGES + "dtype 0 is not one of"),
    "another dtype": (tensor(dtype=9), ADVANTAGES + "dtype 9 is not one of"),
    "too few values": (tensor(shape=[3]), ADVANTAGES + r"shape \[3\] takes 3 values, but there are 2"),
    "a petabyte": (tensor(shape=[2**25, 2**25]), ADVANTAGES + "shape .* takes 1125899906842624 values"),
    "sizes that overflow": (tensor(shape=[2**62, 8]), ADVANTAGES + "shape .* values, but there are 2"),
    "a petabyte of nothing": (tensor(dense=b"", shape=[2**50]), ADVANTAGES + "but there are 0"),
    "a negative size": (tensor(shape=[-2]), ADVANTAGES + "negative size"),
    "two negative sizes": (tensor(shape=[-1, -2]), ADVANTAGES + "negative size"),
    "three dimensions": (tensor(shape=[1, 2, 1]), ADVANTAGES + "3 dimensions; at most 2"),
    "very many dimensions": (tensor(shape=[1] * 10_000), ADVANTAGES + "10000 dimensions"),
    "a name with a quote": (tensor(dense=b"1", name="a'b"), r"""loss_fn_inputs\["a'b"\]"""),
    "a row too many": (sparse(crow=(0, 1, 1)), WEIGHTS + "sparse_crow_indices has 3 entries; 1 rows take 2"),
    "rows of a petabyte": (sparse(shape=(2**50, 1)), WEIGHTS + "sparse_crow_indices has 2 entries"),
    "no rows": (sparse(crow=(), shape=(0, 1)), WEIGHTS + "sparse_crow_indices has 0 entries"),
    "half a row pointer": (sparse(crow=bytes(15)), WEIGHTS + "crow_indices has 15 bytes"),
    "rows past the values": (sparse(crow=(0, 5)), WEIGHTS + "does not rise from 0 to 1"),
    "huge row pointers": (sparse(crow=(0, 2**63 - 1)), WEIGHTS + "does not rise from 0 to 1"),
    "a column outside": (sparse(columns=(1,)), WEIGHTS + "outside 0 to 0"),
    "a negative column": (sparse(columns=(-1,)), WEIGHTS + "outside 0 to 0"),
    "sparse in one dimension": (sparse(shape=(1,)), WEIGHTS + "two sizes"),
    "sparse of nothing": (sparse(shape=()), WEIGHTS + "two sizes"),
    "a cell twice": (sparse((1, 1), (0, 2), (0, 0)), WEIGHTS + "does not rise within a row"),
    "an empty chunk": (chunk(), CHUNK + " is empty; a chunk is one of encoded_text, image, dmel"),
    "half a token": (chunk(encoded_text={"tokens": bytes(5)}), CHUNK + ": tokens has 5 bytes"),
    "an image of another format": (chunk(image={"format": "gif"}), CHUNK + r"\.format: .*'png' or 'jpeg'"),
    "a negative count": (chunk(image={"format": "png", "expected_tokens": -5}), CHUNK + r"\.expected_tokens"),
    "other dimensions": (chunk(image={"format": "png", "override_dimensions": {"width": 1}}), "override_dimensions"),
    "nan in the config": (
        config(official_pb.LossConfigValue(number=math.nan)),
        r"loss_fn_config\['beta'\] is nan; finite numbers",
    ),
    "an empty value in the config": (config(official_pb.LossConfigValue()), r"loss_fn_config\['beta'\] has no value"),
    "infinity in the old config": (lambda m, _: m.loss_fn_config.update({"beta": math.inf}), r"\['beta'\] is inf"),
    "an empty span": (
        lambda _, datum: datum.model_input_spans.add(),
        r"data\[3\]\.model_input_spans\[0\] is empty; a span is one of prompt_tokens, sampled_tokens",
    ),
    "a span of nobody": (
        lambda _, datum: datum.loss_fn_input_spans.add(prompt_tokens={"length": 1}),
        r"data\[3\]\.loss_fn_input_spans\[0\]: PromptProvenanceSpan\.sequence_id is empty",
    ),
    "a negative span": (
        lambda _, datum: datum.model_input_spans.add(sampled_tokens={"sequence_id": "a", "length": -1}),
        r"data\[3\]\.model_input_spans\[0\]: SampledProvenanceSpan\.length is -1",
    ),
}


@pytest.mark.parametrize(("change", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_protobuf_is_refused_by_the_name_of_the_field(change, message):
    body = hostile(change)
    with pytest.raises(InvalidTrainingRequest, match=message) as raised:
        decode_training_request(body, PROTOBUF)
    assert (raised.value.model_id, raised.value.seq_id) == ("m", 4)
    assert len(str(raised.value)) < 400

    def decode() -> None:
        with suppress(InvalidTrainingRequest):
            decode_training_request(body, PROTOBUF)

    assert python_peak(decode) < 2**21


def test_spans_of_one_field_alone_are_an_empty_pair():
    span = {"sampled_tokens": {"sequence_id": "a", "length": 2}}
    request = decode_training_request(hostile(lambda _, datum: datum.model_input_spans.add(**span)), PROTOBUF)
    assert request.data[3].loss_fn_input_spans == []


def test_sparse_with_huge_columns_is_kept_sparse():
    request = decode_training_request(hostile(sparse(shape=(1, 2**60))), PROTOBUF)
    assert request.data[3].loss_fn_inputs["weights"].dense_shape == (1, 2**60)


@pytest.mark.parametrize(
    "body", [official_bytes(OFFICIAL_DATA["sparse"]), json.dumps(OLD_BODY).encode()], ids=["protobuf", "json"]
)
def test_spoiled_bodies_are_read_or_refused(body):
    """Bytes changed at random never raise anything but the error for wrong input."""
    chance = random.Random(0)
    outcomes = set()
    for _ in range(2000):
        spoiled = bytearray(body)
        for _ in range(chance.randint(1, 4)):
            spoiled[chance.randrange(len(spoiled))] = chance.randrange(256)
        try:
            decode_training_request(bytes(spoiled), JSON if body[:1] == b"{" else PROTOBUF)
            outcomes.add("read")
        except InvalidTrainingRequest:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_read_or_refused(body):
    for content_type in (PROTOBUF, JSON):
        try:
            decode_training_request(body, content_type)
        except InvalidTrainingRequest:
            continue


# ── round trips ───────────────────────────────────────────────────────────────────────────────────────

tokens = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)
chunks = st.one_of(
    tokens.map(lambda values: EncodedTextChunk(tokens=values)),
    st.builds(ImageChunk, data=st.binary(max_size=20), format=st.sampled_from(["png", "jpeg"])),
    st.builds(DmelChunk, dmel=st.binary(max_size=20)),
)
shapes = hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=6)
tensors = st.one_of(
    hnp.arrays(np.float32, shapes).map(TensorData.from_numpy),
    hnp.arrays(np.int64, shapes).map(TensorData.from_numpy),
    hnp.arrays(np.int64, shapes, elements=st.integers(0, 1)).map(TensorData.from_numpy_sparse),
)
datums = st.builds(
    Datum,
    st.lists(chunks, max_size=3).map(lambda values: ModelInput(chunks=values)),
    st.dictionaries(st.text(), tensors),
)
requests = st.builds(
    TrainingRequest,
    model_id=st.text(min_size=1),
    seq_id=st.integers(1, 2**31 - 1),
    data=st.lists(datums, max_size=3),
    loss_fn=st.text(),
    loss_fn_config=st.dictionaries(st.text(), st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.text())),
    forward_only=st.booleans(),
)


@settings(max_examples=50, deadline=None)
@given(requests)
def test_every_request_comes_back(request):
    found = decode_training_request(encode_training_request(request), PROTOBUF)
    assert (found.model_id, found.seq_id, found.loss_fn) == (request.model_id, request.seq_id, request.loss_fn)
    assert (found.loss_fn_config, found.forward_only) == (request.loss_fn_config, request.forward_only)
    for ours, theirs in zip(found.data, request.data, strict=True):
        assert ours.model_input == theirs.model_input
        assert ours.loss_fn_inputs.keys() == theirs.loss_fn_inputs.keys()
        for name, tensor in theirs.loss_fn_inputs.items():
            np.testing.assert_array_equal(ours.loss_fn_inputs[name].to_numpy(), tensor.to_numpy())
            assert ours.loss_fn_inputs[name].sparse_crow_indices == tensor.sparse_crow_indices


def test_pointers_cannot_be_trained_on():
    pointer = ModelInput(chunks=[ImageAssetPointerChunk(location="a", format="png")])
    with pytest.raises(InvalidInput, match="'image_asset_pointer' cannot be trained on"):
        encode_training_request(TrainingRequest("m", 1, [Datum(pointer)], "cross_entropy"))
