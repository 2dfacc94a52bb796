"""What is accepted becomes arrays of known type and shape; everything else is refused by datum, field and value."""

import re
import subprocess
import sys
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from lorimer.engine.messages import (
    CsrArray,
    Datum,
    ForwardBackward,
    SampleRequest,
    SamplingParams,
    TrainBatch,
    decode_command,
    encode,
)
from lorimer.engine.training.losses import LOSSES
from lorimer.engine.validation import check_operation, check_sample
from lorimer.errors import InvalidInput, NotFound, Unsupported

VOCAB, CONTEXT = 100, 16
MARGIN = SimpleNamespace(inputs=(("logprobs", 1), ("advantages", 1), ("scale", 0)))
DISTIL = SimpleNamespace(inputs=(("logprobs", 2), ("teacher", 2), ("target_tokens", 2)))
CUSTOM = {"loss-margin": MARGIN, "loss-distil": DISTIL}


def label(value):
    return str(value)[:60]


def floats(*values):
    return np.array(values, np.float32)


def ints(*values):
    return np.array(values, np.int64)


def datum(num_tokens=3, sparse=None, tokens=None, **inputs):
    base = {"target_tokens": np.arange(num_tokens)} if "target_tokens" not in (sparse or {}) else {}
    inputs = {name: value for name, value in {**base, **inputs}.items() if value is not None}
    return Datum(
        tokens=np.arange(num_tokens) if tokens is None else tokens, loss_fn_inputs=inputs, sparse_inputs=sparse or {}
    )


def rl_datum(num_tokens=3, **inputs):
    inputs = {"logprobs": np.full(num_tokens, -1.0), "advantages": np.ones(num_tokens), **inputs}
    return datum(num_tokens, **inputs)


def check(*data, loss_fn="cross_entropy", forward_only=False, **config):
    operation = ForwardBackward(
        request_id="r", model_id="m", data=list(data), loss_fn=loss_fn, loss_fn_config=config, forward_only=forward_only
    )
    return check_operation(operation, vocab_size=VOCAB, max_context=CONTEXT, custom_losses=CUSTOM)


def refused(message, *data, error=InvalidInput, **options):
    with pytest.raises(error, match=re.escape(message)):
        check(*data, **options)


# ── accepted ──────────────────────────────────────────────────────────────────────────────────────────


def test_missing_weights_are_ones():
    checked = check(datum(), datum(2, weights=ints(0, 2)), forward_only=True)
    assert (checked.request_id, checked.model_id, checked.loss_fn, checked.loss_id) == ("r", "m", "cross_entropy", None)
    assert checked.forward_only and checked.config == {}
    assert [d.inputs["weights"].tolist() for d in checked.data] == [[1, 1, 1], [0, 2]]
    assert all(d.inputs["weights"].dtype == np.float32 for d in checked.data)


def test_arrays_from_the_wire_become_writable_and_of_the_right_type():
    inputs = {"weights": np.array([1.0, -0.5], np.float64), "target_tokens": np.array([1, 99], np.int32)}
    sent = ForwardBackward(
        request_id="r",
        model_id="m",
        data=[datum(2, tokens=np.array([1, 2], np.int32), **inputs)],
        loss_fn="cross_entropy",
    )
    batch = decode_command(encode(TrainBatch(operations=[sent])))
    assert isinstance(batch, TrainBatch)
    (operation,) = batch.operations
    (checked,) = check_operation(operation, vocab_size=VOCAB, max_context=CONTEXT, custom_losses={}).data
    arrays = [checked.tokens, checked.targets, checked.inputs["weights"]]
    assert [array.dtype for array in arrays] == [np.int64, np.int64, np.float32]
    assert all(array.flags.writeable and array.flags.aligned and array.flags.c_contiguous for array in arrays)
    assert [array.tolist() for array in arrays] == [[1, 2], [1, 99], [1.0, -0.5]]


def test_several_targets_with_any_finite_weights():
    weights = floats(-1.5, 0, 2, 1e-40).reshape(2, 2)
    checked = check(datum(2, target_tokens=ints(1, 2, 3, 4).reshape(2, 2), weights=weights))
    assert checked.data[0].targets.shape == (2, 2)
    assert (checked.data[0].inputs["weights"] == weights).all()


