"""SamplingClient: sampled tokens and every kind of logprob, against the trainer and the plain model."""

import pickle
import secrets
import subprocess
import sys

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from tests.conformance.coverage import covers
from tests.conformance.samples import (
    MODEL,
    RANK,
    VOCAB_SIZE,
    current_logprobs,
    datum,
    prompt_of,
    step,
    tokens_of,
)
from tests.conformance.servers import environment

PROMPT = tokens_of(12, 21)
GREEDY = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
ONE = types.SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def learned(service):
    """A run that prefers some continuations."""
    trainer = service.create_lora_training_client(MODEL, rank=RANK, seed=11)
    for _ in range(3):
        step(trainer, [datum(tokens_of(12, 21))], learning_rate=2e-2)
    return trainer


@pytest.fixture(scope="module")
def sampler(learned):
    return learned.save_weights_and_get_sampling_client()


@pytest.fixture(scope="module")
def base(service):
    return service.create_sampling_client(base_model=MODEL)


def plain_logits(trainer, tokens):
    model = AutoModelForCausalLM.from_pretrained(trainer.get_info().model_data.tokenizer_id, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


# ── sampled sequences ─────────────────────────────────────────────────────────────────────────────────


@covers("SamplingClient.sample")
def test_logprobs_of_samples_are_the_trainers(sampler, learned):
    result = sampler.sample(prompt_of(PROMPT), 4, types.SamplingParams(max_tokens=6, seed=1, stop=[])).result()
    assert len({sequence.sequence_id for sequence in result.sequences}) == 4
    for sequence in result.sequences:
        assert (len(sequence.tokens), sequence.stop_reason) == (6, "length")
        expected = current_logprobs(learned, [datum(PROMPT + sequence.tokens)])[-6:]
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)


@covers("SamplingClient.sample_async")
async def test_greedy_samples_take_the_likeliest_token(base, trainer):
    result = await base.sample_async(prompt_of(PROMPT), 2, GREEDY)
    first, second = (sequence.tokens for sequence in result.sequences)
    assert first == second
    tokens = list(PROMPT)
    for token in first:
        assert token == int(plain_logits(trainer, tokens)[-1].argmax())
        tokens.append(token)


def test_seed_repeats_a_sample_and_no_seed_does_not(base):
    def draw(seed):
        result = base.sample(prompt_of(PROMPT), 2, types.SamplingParams(max_tokens=12, seed=seed, stop=[])).result()
        return [sequence.tokens for sequence in result.sequences]

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)
    assert draw(None) != draw(None)
    assert len({tuple(tokens) for tokens in draw(5)}) == 2


def test_top_k_and_top_p_narrow_the_choice(base):
    likeliest = base.sample(prompt_of(PROMPT), 1, GREEDY).result().sequences[0].tokens
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
        params = types.SamplingParams(max_tokens=8, seed=3, stop=[], **narrow)
        assert base.sample(prompt_of(PROMPT), 1, params).result().sequences[0].tokens == likeliest


def stops(base, tokenizer):
    tokens = base.sample(prompt_of(PROMPT), 1, GREEDY).result().sequences[0].tokens
    return tokens, tokenizer.decode([tokens[3]])


@pytest.mark.parametrize("form", ["text", "texts", "tokens"])
def test_stop_ends_a_sequence(base, trainer, form):
    tokens, text = stops(base, trainer.get_tokenizer())
    stop = {"text": text, "texts": ["never seen", text], "tokens": [tokens[3]]}[form]
    params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=stop)
    (sequence,) = base.sample(prompt_of(PROMPT), 1, params).result().sequences
    assert sequence.stop_reason == "stop"
    assert len(sequence.tokens) <= 4
    assert sequence.tokens == tokens[: len(sequence.tokens)]


def test_end_of_sequence_stops_unless_stops_are_empty(service):
    """The end token is 2; a run that has learned it stops there, and goes on when told to ignore stops."""
    trainer = service.create_lora_training_client(MODEL, rank=RANK, seed=1)
    for _ in range(12):
        step(trainer, [datum([*PROMPT, 2], [0.0] * 11 + [1.0])], learning_rate=5e-2)
    client = trainer.save_weights_and_get_sampling_client()

    def draw(stop):
        params = types.SamplingParams(max_tokens=5, temperature=0.0, stop=stop)
        return client.sample(prompt_of(PROMPT), 1, params).result().sequences[0]

    assert (draw(None).tokens, draw(None).stop_reason) == ([2], "stop")
    assert (len(draw([]).tokens), draw([]).stop_reason) == (5, "length")


def test_max_tokens_is_the_room_in_the_context_unless_given(base):
    (sequence,) = base.sample(prompt_of(tokens_of(500, 2)), 1, types.SamplingParams(stop=[])).result().sequences
    assert (len(sequence.tokens), sequence.stop_reason) == (12, "length")


