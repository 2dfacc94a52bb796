"""Splitting and merging, against the official SDK's own on random results."""

import random

import numpy as np
import pytest
from tinker import types as official
from tinker.lib import chunked_fwdbwd_helpers as helpers

from lorimer import types
from lorimer.client import submit
from tests.client.examples import batch, datum

SUFFIXES = ["sum", "min", "max", "mean", "slack", "hash2", "unique", "unknown"]


def outputs(number: int) -> list[types.LossFnOutput]:
    return [{"logprobs": types.TensorData([float(index)], "float32")} for index in range(number)]


@pytest.mark.parametrize("seed", range(20))
def test_merged_metrics_are_those_of_the_official_sdk(seed):
    rng = random.Random(seed)
    results = []
    for _ in range(rng.randint(1, 5)):
        names = [f"m{index}:{suffix}" for index in range(3) for suffix in SUFFIXES if rng.random() < 0.9]
        metrics = {name: rng.uniform(-1e3, 1e6) for name in names}
        results.append(types.ForwardBackwardOutput("ArrayRecord", outputs(rng.randint(1, 9)), metrics))
    theirs = [official.ForwardBackwardOutput("ArrayRecord", one.loss_fn_outputs, one.metrics) for one in results]
    assert submit.merge_metrics(results) == helpers.combine_fwd_bwd_output_results(theirs).metrics
    assert len(submit.merge_results(results).loss_fn_outputs) == sum(len(one.loss_fn_outputs) for one in results)


@pytest.mark.parametrize("name", ["loss", "a:b:sum"])
def test_metric_names_have_one_colon(name):
    with pytest.raises(ValueError, match="colon"):
        submit.merge_results([types.ForwardBackwardOutput("", outputs(1), {name: 1.0})])


def test_split_keeps_order_and_limits():
    data = batch(9)
    sizes = [submit.estimate_bytes(one) for one in data]
    assert sizes[0] == 5 * (4 + 8 + 4)
    chunks = list(submit.split_data(data, 4, 400))
    assert [one for chunk, _ in chunks for one in chunk] == data
    assert all(len(chunk) <= 4 and (size <= 400 or len(chunk) == 1) for chunk, size in chunks)
    assert [size for _, size in chunks] == [sum(map(submit.estimate_bytes, chunk)) for chunk, _ in chunks]


def test_sparse_tensors_count_with_their_indices():
    dense = np.zeros((10, 8), np.float32)
    dense[:, 0] = 1
    tensor = types.TensorData.from_numpy_sparse(dense)
    one = types.Datum(datum().model_input, {"weights": tensor})
    assert submit.estimate_bytes(one) == 9 * 4 + 10 * 4 + 11 * 8 + 10 * 8