@pytest.mark.parametrize("loss_fn", [name for name in LOSSES if name != "cross_entropy"])
def test_reinforcement_losses_get_their_inputs_and_config(loss_fn):
    extra = {"sequence_ratio_mask": np.array([True, False, True])} if loss_fn == "gspo" else {}
    checked = check(rl_datum(**extra), loss_fn=loss_fn)
    assert checked.config == LOSSES[loss_fn].config
    assert set(checked.data[0].inputs) == {"logprobs", "advantages", *extra}
    assert all(array.dtype == np.float32 and array.shape == (3,) for array in checked.data[0].inputs.values())


def test_config_is_merged_with_the_defaults():
    assert check(rl_datum(), loss_fn="ppo", clip_high_threshold=2).config == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 2.0,
    }
    assert check(rl_datum(), loss_fn="dro", beta=0.0).config == {"beta": 0.0}


def test_clip_bounds_of_one_datum_are_filled_in_for_the_others():
    checked = check(rl_datum(2, clip_high_threshold=floats(1.5, 9)), rl_datum(1), loss_fn="ppo", clip_high_threshold=3)
    assert [d.inputs["clip_high_threshold"].tolist() for d in checked.data] == [[1.5, 9], [3]]
    assert all("clip_low_threshold" not in d.inputs for d in checked.data)


def test_sparse_targets_and_weights_become_dense():
    def sparse(values):
        return CsrArray(values=values, crow_indices=ints(0, 2, 2, 3), col_indices=ints(2, 0, 1), shape=(3, 3))

    checked = check(datum(sparse={"target_tokens": sparse(ints(7, 8, 9)), "weights": sparse(floats(1, -2, 3))}))
    assert checked.data[0].targets.tolist() == [[8, 0, 7], [0, 0, 0], [0, 9, 0]]
    assert checked.data[0].inputs["weights"].tolist() == [[-2, 0, 1], [0, 0, 0], [0, 3, 0]]


def test_custom_losses_get_what_they_name():
    extra = {"advantages": floats(1, 2, 3), "scale": floats(4), "weights": floats(1), "mask": ints(1, 0)}
    checked = check(datum(**extra), loss_fn="custom", loss_id="loss-margin")
    assert (checked.loss_id, checked.config) == ("loss-margin", {})
    assert {name: array.tolist() for name, array in checked.data[0].inputs.items()} == {
        "advantages": [1, 2, 3],
        "scale": 4,
    }
    targets = ints(1, 2, 3, 4).reshape(2, 2)
    checked = check(datum(2, target_tokens=targets, teacher=targets), loss_fn="custom", loss_id="loss-distil")
    assert [array.dtype for array in checked.data[0].inputs.values()] == [np.int64, np.int64]


# ── refused: structure ────────────────────────────────────────────────────────────────────────────────


def test_losses_and_ids_that_do_not_exist():
    refused("loss_fn 'dpo' is not known; accepted are cross_entropy", datum(), loss_fn="dpo")
    refused("'stable_reinforce' is not available", datum(), loss_fn="stable_reinforce", error=Unsupported)
    refused("loss_fn_config['loss_id'] is None", datum(), loss_fn="custom")
    refused("loss_fn_config['loss_id'] is 3.0", datum(), loss_fn="custom", loss_id=3.0)
    refused("'loss-x' names no loss", datum(), loss_fn="custom", loss_id="loss-x", error=NotFound)
    refused("'custom' has 'beta'; accepted: loss_id", datum(), loss_fn="custom", loss_id="loss-margin", beta=1)


def test_empty_data():
    refused("data is empty")