# ── logprobs of prompts ───────────────────────────────────────────────────────────────────────────────


@covers("SamplingClient.compute_logprobs", "SamplingClient.compute_logprobs_async")
async def test_prompt_logprobs_are_the_trainers(sampler, learned):
    found = sampler.compute_logprobs(prompt_of(PROMPT)).result()
    assert found[0] is None
    np.testing.assert_allclose(found[1:], current_logprobs(learned, [datum(PROMPT)]), atol=1e-4)
    assert await sampler.compute_logprobs_async(prompt_of(PROMPT)) == pytest.approx(found, abs=1e-5)


def test_last_n_scores_only_the_end(base):
    whole = base.compute_logprobs(prompt_of(PROMPT)).result()
    end = base.compute_logprobs(prompt_of(PROMPT), prompt_logprobs_last_n=3).result()
    assert end[:-3] == [None] * 9
    assert end[-3:] == pytest.approx(whole[-3:], abs=1e-5)


def test_top_k_of_prompt_and_samples_are_the_largest(base, trainer):
    params = types.SamplingParams(max_tokens=2, temperature=0.0, stop=[])
    result = base.sample(
        prompt_of(PROMPT), 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2
    ).result()
    expected = plain_logits(trainer, PROMPT).log_softmax(-1)
    assert result.topk_prompt_logprobs[0] is None
    for row, found in enumerate(result.topk_prompt_logprobs[1:]):
        values, ids = expected[row].topk(3)
        assert [token for token, _ in found] == ids.tolist()
        np.testing.assert_allclose([value for _, value in found], values.numpy(), atol=1e-4)
    (sequence,) = result.sequences
    assert [len(row) for row in sequence.topk_logprobs] == [2, 2]
    assert [row[0][0] for row in sequence.topk_logprobs] == sequence.tokens


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_targets_are_scored_where_asked(base, trainer, form):
    ids = torch.full((11, 2), -1, dtype=torch.int64)
    ids[4, 0], ids[4, 1], ids[10, 0] = 17, 99, 42
    targets = (
        types.TensorData.from_torch(ids) if form == "dense" else types.TensorData.from_torch_sparse(ids, pad_value=-1)
    )
    found = base.sample(prompt_of(PROMPT), 1, ONE, target_prompt_logprobs=targets).result().target_prompt_logprobs
    expected = plain_logits(trainer, PROMPT).log_softmax(-1)
    scored = found.to_torch()
    for row, column in ((4, 0), (4, 1), (10, 0)):
        assert float(scored[row, column]) == pytest.approx(float(expected[row, ids[row, column]]), abs=1e-4)
    assert int((scored != 0).sum()) == 3


def test_alternatives_are_drawn_at_every_position(base, trainer):
    result = base.sample(
        prompt_of(PROMPT), 1, types.SamplingParams(max_tokens=1, seed=2), prompt_alt_tokens_k=4
    ).result()
    tokens, found = (
        tensor.to_torch() for tensor in (result.prompt_alt_tokens.tokens, result.prompt_alt_tokens.logprobs)
    )
    assert tokens.shape == found.shape == (11, 4)
    expected = plain_logits(trainer, PROMPT)[:-1].log_softmax(-1).gather(-1, tokens)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-4)


def test_second_prompt_with_the_same_beginning_hits_the_cache(base):
    shared = tokens_of(200, secrets.randbits(32))  # that nobody has sampled from, whatever ran before
    first = base.sample(prompt_of([*shared, 5]), 1, ONE).result()
    second = base.sample(prompt_of([*shared, 6]), 1, ONE).result()
    assert second.prompt_cache_hit_tokens > max(first.prompt_cache_hit_tokens, 100)


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("tokens", "params", "named"),
    [
        ([VOCAB_SIZE + 5], {"max_tokens": 1}, str(VOCAB_SIZE + 5)),
        ([], {"max_tokens": 1}, "prompt"),
        ([5], {"max_tokens": 1, "temperature": -1.0}, "temperature"),
        ([5], {"max_tokens": 1, "top_p": 1.5}, "top_p"),
        ([5], {"max_tokens": 0}, "max_tokens"),
    ],
    ids=["token", "empty", "temperature", "top_p", "max_tokens"],
)
def test_bad_sample_is_refused_by_name(base, tokens, params, named):
    with pytest.raises(
        (tinker.BadRequestError, tinker.RequestFailedError, tinker.UnprocessableEntityError), match=named
    ):
        base.sample(prompt_of(tokens), 1, types.SamplingParams(**params)).result()


def test_images_are_refused_by_name(base):
    pointer = types.ImageAssetPointerChunk(location="https://example.org/cat.png", format="png")
    with pytest.raises(tinker.BadRequestError, match="image_asset_pointer"):
        base.sample(types.ModelInput(chunks=[pointer]), 1, ONE).result()


# ── many samples, many clients ────────────────────────────────────────────────────────────────────────


