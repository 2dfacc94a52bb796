"""Results: what we encode is read by the official SDK's own decoders, and the other way round."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tinker.proto import tinker_public_pb2 as official_pb
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types._pydantic_types.tensor_data import TensorData as OfficialJsonTensor

from lorimer.errors import InvalidInput
from lorimer.types import (
    ForwardBackwardOutput,
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    TensorData,
    TopkLogprobs,
)
from lorimer.types.encoding import (
    decode_forward_backward_output,
    decode_sample_response,
    encode_forward_backward_output,
    encode_sample_response,
    forward_backward_output_to_json,
    sample_response_to_json,
)


def floats(*shape: int) -> TensorData:
    return TensorData.from_numpy(np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32))


OUTPUTS = {
    "of one length": [{"logprobs": floats(3)}, {"logprobs": floats(3)}],
    "ragged": [{"logprobs": floats(n)} for n in (5, 1, 0, 3)],
    "two-dimensional": [{"logprobs": floats(4, 2)}, {"logprobs": floats(1, 2)}],
    "ragged in K": [{"logprobs": floats(4, k)} for k in (2, 2, 3, 1, 1)],
    "one and two dimensions": [{"logprobs": floats(4)}, {"logprobs": floats(4, 2)}, {"logprobs": floats(2)}],
    "several names": [{"logprobs": floats(2), "ids": TensorData([n, n], "int64")} for n in range(3)],
    "a width of nothing": [{"logprobs": floats(0, 3)}, {"logprobs": floats(2, 3)}],
    "none": [],
}


@pytest.mark.parametrize("outputs", OUTPUTS.values(), ids=OUTPUTS)
def test_output_is_read_by_the_official_sdk(outputs):
    output = ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": 1.5, "tokens:sum": 3.0})
    data = encode_forward_backward_output(output)
    found: Any
    for found in (deserialize_forward_backward_output(data), decode_forward_backward_output(data)):
        assert found.loss_fn_output_type == "ArrayRecord"
        assert found.metrics == output.metrics
        assert len(found.loss_fn_outputs) == len(outputs)
        for ours, expected in zip(found.loss_fn_outputs, outputs, strict=True):
            assert ours.keys() == expected.keys()
            for name, tensor in expected.items():
                assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, list(tensor.dense_shape))
                np.testing.assert_array_equal(ours[name].to_numpy(), tensor.to_numpy())


def test_loss_is_the_summed_metric():
    assert ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 2.5}).loss == 2.5


def test_datums_that_are_alike_share_a_record():
    message = official_pb.ForwardBackwardOutput()
    message.ParseFromString(encode_forward_backward_output(ForwardBackwardOutput("A", OUTPUTS["ragged in K"])))
    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 1, 2]
    message.ParseFromString(encode_forward_backward_output(ForwardBackwardOutput("A", OUTPUTS["ragged"])))
    assert [record.num_datums for record in message.loss_fn_outputs] == [4]


def test_scalars_come_out_as_rows_of_one():
    data = encode_forward_backward_output(ForwardBackwardOutput("A", [{"x": TensorData(2.0, "float32")}]))
    assert decode_forward_backward_output(data).loss_fn_outputs[0]["x"].shape == [1]
    assert deserialize_forward_backward_output(data).loss_fn_outputs[0]["x"].shape == [1]


def test_sparse_tensors_are_sent_dense():
    sparse = TensorData.from_numpy_sparse(np.eye(8))
    (found,) = decode_forward_backward_output(
        encode_forward_backward_output(ForwardBackwardOutput("A", [{"x": sparse}]))
    ).loss_fn_outputs
    assert found["x"].tolist() == np.eye(8).tolist()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.one_of(
            hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=2, min_side=1, max_side=4)),
            hnp.arrays(np.int64, hnp.array_shapes(min_dims=1, max_dims=2, min_side=1, max_side=4)),
        ),
        max_size=6,
    )
)
def test_every_output_comes_back(arrays):
    data = encode_forward_backward_output(ForwardBackwardOutput("A", [{"x": TensorData.from_numpy(a)} for a in arrays]))
    for decode in (decode_forward_backward_output, deserialize_forward_backward_output):
        for found, array in zip(decode(data).loss_fn_outputs, arrays, strict=True):
            np.testing.assert_array_equal(found["x"].to_numpy(), array)


def batch(**changes) -> bytes:
    values = {"data": bytes(8), "offsets": np.array([0, 4, 8], "<i8").tobytes(), "dtype": 1} | changes
    message = official_pb.ForwardBackwardOutput()
    message.loss_fn_outputs.add(num_datums=2).fields["x"].CopyFrom(official_pb.BatchedTensor(**values))
    return message.SerializeToString()


def offsets(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


WRONG_OUTPUTS = {
    "no protobuf": (b"\xff", "not a ForwardBackwardOutput"),
    "no offsets": (batch(offsets=b""), "offsets do not rise"),
    "offsets past the data": (batch(offsets=offsets(0, 4, 12)), "offsets do not rise"),
    "negative offsets": (batch(offsets=offsets(-4, 4, 8)), "offsets do not rise"),
    "falling offsets": (batch(offsets=offsets(0, 8, 4)), "offsets do not rise"),
    "offsets within a number": (batch(offsets=offsets(0, 3, 8)), "no multiple of 4"),
    "another number of datums": (batch(offsets=offsets(0, 8)), "1 tensors for 2 datums"),
    "no dtype": (batch(dtype=0), "dtype 0"),
    "a width that does not divide": (batch(trailing_shape=[3]), "takes"),
    "a huge width": (batch(trailing_shape=[2**40, 2**40]), "takes"),
    "a negative width": (batch(trailing_shape=[-1]), "negative size"),
}


@pytest.mark.parametrize(("data", "message"), WRONG_OUTPUTS.values(), ids=WRONG_OUTPUTS)
def test_wrong_output_is_refused(data, message):
    with pytest.raises(InvalidInput, match=message):
        decode_forward_backward_output(data)


def test_narrow_types_are_widened():
    bf16 = batch(data=np.array([0x3FC0, 0xC000], "<u2").tobytes(), offsets=offsets(0, 2, 4), dtype=4)
    assert [d["x"].data for d in decode_forward_backward_output(bf16).loss_fn_outputs] == [[1.5], [-2.0]]
    assert decode_forward_backward_output(batch(dtype=3)).loss_fn_outputs[0]["x"].dtype == "int64"


def test_json_has_the_keys_that_old_releases_know():
    output = ForwardBackwardOutput("ArrayRecord", [{"logprobs": floats(2, 3)}], {"loss:sum": 1.0})
    values = json.loads(json.dumps(forward_backward_output_to_json(output)))
    assert values.keys() == {"loss_fn_output_type", "loss_fn_outputs", "metrics"}
    tensor = values["loss_fn_outputs"][0]["logprobs"]
    assert tensor.keys() == {"data", "dtype", "shape"}
    expected = output.loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_array_equal(OfficialJsonTensor.model_validate(tensor).to_numpy(), expected)


def test_json_of_infinite_logprobs_is_finite():
    output = ForwardBackwardOutput("A", [{"logprobs": TensorData([-math.inf, -1.0], "float32")}])
    values = json.dumps(forward_backward_output_to_json(output), allow_nan=False)
    assert "-3.4028234" in values


# ── samples ───────────────────────────────────────────────────────────────────────────────────────────


def topk(length: int, k: int) -> TopkLogprobs:
    chance = np.random.default_rng(length)
    logprobs = -chance.random((length, k)).astype(np.float32)
    ids = chance.integers(1, 100, (length, k)).astype(np.int32)
    ids[0], logprobs[0] = 0, -99999.0
    return TopkLogprobs(ids, logprobs)


FULL = SampleResponse(
    sequences=[
        SampledSequence("stop", "a", np.array([1, 2, 3], np.int32), np.array([-0.5, -1, -2], np.float32), topk(3, 2)),
        SampledSequence("length", "b", np.array([7], np.int64), np.array([-0.25]), topk(1, 2)),
    ],
    prompt_logprobs_np=np.array([np.nan, -0.5, -1.5], np.float32),
    topk_prompt_logprobs_np=topk(3, 4),
    target_prompt_logprobs=TensorData(np.array([[-1.0, 0.0], [-2.0, -3.0]]), "float32"),
    prompt_cache_hit_tokens=2,
    prompt_alt_tokens=PromptAltTokens(TensorData([[1], [2]], "int64"), TensorData([[-1.0], [-2.0]], "float32")),
)
PLAIN = SampleResponse([SampledSequence("stop", "a", np.empty(0, np.int32), np.empty(0, np.float32))])
SPARSE_TARGETS = SampleResponse([], target_prompt_logprobs=TensorData.from_numpy_sparse(-np.eye(9)))


@pytest.mark.parametrize("response", [FULL, PLAIN, SPARSE_TARGETS], ids=["everything", "no tokens", "sparse targets"])
def test_sample_is_read_by_the_official_sdk(response):
    data = encode_sample_response(response)
    ids = [sequence.sequence_id for sequence in response.sequences]
    ours, theirs = decode_sample_response(data, ids), deserialize_sample_response(data)
    assert [sequence.sequence_id for sequence in ours.sequences] == ids
    found: Any
    for found in (ours, theirs):
        for sequence, expected in zip(found.sequences, response.sequences, strict=True):
            assert sequence.stop_reason == expected.stop_reason
            assert sequence.tokens == expected.tokens
            assert (sequence.logprobs or []) == expected.logprobs
            assert sequence.topk_logprobs == expected.topk_logprobs
        assert found.prompt_logprobs == response.prompt_logprobs
        assert found.topk_prompt_logprobs == response.topk_prompt_logprobs
        assert found.prompt_cache_hit_tokens == response.prompt_cache_hit_tokens
        if response.target_prompt_logprobs is not None:
            assert found.target_prompt_logprobs.tolist() == response.target_prompt_logprobs.tolist()
            expected_rows = response.target_prompt_logprobs.sparse_crow_indices
            assert found.target_prompt_logprobs.sparse_crow_indices == expected_rows
        if response.prompt_alt_tokens is not None:
            assert found.prompt_alt_tokens.tokens.tolist() == response.prompt_alt_tokens.tokens.tolist()
            assert found.prompt_alt_tokens.logprobs.tolist() == response.prompt_alt_tokens.logprobs.tolist()


def test_lists_of_a_sample():
    assert FULL.prompt_logprobs == [None, -0.5, -1.5]
    assert FULL.sequences[0].tokens == [1, 2, 3]
    assert FULL.topk_prompt_logprobs[0] is None
    assert FULL.sequences[1].topk_logprobs == [None]
    empty = SampledSequence("stop", "a")
    assert (empty.tokens, empty.logprobs, empty.topk_logprobs) == ([], None, None)
    assert (PLAIN.prompt_logprobs, PLAIN.topk_prompt_logprobs) == (None, None)


def sample(**fields) -> bytes:
    return official_pb.SampleResponse(**fields).SerializeToString()


WRONG_SAMPLES = {
    "no protobuf": (b"\xff", "not a SampleResponse"),
    "another number of sequences": (sample(sequences=[{}, {}]), "2 sequences for 1 sequence ids"),
    "an unknown stop": (sample(sequences=[{"stop_reason": 7}]), "stop_reason 7"),
    "half a token": (sample(sequences=[{"tokens": bytes(3)}]), "tokens has 3 bytes"),
    "half a logprob": (sample(sequences=[{"logprobs": bytes(3)}]), "logprobs has 3 bytes"),
    "top-k of another size": (
        sample(sequences=[{}], topk_prompt_logprobs={"k": 2**31, "length": 2**31, "token_ids": bytes(8)}),
        "top-k arrays",
    ),
    "a target of a petabyte": (
        sample(sequences=[{}], target_prompt_logprobs={"dtype": 1, "shape": [2**30, 2**30]}),
        "but there are 0",
    ),
}


@pytest.mark.parametrize(("data", "message"), WRONG_SAMPLES.values(), ids=WRONG_SAMPLES)
def test_wrong_sample_is_refused(data, message):
    with pytest.raises(InvalidInput, match=message):
        decode_sample_response(data, ["a"])


def test_json_of_a_sample_is_that_of_old_releases():
    values = json.loads(json.dumps(sample_response_to_json(FULL), allow_nan=False))
    assert values["type"] == "sample"
    assert values["sequences"][0] == {"stop_reason": "stop", "tokens": [1, 2, 3], "logprobs": [-0.5, -1.0, -2.0]}
    assert values["prompt_logprobs"] == [None, -0.5, -1.5]
    assert values["topk_prompt_logprobs"][0] is None
    assert len(values["topk_prompt_logprobs"][1]) == 4
    assert values["prompt_cache_hit_tokens"] == 2
    assert "prompt_logprobs" not in sample_response_to_json(PLAIN)


def test_json_of_impossible_tokens_is_finite():
    response = SampleResponse(
        [SampledSequence("stop", "a", np.array([1]), np.array([-np.inf], np.float32))],
        np.array([np.nan, -np.inf], np.float32),
        TopkLogprobs(np.array([[1]]), np.array([[-np.inf]], np.float32)),
    )
    json.dumps(sample_response_to_json(response), allow_nan=False)