@pytest.mark.parametrize(
    "loss_fn, config, message",
    [
        ("cross_entropy", {"beta": 1.0}, "loss_fn_config of loss_fn 'cross_entropy' has 'beta'; accepted: none"),
        ("ppo", {"clip": 1.0}, "has 'clip'; accepted: clip_low_threshold, clip_high_threshold"),
        ("ppo", {"loss_id": "x"}, "has 'loss_id'; accepted: clip"),
        ("ppo", {"clip_low_threshold": "0.8"}, "loss_fn_config['clip_low_threshold'] is '0.8'; finite numbers"),
        ("ppo", {"clip_low_threshold": float("nan")}, "loss_fn_config['clip_low_threshold'] is nan; finite numbers"),
        ("ppo", {"clip_high_threshold": float("inf")}, "loss_fn_config['clip_high_threshold'] is inf"),
        ("ppo", {"clip_low_threshold": 1.3}, "clip_low_threshold 1.3 above clip_high_threshold 1.2"),
        ("dro", {"beta": -0.1}, "loss_fn_config['beta'] is -0.1; numbers from 0 are accepted"),
    ],
)
def test_config(loss_fn, config, message):
    refused(message, datum() if loss_fn == "cross_entropy" else rl_datum(), loss_fn=loss_fn, **config)


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"advantages": None}, "['advantages'] is missing; loss_fn 'ppo' takes target_tokens, logprobs, advantages"),
        ({"target_tokens": None}, "['target_tokens'] is missing"),
        ({"mask": ints(1, 1, 1)}, "has 'mask'; accepted: target_tokens, logprobs, advantages, clip_low_threshold"),
        ({"mask": ints(1, 1, 1)}, "multiply the mask into the weights or advantages"),
        ({"weights": ints(1, 1, 1)}, "has 'weights'; accepted:"),
        ({"target_tokens": ints(1, 2, 3).reshape(3, 1)}, "loss_fn 'ppo' takes one target for each token"),
        ({"advantages": floats(1, 2)}, "['advantages'] has shape (2,); (3,), that of the targets, is accepted"),
        ({"advantages": np.ones((3, 1))}, "['advantages'] has shape (3, 1); (3,)"),
        ({"advantages": np.array(1.0)}, "['advantages'] has shape (); (3,)"),
        ({"advantages": np.array(["a", "b", "c"])}, "['advantages'] holds <U1 values; numbers are accepted"),
        ({"clip_low_threshold": floats(0, 2, 0)}, "['clip_low_threshold'][1] is 2.0; bounds of the ratio with"),
        ({"clip_high_threshold": floats(2, 2, 0.5)}, "['clip_high_threshold'][2] is 0.5; bounds of the ratio with"),
    ],
)
def test_inputs_of_reinforcement_losses(inputs, message):
    refused(
        f"data[1].loss_fn_inputs{message}" if message[0] == "[" else message,
        rl_datum(),
        rl_datum(**inputs),
        loss_fn="ppo",
    )


def test_inputs_of_gspo_and_of_custom_losses():
    refused("['sequence_ratio_mask'] is missing", rl_datum(), loss_fn="gspo")
    refused("mask'][2] is 0.5; 0 and 1", rl_datum(sequence_ratio_mask=floats(0, 1, 0.5)), loss_fn="gspo")
    custom = {"loss_fn": "custom", "loss_id": "loss-margin"}
    refused(
        "['scale'] is missing; custom loss 'loss-margin' takes target_tokens, adv",
        datum(advantages=floats(1)),
        **custom,
    )
    refused("['scale'] has shape (2,); custom", datum(advantages=floats(1), scale=floats(1, 2)), **custom)
    refused("['advantages'] has shape (1, 1);", datum(advantages=np.ones((1, 1)), scale=floats(1)), **custom)
    refused("['target_tokens'] has shape (3, 1);", datum(target_tokens=ints(1, 2, 3).reshape(3, 1)), **custom)


# ── refused: values ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300], ids=str)
@pytest.mark.parametrize("name", ["logprobs", "advantages"])
def test_non_finite_numbers_are_named(name, value):
    bad = np.zeros(18)
    bad[17] = value
    good = [rl_datum() for _ in range(3)]
    with pytest.raises(
        InvalidInput, match=rf"data\[3\]\.loss_fn_inputs\['{name}'\]\[17\] is .*; finite numbers are acc"
    ):
        check_operation(
            ForwardBackward(request_id="r", model_id="m", data=[*good, rl_datum(18, **{name: bad})], loss_fn="ppo"),
            vocab_size=VOCAB,
            max_context=32,
            custom_losses={},
        )


def test_non_finite_weight_of_several_targets_is_named_by_row_and_column():
    weights = np.zeros((2, 3))
    weights[1, 2] = np.nan
    refused("['weights'][1, 2] is nan", datum(2, target_tokens=np.zeros((2, 3), np.int64), weights=weights))


@pytest.mark.parametrize("value", [-1, VOCAB, 2**31, 2**63 - 1, -(2**63)])
def test_token_ids_out_of_range(value):
    accepted = "token ids 0 to 99, the vocabulary, are accepted"
    refused(f"data[0].model_input.tokens[1] is {value}; {accepted}", datum(tokens=ints(1, value, 3)))
    refused(
        f"data[0].loss_fn_inputs['target_tokens'][2] is {value}; {accepted}", datum(target_tokens=ints(1, 1, value))
    )


def test_the_ignored_index_of_torch_is_refused_with_the_remedy():
    message = (
        "is -100; token ids 0 to 99, the vocabulary, are accepted; to ignore a position give it weight or advantage 0"
    )
    refused(message, datum(target_tokens=ints(-100, 1, 1)))


