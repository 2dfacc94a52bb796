"""Mistakes that are common, and what is said about them."""

import asyncio

import numpy as np
import pytest

import lorimer
from lorimer import types
from lorimer.client import custom_loss
from lorimer.client.submit import check_data

INPUT = types.ModelInput.from_ints([1, 2, 3])

DATA = {
    "nothing": ([], ValueError, "empty"),
    "one datum": (types.Datum(INPUT, {}), TypeError, r"\[datum\]"),
    "something else": ([{"model_input": INPUT}], TypeError, r"data\[0\] is a builtins.dict"),
    "targets of another length": (
        [types.Datum(INPUT, {"target_tokens": [1, 2]})],
        ValueError,
        r"2 target_tokens for 3 input tokens.*tokens\[1:\]",
    ),
    "float targets": ([types.Datum(INPUT, {"target_tokens": np.ones(3)})], ValueError, "float32; token ids"),
    "weights of another length": (
        [types.Datum(INPUT, {"target_tokens": [1, 2, 3], "weights": [1.0]})],
        ValueError,
        "1 weights for 3 target_tokens",
    ),
}


@pytest.mark.parametrize(("data", "kind", "text"), DATA.values(), ids=DATA)
def test_data(data, kind, text):
    with pytest.raises(kind, match=text):
        check_data(data)


def test_mistake_takes_no_number(trainer):
    good = types.Datum(INPUT, {"target_tokens": [2, 3, 4], "weights": [1.0] * 3})
    pointer = types.ImageAssetPointerChunk(format="png", location="somewhere", expected_tokens=1)
    for bad in ([], [types.Datum(types.ModelInput(chunks=[pointer]), {})]):
        with pytest.raises((ValueError, lorimer.errors.LorimerError)):
            trainer.forward_backward(bad, "cross_entropy")
    assert trainer.forward([good], "cross_entropy").result(30).loss > 0


def test_forgotten_result_is_explained(trainer):
    good = types.Datum(INPUT, {"target_tokens": [2, 3, 4], "weights": [1.0] * 3})
    future = trainer.forward([good], "cross_entropy")
    with pytest.raises(AttributeError, match=r"use \.result\(\), or await"):
        future.loss  # noqa: B018
    future.result()


def test_forgotten_result_of_a_sample_is_explained(service):
    sampler = service.create_sampling_client(base_model="lorimer/debug")
    future = sampler.sample(INPUT, 1, types.SamplingParams(max_tokens=1))
    with pytest.raises(AttributeError, match=r"use \.result\(\), or await"):
        future.sequences  # noqa: B018
    future.result()


async def test_forgotten_second_await_is_explained(trainer):
    good = types.Datum(INPUT, {"target_tokens": [2, 3, 4], "weights": [1.0] * 3})
    future = await trainer.forward_async([good], "cross_entropy")
    with pytest.raises(AttributeError, match="await the future"):
        future.loss  # noqa: B018
    assert (await future).loss > 0


def test_blocking_call_in_a_loop_is_remarked(trainer, caplog):
    async def main():
        return trainer.get_info()

    asyncio.run(main())
    assert "await get_info_async()" in caplog.text


def test_optimiser_parameters(trainer):
    with pytest.raises(TypeError, match="AdamParams"):
        trainer.optim_step()
    with pytest.raises(ValueError, match="both"):
        trainer.optim_step(types.AdamParams(), adam_params=types.AdamParams())


def no_logprobs(advantages):
    return advantages.sum(), {}


def with_default(logprobs, scale=1.0):
    return logprobs.sum(), {}


def branches(logprobs):
    return (logprobs.sum() if logprobs.sum() > 0 else -logprobs.sum()), {}


def leaves_torch(logprobs):
    return logprobs.sum(), {"custom/x:sum": logprobs.sum().item()}


def bad_metric(logprobs):
    return logprobs.sum(), {"x": logprobs.sum()}


def no_metrics(logprobs):
    return logprobs.sum()


LOSSES = {
    "no logprobs": (no_logprobs, {"advantages": 1}, "first parameter"),
    "a default": (with_default, {"logprobs": 1, "scale": 0}, "without a default"),
    "other ranks": (no_metrics, {"logprobs": 1, "x": 1}, "input_ranks"),
    "rank 0": (no_metrics, {"logprobs": 0}, "rank 0"),
    "a branch": (branches, {"logprobs": 1}, "cannot be traced"),
    "item": (leaves_torch, {"logprobs": 1}, "stay tensors"),
    "a metric's name": (bad_metric, {"logprobs": 1}, "custom/<name>:sum"),
    "no metrics": (no_metrics, {"logprobs": 1}, "must return"),
}


@pytest.mark.parametrize(("fn", "ranks", "text"), LOSSES.values(), ids=LOSSES)
def test_losses_that_cannot_be_traced(fn, ranks, text):
    with pytest.raises(ValueError, match=text):
        custom_loss.trace(fn, ranks, "session")


def test_loss_of_another_session_is_refused(service, trainer):
    handle = custom_loss.trace(lambda logprobs: (logprobs.sum(), {}), {"logprobs": 1}, "another")
    with pytest.raises(ValueError, match="another"):
        trainer.forward_backward_custom([types.Datum(INPUT, {"target_tokens": [1, 2, 3]})], handle)
