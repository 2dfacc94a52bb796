"""The official SDK and ours on the same server with the same seeds: the same numbers, to the last digit."""

import os

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


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_same_seeds_same_numbers(server):
    with lorimer.ServiceClient(base_url=server.url) as ours:
        mine = train(lorimer, ours)
    with tinker.ServiceClient(base_url=server.url, api_key=os.environ["LORIMER_API_KEY"]) as official:
        theirs = train(tinker, official)
    assert mine[0] == theirs[0]
    assert all(np.array_equal(*pair) for pair in zip(mine[1], theirs[1], strict=True))
    assert mine[2] == theirs[2]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_handles_of_either_sdk_work_in_the_other(server):
    key = os.environ["LORIMER_API_KEY"]
    with lorimer.ServiceClient(base_url=server.url) as service:
        sampler = service.create_sampling_client(base_model="lorimer/debug")
        theirs = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=key)
        params = tinker.types.SamplingParams(max_tokens=4, seed=1)
        answer = theirs.sample(tinker.types.ModelInput.from_ints([5, 6]), 1, params).result()
        back = lorimer.SamplingClient.from_sampler_handle(theirs.get_sampler_handle(), api_key=key)
        mine = back.sample(lorimer.ModelInput.from_ints([5, 6]), 1, lorimer.SamplingParams(max_tokens=4, seed=1))
        assert mine.result().sequences[0].tokens == answer.sequences[0].tokens