@pytest.mark.parametrize("values", [floats(1, 2, 3), np.ones(3, bool), np.array(["1", "2", "3"])], ids=["f", "b", "s"])
def test_token_ids_of_another_type(values):
    refused("model_input.tokens holds", datum(tokens=values))
    refused("['target_tokens'] holds", datum(target_tokens=values))


@pytest.mark.parametrize(
    "tokens, message",
    [
        (ints(), "has shape (0,)"),
        (ints(1, 2).reshape(1, 2), "has shape (1, 2)"),
        (np.array(3), "has shape ()"),
        (np.zeros(17, np.int64), "has 17 tokens; at most 16, the context length"),
    ],
)
def test_shapes_of_tokens(tokens, message):
    refused(f"data[0].model_input.tokens {message}", datum(tokens=tokens))


@pytest.mark.parametrize("shape", [(2,), (4,), (3, 0), (2, 3), (3, 1, 1), ()], ids=str)
def test_shapes_of_targets(shape):
    refused(f"has shape {shape}; (3,) or (3, K)", datum(target_tokens=np.zeros(shape, np.int64)))


@pytest.mark.parametrize("shape", [(2,), (3, 1), (3, 3)], ids=str)
def test_weights_have_the_shape_of_the_targets(shape):
    refused(f"['weights'] has shape {shape}; (3,), that of", datum(weights=np.ones(shape)))
    refused(
        f"['weights'] has shape {shape}; (3, 2),", datum(target_tokens=np.zeros((3, 2), int), weights=np.ones(shape))
    )


# ── refused: sparse arrays ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "change, message",
    [
        ({"crow_indices": ints(0, 2, 3)}, "3 rows of 3 values"),
        ({"crow_indices": ints(1, 2, 2, 3)}, "rise from 0 to 3"),
        ({"crow_indices": ints(0, 2, 1, 3)}, "rise from 0 to 3"),
        ({"crow_indices": ints(0, 2, 2, 4)}, "rise from 0 to 3"),
        ({"crow_indices": ints(0, 2**63 - 1, -(2**63), 3)}, "rise from 0 to 3"),
        ({"crow_indices": floats(0, 2, 2, 3)}, "crow_indices is float32"),
        ({"crow_indices": ints(0, 2, 2, 3).reshape(2, 2)}, "of shape (2, 2)"),
        ({"col_indices": ints(2, 0, 3)}, "col_indices[2] is 3; columns 0 to 2"),
        ({"col_indices": ints(-1, 0, 1)}, "col_indices[0] is -1"),
        ({"col_indices": ints(1, 1, 1)}, "name a cell twice"),
        ({"col_indices": ints(2, 0)}, "has (3,) values for (2,) col_indices"),
        ({"values": ints(1, 2)}, "has (2,) values for (3,) col_indices"),
        ({"values": ints(7, 8, VOCAB)}, "['target_tokens'][2, 1] is 100; token ids"),
        ({"values": floats(7, 8, 9)}, "holds float32 values; token ids are integers"),
        ({"shape": (4, 3)}, "has shape (4, 3); 3 rows of at most 100 cells"),
        ({"shape": (3, 101)}, "has shape (3, 101); 3 rows of at most 100 cells"),
        ({"shape": (-3, 3)}, "has shape (-3, 3); sizes from 0"),
        ({"shape": (3, 0)}, "col_indices[0] is 2"),
    ],
)
def test_sparse_arrays(change, message):
    fields = {"values": ints(7, 8, 9), "crow_indices": ints(0, 2, 2, 3), "col_indices": ints(2, 0, 1), "shape": (3, 3)}
    refused(message, datum(sparse={"target_tokens": CsrArray(**{**fields, **change})}))


def test_an_input_given_twice_or_sparse_where_it_is_a_row():
    sparse = CsrArray(values=floats(1), crow_indices=ints(0, 1, 1, 1), col_indices=ints(0), shape=(3, 1))
    refused("both dense and sparse", datum(weights=np.ones(3), sparse={"weights": sparse}))
    refused("has shape (3, 1); (3,)", rl_datum(sparse={"advantages": sparse}, advantages=None), loss_fn="ppo")


