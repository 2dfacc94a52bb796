"""The sampling client against a real server: values, many together, copies in other processes, giving up."""

import asyncio
import base64
import json
import multiprocessing
import pickle
import subprocess
import sys

import numpy as np
import pytest

import lorimer
from lorimer import types
from tests.client.examples import prompt
from tests.conformance.servers import environment

PARAMS = types.SamplingParams(max_tokens=5, seed=3, temperature=1.0)


@pytest.fixture(scope="module")
def sampler(service):
    return service.create_sampling_client(base_model="lorimer/debug")


def test_seeded_samples_repeat(sampler):
    first, second = (sampler.sample(prompt(), 3, PARAMS).result() for _ in range(2))
    assert [one.tokens for one in first.sequences] == [one.tokens for one in second.sequences]
    assert all(len(one.logprobs_np) == len(one.tokens_np) for one in first.sequences)
    ids = [one.sequence_id for answer in (first, second) for one in answer.sequences]
    assert len(set(ids)) == 6


def test_logprobs_of_samples_are_those_of_the_prompt(sampler):
    sequence = sampler.sample(prompt(), 1, PARAMS).result().sequences[0]
    whole = types.ModelInput.from_ints(prompt().to_ints() + sequence.tokens)
    scored = sampler.compute_logprobs(whole).result()
    np.testing.assert_allclose(scored[prompt().length :], sequence.logprobs, atol=1e-4)
    last = sampler.compute_logprobs(whole, prompt_logprobs_last_n=2).result()
    assert last[:-2] == [None] * (whole.length - 2)
    np.testing.assert_allclose(last[-2:], scored[-2:], atol=1e-4)


def test_prompt_options_are_answered(sampler):
    targets = types.TensorData.from_numpy(np.arange(10, 20).reshape(5, 2))
    answer = sampler.sample(
        prompt(6),
        1,
        PARAMS,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=2,
    ).result()
    assert len(answer.prompt_logprobs) == 6 and answer.prompt_logprobs[0] is None
    assert len(answer.topk_prompt_logprobs[1]) == 2 and len(answer.sequences[0].topk_logprobs[0]) == 3
    assert answer.target_prompt_logprobs.dense_shape == (5, 2)
    assert answer.prompt_alt_tokens.tokens.dense_shape == (5, 2)


@pytest.mark.parametrize("polls_together", [True, False], ids=["one poll for all", "a poll for each"])
def test_many_samples_at_once(service, monkeypatch, polls_together):
    config = service.holder.connection.config.model_copy(update={"sample_use_retrieve_futures": polls_together})
    monkeypatch.setattr(service.holder.connection, "config", config)
    sampler = service.create_sampling_client(base_model="lorimer/debug")
    futures = [sampler.sample(prompt(seed=seed), 1, PARAMS) for seed in range(150)]
    answers = [future.result(60) for future in futures]
    again = sampler.sample(prompt(seed=149), 1, PARAMS).result()
    assert answers[149].sequences[0].tokens == again.sequences[0].tokens
    assert len({answer.sequences[0].sequence_id for answer in answers}) == 150


async def test_async_twins(service):
    sampler = await service.create_sampling_client_async(base_model="lorimer/debug")
    answers = await asyncio.gather(*(sampler.sample_async(prompt(), 1, PARAMS) for _ in range(5)))
    assert len({tuple(answer.sequences[0].tokens) for answer in answers}) == 1
    assert (await sampler.compute_logprobs_async(prompt()))[0] is None
    assert await sampler.get_base_model_async() == "lorimer/debug"


async def test_future_of_a_sample_can_be_awaited(sampler):
    """Other than that of the official SDK, which has only ``result``."""
    one, other = await asyncio.gather(sampler.sample(prompt(), 1, PARAMS), sampler.compute_logprobs(prompt()))
    assert (await sampler.sample(prompt(), 1, PARAMS)).sequences[0].tokens == one.sequences[0].tokens
    assert len(other) == prompt().length