def test_two_hundred_samples_at_once_go_through_one_poller(base):
    prompts = [tokens_of(6, seed) for seed in range(200)]
    futures = [base.sample(prompt_of(tokens), 1, GREEDY) for tokens in prompts]
    found = [future.result().sequences[0].tokens for future in futures]
    assert base._futures_poller is not None
    for index in (0, 77, 199):
        assert base.sample(prompt_of(prompts[index]), 1, GREEDY).result().sequences[0].tokens == found[index]


@covers("SamplingClient.__reduce__")
def test_pickled_clients_get_numbers_of_their_own(sampler):
    expected = sampler.sample(prompt_of(PROMPT), 1, GREEDY).result().sequences[0].tokens
    copies = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]
    for copy in copies:
        assert copy.sample(prompt_of(PROMPT), 1, GREEDY).result().sequences[0].tokens == expected
    numbers = [copy._cloned_sampler_id for copy in copies]
    assert len({0, *numbers}) == 3
    assert all(copy._request_id_counter == number * 10**9 + 1 for copy, number in zip(copies, numbers, strict=True))


IN_ANOTHER_PROCESS = f"""
import os, sys
sys.modules["torch"] = None  # the SDK does without
import {tinker.__name__} as tinker
client = tinker.SamplingClient.from_sampler_handle(sys.argv[1])
params = tinker.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
prompt = tinker.ModelInput.from_ints([int(token) for token in sys.argv[2].split(",")])
print(client.sample(prompt, 1, params).result().sequences[0].tokens, flush=True)
os._exit(0)  # threads that the official SDK leaves can abort an interpreter that ends in order
"""


@covers("SamplingClient.get_sampler_handle", "SamplingClient.from_sampler_handle")
def test_handle_works_in_another_process(sampler, alice):
    handle = sampler.get_sampler_handle()
    assert alice.key not in handle
    expected = sampler.sample(prompt_of(PROMPT), 1, GREEDY).result().sequences[0].tokens
    here = tinker.SamplingClient.from_sampler_handle(handle, api_key=alice.key)
    assert here.sample(prompt_of(PROMPT), 1, GREEDY).result().sequences[0].tokens == expected
    arguments = [sys.executable, "-c", IN_ANOTHER_PROCESS, handle, ",".join(map(str, PROMPT))]
    run = subprocess.run(
        arguments, env=environment(TINKER_API_KEY=alice.key), capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(expected)


@covers("SamplingClient.create")
def test_client_made_from_a_holder(service, base):
    again = tinker.SamplingClient.create(service.holder, base_model=MODEL).result()
    first, second = (client.compute_logprobs(prompt_of(PROMPT)).result() for client in (base, again))
    assert first[1:] == pytest.approx(second[1:], abs=1e-5)


@covers(
    "SamplingClient.get_base_model",
    "SamplingClient.get_base_model_async",
    "RestClient.get_sampler",
    "RestClient.get_sampler_async",
)
async def test_sampler_says_what_it_samples(service, learned, rest):
    path = learned.save_weights_for_sampler("known").result().path
    client = service.create_sampling_client(model_path=path)
    assert client.get_base_model() == await client.get_base_model_async() == MODEL
    shown = rest.get_sampler(client._sampling_session_id).result()
    assert (shown.sampler_id, shown.base_model, shown.model_path) == (client._sampling_session_id, MODEL, path)
    assert await rest.get_sampler_async(client._sampling_session_id) == shown


@covers("SamplingClient.get_tokenizer")
def test_tokenizer_is_looked_for_by_the_name_of_the_model(base, trainer, tmp_path, monkeypatch):
    """The SDK asks the hub for that name, or takes a directory of that name, which stands in for the hub here."""
    (tmp_path / "conformance").mkdir()
    (tmp_path / MODEL).symlink_to(trainer.get_info().model_data.tokenizer_id)
    monkeypatch.chdir(tmp_path)
    assert base.get_tokenizer().decode(base.get_tokenizer().encode("a bit")) == "a bit"


def test_named_sampler_keeps_its_weights_while_training_goes_on(service):
    trainer = service.create_lora_training_client(MODEL, rank=RANK, seed=2)
    client = trainer.save_weights_and_get_sampling_client()
    before = client.compute_logprobs(prompt_of(PROMPT)).result()
    step(trainer, [datum(PROMPT)], learning_rate=5e-2)
    assert client.compute_logprobs(prompt_of(PROMPT)).result() == before
    later = trainer.save_weights_and_get_sampling_client().compute_logprobs(prompt_of(PROMPT)).result()
    assert np.abs(np.subtract(later[1:], before[1:])).max() > 1e-2


def test_sampler_of_another_user_does_not_exist(sampler, bob):
    stranger = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=bob.key)
    with pytest.raises(tinker.NotFoundError, match="no sampling session"):
        stranger.sample(prompt_of(PROMPT), 1, ONE).result()
