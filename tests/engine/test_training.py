"""Packed training against plain transformers with PEFT, padded by nothing, one sequence at a time."""

import pytest
import torch

from lorimer.engine.training import Trainer, Work
from tests.engine.reference import (
    DENSE,
    MOE,
    checked,
    make_adapter,
    make_datum,
    open_pair,
    reference_of,
    relative_error,
    run_reference,
)

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
LENGTHS = (9, 17, 5, 12)


def run(model, work, budget=64):
    results = Trainer(model, budget).run(work)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def assert_same_gradients(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, pair in expected.items():
        for factor, ours, theirs in zip("AB", found[name], pair, strict=True):
            assert relative_error(ours, theirs) < tolerance, f"{name} {factor}"


@pytest.mark.parametrize("architecture", [*DENSE, *MOE])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_loss_logprobs_and_gradients_equal_the_reference(architecture, loss_fn):
    model, plain = open_pair(architecture)
    adapter = make_adapter(model)
    data = [make_datum(loss_fn, n, seed, model.vocab_size) for seed, n in enumerate(LENGTHS)]
    (result,) = run(model, [Work(checked(data, loss_fn, model.vocab_size), adapter)])
    loss, logprobs, gradients = run_reference(reference_of(plain, model, adapter, architecture), data, loss_fn)
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
    for ours, theirs in zip(result.logprobs, logprobs, strict=True):
        assert abs(ours - theirs).max() < 1e-4
    assert_same_gradients(adapter.grads, gradients, 1e-4)