async def test_sample_that_nobody_awaits_is_given_up_and_others_go_on(sampler):
    long = types.SamplingParams(max_tokens=400, stop=[])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sampler.sample_async(prompt(), 64, long), 0.2)
    answer = await sampler.sample_async(prompt(), 1, PARAMS)
    assert answer.sequences[0].tokens


def test_copies_number_their_samples_apart(sampler):
    copies = [
        pickle.loads(pickle.dumps(sampler)),
        lorimer.SamplingClient.from_sampler_handle(sampler.get_sampler_handle()),
    ]
    expected = sampler.sample(prompt(), 1, PARAMS).result().sequences[0].tokens
    for copy in copies:
        assert copy.sample(prompt(), 1, PARAMS).result().sequences[0].tokens == expected
    assert len({copy._clone_id for copy in copies} | {0}) == 3


def test_handle_holds_no_key_and_a_pickle_does(sampler, server):
    values = json.loads(base64.urlsafe_b64decode(sampler.get_sampler_handle()))
    assert values["holder"]["base_url"] == server.url and values["holder"]["api_key"] is None
    assert sampler.__reduce__()[1][0].holder.api_key.startswith("tml-")


CHILD = """
import pickle, sys
from lorimer import types
sampler = pickle.loads(bytes.fromhex(sys.argv[1]))
tokens = sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 1, types.SamplingParams(max_tokens=4, seed=1)).result()
print(tokens.sequences[0].tokens, "torch" in sys.modules)
"""


def test_pickle_works_in_another_process_without_torch(sampler):
    expected = sampler.sample(
        types.ModelInput.from_ints([5, 6, 7]), 1, types.SamplingParams(max_tokens=4, seed=1)
    ).result()
    command = [sys.executable, "-c", CHILD, pickle.dumps(sampler).hex()]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == f"{expected.sequences[0].tokens} False", run.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_client_refuses_to_work_in_a_forked_child(sampler, trainer):
    def child(pipe) -> None:
        messages = []
        for call in (lambda: sampler.sample(prompt(), 1, PARAMS), lambda: trainer.get_info()):
            try:
                call()
            except RuntimeError as error:
                messages.append(str(error))
        pipe.send(messages)

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    assert ours.poll(30)
    messages = ours.recv()
    process.join()
    assert len(messages) == 2 and all("forked" in message for message in messages)


MISTAKES = {
    "a list as prompt": (lambda s: s.sample([1, 2], 1, PARAMS), TypeError, "ModelInput.from_ints"),
    "no samples": (lambda s: s.sample(prompt(), 0, PARAMS), ValueError, "num_samples is 0"),
    "a dict as parameters": (lambda s: s.sample(prompt(), 1, {"max_tokens": 1}), TypeError, "SamplingParams"),
    "float targets": (
        lambda s: s.sample(prompt(), 1, PARAMS, target_prompt_logprobs=types.TensorData([[1.0]], "float32", [1, 1])),
        ValueError,
        "int64",
    ),
    "last_n without logprobs": (
        lambda s: s.sample(prompt(), 1, PARAMS, prompt_logprobs_last_n=1),
        ValueError,
        "include_prompt_logprobs",
    ),
}


@pytest.mark.parametrize(("call", "kind", "text"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_explained(sampler, call, kind, text):
    with pytest.raises(kind, match=text):
        call(sampler)


def test_refusal_of_the_server_is_raised_at_once(sampler):
    with pytest.raises(lorimer.RequestFailedError, match="context"):
        sampler.sample(prompt(600), 1, PARAMS).result(10)


def test_path_that_is_none_is_explained(service):
    with pytest.raises(ValueError, match="tinker://"):
        service.create_sampling_client(model_path="somewhere")
    with pytest.raises(ValueError, match="base_model"):
        service.create_sampling_client()
