"""Training examples: what loss inputs may be given as, and provenance."""

from typing import Any

import numpy as np
import pytest
import tinker
import torch

from lorimer.types import Datum, ModelInput, PromptProvenanceSpan, SampledProvenanceSpan, TensorData

INPUT = ModelInput.from_ints([1, 2, 3])
OFFICIAL_INPUT = tinker.ModelInput.from_ints([1, 2, 3])

GIVEN: dict[str, Any] = {
    "list of integers": ("target_tokens", [1, 2, 3]),
    "list for weights": ("weights", [1, 0, 1]),
    "list of fractions": ("advantages", [0.5, -1.0, 2.5]),
    "nested list": ("target_tokens", [[1, 2], [3, 4], [5, 6]]),
    "empty list": ("logprobs", []),
    "clip thresholds": ("clip_low_threshold", [0.5, 0.5, 0.5]),
    "mask": ("sequence_ratio_mask", [1, 1, 0]),
    "float64 array": ("weights", np.array([0.1, 0.2, 0.3])),
    "int32 array": ("target_tokens", np.array([1, 2, 3], np.int32)),
    "any name": ("rewards", np.array([1.0])),
    "torch": ("logprobs", torch.tensor([0.5, 0.25, 1.0], dtype=torch.bfloat16)),
    "sparse torch": ("target_tokens", torch.eye(8, dtype=torch.int64)),
    "dense torch": ("weights", torch.ones(3, 4)),
    "2-D torch of another name": ("rewards", torch.eye(8)),
}


@pytest.mark.parametrize(("name", "value"), GIVEN.values(), ids=GIVEN)
def test_loss_inputs_are_read_as_officially(name, value):
    ours = Datum(INPUT, {name: value}).loss_fn_inputs[name]
    official = tinker.Datum(OFFICIAL_INPUT, {name: value}).loss_fn_inputs[name]
    assert (ours.dtype, ours.shape, ours.data) == (official.dtype, official.shape, official.data)
    assert ours.sparse_crow_indices == official.sparse_crow_indices
    assert ours.sparse_col_indices == official.sparse_col_indices


def test_tensor_data_is_kept():
    tensor = TensorData([1.0], "float32")
    assert Datum(INPUT, {"weights": tensor}).loss_fn_inputs["weights"] is tensor


def test_model_input_becomes_its_tokens():
    inputs: Any = {"target_tokens": INPUT}
    assert Datum(INPUT, inputs).loss_fn_inputs["target_tokens"].data == [1, 2, 3]


WRONG = {
    "ragged": ("weights", [[1.0], [1.0, 2.0]], ValueError, "rectangular"),
    "text": ("weights", ["a"], ValueError, "rectangular list of numbers"),
    "none": ("weights", [None], ValueError, "rectangular list of numbers"),
    "a list of unknown dtype": ("rewards", [1.0], ValueError, "'rewards'.*int64 from float32"),
    "a string": ("weights", "1", TypeError, "'weights'.*str"),
    "tokens that are no integers": ("target_tokens", [1.0, 2.5], ValueError, "'target_tokens'.*integers"),
    "a number": ("weights", 1.0, TypeError, "'weights'.*float"),
}


@pytest.mark.parametrize(("name", "value", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_loss_input_is_refused(name, value, error, message):
    with pytest.raises(error, match=message):
        Datum(INPUT, {name: value})


def spans(*lengths: int) -> list[SampledProvenanceSpan]:
    return [SampledProvenanceSpan(sequence_id="a", length=length) for length in lengths]


def test_provenance_covers_both_fields():
    datum = Datum(INPUT, {"target_tokens": TensorData([1, 2, 3], "int64")})
    prompt = PromptProvenanceSpan(sequence_id="a", offset=4, length=2)
    traced = datum.with_provenance(model_input=[prompt, *spans(1)], loss_fn_inputs=spans(3))
    assert traced.model_input_spans[0] == prompt
    assert datum.model_input_spans is None
    with pytest.raises(ValueError, match="model_input cover 2 positions; it has 3"):
        datum.with_provenance(spans(2), spans(3))
    with pytest.raises(ValueError, match="loss_fn_inputs cover 4 positions; it has 3"):
        datum.with_provenance(spans(3), spans(4))


def test_provenance_comes_in_pairs():
    with pytest.raises(ValueError, match="together"):
        Datum(INPUT, {}, spans(3))
    wrong: Any = ["a"]
    with pytest.raises(TypeError, match="'a'"):
        Datum(INPUT, {}, wrong, [])


WRONG_SPANS = {
    "sequence_id": {"sequence_id": "", "length": 1},
    "offset": {"sequence_id": "a", "offset": -1, "length": 1},
}


@pytest.mark.parametrize("kind", [PromptProvenanceSpan, SampledProvenanceSpan])
@pytest.mark.parametrize(
    ("field", "values"), [*WRONG_SPANS.items(), ("length", {"sequence_id": "a", "length": -1})], ids=str
)
def test_wrong_span_is_refused(kind, field, values):
    with pytest.raises(ValueError, match=f"{kind.__name__}.{field}"):
        kind(**values)


def test_spans_of_two_kinds_are_not_equal():
    values = {"sequence_id": "a", "length": 1}
    assert PromptProvenanceSpan(**values) == PromptProvenanceSpan(**values)
    assert PromptProvenanceSpan(**values) != SampledProvenanceSpan(**values)
