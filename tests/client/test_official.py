"""The official SDK and ours on the same server with the same seeds: the same numbers, to the last digit.

The official one runs in a process of its own: it leaves connections to the garbage collector, which would tell of them
in whatever test runs then.
"""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor

import numpy as np
import pytest
import tinker

import lorimer
from tests.client.examples import tokens_of


def train(sdk, service) -> tuple[list[float], list[np.ndarray], list[list[int]]]:
    types = sdk.types
    trainer = service.create_lora_training_client("lorimer/debug", rank=4, seed=11)
    data = []
    for seed in range(4):
        tokens = tokens_of(8 + seed, seed)
        inputs = {"target_tokens": tokens[1:], "weights": [0.5 + seed] * (len(tokens) - 1)}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    losses, logprobs = [], []
    for _ in range(4):
        output = trainer.forward_backward(data, "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses.append(output.metrics["loss:sum"])
        logprobs += [one["logprobs"].to_numpy() for one in output.loss_fn_outputs]
    sampler = trainer.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=8, seed=2)
    answer = sampler.sample(types.ModelInput.from_ints(tokens_of(5, 9)), 3, params).result()
    return losses, logprobs, [one.tokens for one in answer.sequences]


def train_officially(url: str) -> tuple[list[float], list[np.ndarray], list[list[int]]]:
    with tinker.ServiceClient(base_url=url, api_key=os.environ["LORIMER_API_KEY"]) as service:
        return train(tinker, service)


def sample_officially(handle: str) -> tuple[list[int], str]:
    """What the official SDK draws with a handle, and the handle that it gives away itself."""
    sampler = tinker.SamplingClient.from_sampler_handle(handle, api_key=os.environ["LORIMER_API_KEY"])
    params = tinker.types.SamplingParams(max_tokens=4, seed=1)
    answer = sampler.sample(tinker.types.ModelInput.from_ints([5, 6]), 1, params).result()
    return list(answer.sequences[0].tokens), sampler.get_sampler_handle()


@pytest.fixture(scope="module")
def elsewhere(server) -> Iterator[Executor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        yield processes


def test_same_seeds_same_numbers(server, elsewhere):
    with lorimer.ServiceClient(base_url=server.url) as ours:
        mine = train(lorimer, ours)
    theirs = elsewhere.submit(train_officially, server.url).result()
    assert mine[0] == theirs[0]
    assert all(np.array_equal(*pair) for pair in zip(mine[1], theirs[1], strict=True))
    assert mine[2] == theirs[2]


def test_handles_of_either_sdk_work_in_the_other(server, elsewhere):
    with lorimer.ServiceClient(base_url=server.url) as service:
        sampler = service.create_sampling_client(base_model="lorimer/debug")
        theirs, handle = elsewhere.submit(sample_officially, sampler.get_sampler_handle()).result()
        back = lorimer.SamplingClient.from_sampler_handle(handle, api_key=os.environ["LORIMER_API_KEY"])
        mine = back.sample(lorimer.ModelInput.from_ints([5, 6]), 1, lorimer.SamplingParams(max_tokens=4, seed=1))
        assert mine.result().sequences[0].tokens == theirs