@pytest.mark.parametrize("shape", [(2**62, 2**62), (3, 2**40), (2**62, 0), (0, 2**62)], ids=str)
def test_nothing_is_allocated_by_a_declared_shape(shape):
    sparse = CsrArray(values=floats(1), crow_indices=ints(0, 1, 1, 1), col_indices=ints(0), shape=shape)
    tracemalloc.start()
    started = time.perf_counter()
    refused("has shape", datum(sparse={"weights": sparse}))
    teacher = datum(3, target_tokens=np.zeros((3, 1), int), sparse={"teacher": sparse})
    with pytest.raises(InvalidInput):
        check(teacher, loss_fn="custom", loss_id="loss-distil")
    assert time.perf_counter() - started < 5
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_sparse_arrays_of_many_datums_have_one_limit():
    wide = CsrArray(values=floats(), crow_indices=ints(0, 0, 0, 0), col_indices=ints(), shape=(3, 2**20))
    data = [datum(3, target_tokens=np.zeros((3, 1), int), sparse={"teacher": wide}) for _ in range(30)]
    refused("data[21].loss_fn_inputs['teacher']", *data, loss_fn="custom", loss_id="loss-distil")


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────────


def sample(prompt=(1, 2, 3, 4), **fields):
    params = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__}
    prompt = prompt if isinstance(prompt, np.ndarray) else ints(*prompt)
    request = SampleRequest(request_id="r", prompt=prompt, params=SamplingParams(**params), **fields)
    check_sample(request, vocab_size=VOCAB, max_context=CONTEXT)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": range(15)},
        {"max_tokens": 12},
        {"num_samples": 4096},
        {"temperature": 0.0, "top_k": 0, "top_p": 1e-9},
        {"top_k": 10**9},
        {"stop": []},
        {"stop": "\n"},
        {"stop": ["a", "b"]},
        {"stop": [0, 99]},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"topk_prompt_logprobs": 100, "topk_sample_logprobs": 100, "prompt_alt_tokens_k": 100},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 3},
        {"target_prompt_logprobs": np.full((3, 2), -1)},
        {"prompt": [1], "target_prompt_logprobs": np.zeros((0, 2), np.int64)},
    ],
    ids=label,
)
def test_samples_that_are_accepted(fields):
    sample(**fields)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"prompt": []}, "prompt has shape (0,)"),
        ({"prompt": [1, 100]}, "prompt[1] is 100; token ids 0 to 99"),
        ({"prompt": floats(1, 2)}, "prompt holds float32"),
        ({"prompt": range(17)}, "prompt has 17 tokens; at most 16"),
        ({"prompt": range(16)}, "the prompt of 16 tokens and at least 1 new token exceed the context length 16"),
        ({"max_tokens": 13}, "the prompt of 4 tokens and max_tokens 13 exceed the context length 16"),
        ({"max_tokens": 2**31}, "max_tokens 2147483648 exceed"),
        ({"max_tokens": 0}, "max_tokens is 0; numbers from 1"),
        ({"num_samples": 0}, "num_samples is 0; 1 to 4096"),
        ({"num_samples": 10**6}, "num_samples is 1000000"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 1e39}, "temperature is 1e+39"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"stop": [True]}, "a list of one kind is accepted"),
        ({"stop": ["a", 1]}, "stop mixes strings and token ids"),
        ({"stop": ""}, "stop[0] has 0 characters"),
        ({"stop": ["a", ""]}, "stop[1] has 0 characters"),
        ({"stop": "a" * 5000}, "stop[0] has 5000 characters"),
        ({"stop": ["a" * 4096] * 17}, "stop holds 69632 characters; at most 65536 are accepted"),
        ({"stop": ["a"] * 10_000}, "stop holds 10000 strings"),
        ({"stop": [1, 100]}, "stop[1] is 100; 0 to 99"),
        ({"stop": [-1]}, "stop[0] is -1"),
        ({"topk_prompt_logprobs": 101}, "topk_prompt_logprobs is 101; 0 to 100"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs is -1"),
        ({"prompt_alt_tokens_k": 101}, "prompt_alt_tokens_k is 101"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n is accepted only with prompt_logprobs"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, "prompt_logprobs_last_n is 0; 1 to 3"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 4}, "prompt_logprobs_last_n is 4; 1 to 3"),
        ({"target_prompt_logprobs": np.zeros((4, 2), int)}, "has shape (4, 2); (3, K)"),
        ({"target_prompt_logprobs": np.zeros(3, int)}, "has shape (3,); (3, K)"),
        ({"target_prompt_logprobs": np.full((3, 2), -2)}, "[0, 0] is -2; token ids 0 to 99, the vocabulary, are acc"),
        ({"target_prompt_logprobs": np.full((3, 2), 1.0)}, "holds float64 values"),
    ],
    ids=label,
)
def test_samples_that_are_refused(fields, message):
    with pytest.raises(InvalidInput, match=re.escape(message)):
        sample(**fields)


def test_validation_loads_without_torch():
    program = "import sys, lorimer.engine.validation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
