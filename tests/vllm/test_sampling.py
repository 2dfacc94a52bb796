"""What vLLM samples is what the engine would: tokens, stops and logprobs, for the base and adapters in one batch."""

import asyncio
import json
import urllib.request
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tinker import types

import lorimer.models
from lorimer.engine.model.base_model import load_tokenizer
from tests.conformance.samples import current_logprobs, datum, prompt_of, step
from tests.vllm.conftest import ENGINE, MODEL, SAMPLER

TINY = Path(lorimer.models.__file__).parent / "tiny"
VOCAB_SIZE = 1024
TOLERANCE = 1e-4
PROMPTS = [np.random.default_rng(seed).integers(3, VOCAB_SIZE, 5 + 7 * seed).tolist() for seed in range(6)]


@pytest.fixture(scope="module")
def runs(service):
    """Runs of several ranks that prefer different continuations; two of them train the unembedding."""
    made = []
    for number, (rank, unembed) in enumerate([(4, True), (16, True), (8, False)]):
        trainer = service.create_lora_training_client(MODEL, rank=rank, seed=number, train_unembed=unembed)
        for _ in range(3):
            step(trainer, [datum(PROMPTS[number]), datum(PROMPTS[5 - number])], learning_rate=3e-2)
        made.append(trainer)
    return made


@pytest.fixture(scope="module")
def samplers(service, runs):
    """The base, and each run."""
    return [
        service.create_sampling_client(base_model=MODEL),
        *(run.save_weights_and_get_sampling_client() for run in runs),
    ]


@pytest.fixture(scope="module")
def base_run(service):
    """A run that has not learned anything, so that its logprobs are those of the base."""
    return service.create_lora_training_client(MODEL, rank=1)


def sample_all(samplers, params, num_samples=2, **options):
    """Sample all prompts with all samplers concurrently; results by sampler and prompt."""

    async def run():
        calls = [
            sampler.sample_async(prompt_of(prompt), num_samples, params, **options)
            for prompt in PROMPTS
            for sampler in samplers
        ]
        found = await asyncio.gather(*calls)
        return [found[number :: len(samplers)] for number in range(len(samplers))]

    return asyncio.run(run())


def test_logprobs_in_mixed_batches_are_the_trainers(installation, samplers, runs, base_run, figures):
    """More adapters than fit into vLLM, so that some are dropped and loaded again."""
    params = types.SamplingParams(max_tokens=24, stop=[])
    results = []
    places = installation.num_places(lambda: results.extend(sample_all(samplers, params)))
    assert places == {SAMPLER: len(samplers) * len(PROMPTS)}
    gaps, spread = {}, 0.0
    for number, (trainer, found) in enumerate(zip([base_run, *runs], results, strict=True)):
        for prompt, result in zip(PROMPTS, found, strict=True):
            for sequence in result.sequences:
                assert (len(sequence.tokens), sequence.stop_reason) == (24, "length")
                data = [datum(prompt + sequence.tokens)]
                gap = np.abs(current_logprobs(trainer, data)[-24:] - sequence.logprobs).max()
                gaps[number] = max(gaps.get(number, 0.0), float(gap))
                if number:
                    spread = max(spread, np.abs(current_logprobs(base_run, data)[-24:] - sequence.logprobs).max())
    figures(base=gaps[0], runs=[gaps[number] for number in range(1, len(samplers))], from_the_base=float(spread))
    assert max(gaps.values()) <= TOLERANCE
    assert spread > 1, "the runs have learned too little to be told from the base"


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.7])
def test_logprobs_are_those_of_the_temperature(samplers, temperature):
    """The engine scores the whole vocabulary of each position; scaled, it is what was sampled from."""
    params = types.SamplingParams(max_tokens=6, temperature=temperature, stop=[])
    for sampler, found in zip(samplers, sample_all(samplers, params, 1), strict=True):
        for prompt, result in list(zip(PROMPTS, found, strict=True))[:2]:
            [sequence] = result.sequences
            tokens = prompt + sequence.tokens
            scored = sampler.sample(
                prompt_of(tokens),
                1,
                types.SamplingParams(max_tokens=1),
                include_prompt_logprobs=True,
                topk_prompt_logprobs=VOCAB_SIZE,
            ).result()
            for position, (token, logprob) in enumerate(zip(sequence.tokens, sequence.logprobs, strict=True)):
                row = dict(scored.topk_prompt_logprobs[len(prompt) + position])
                logits = np.array([row[i] for i in range(VOCAB_SIZE)]) / (temperature or 1.0)
                expected = logits - np.logaddexp.reduce(logits)
                assert logprob == pytest.approx(expected[token], abs=TOLERANCE)
                if temperature == 0:
                    assert expected[token] >= expected.max() - TOLERANCE


def test_what_vllm_cannot_answer_exactly_goes_to_the_engine(installation, samplers):
    base = samplers[0]
    params = types.SamplingParams(max_tokens=4)
    odd = {"top_k": {"top_k": 5}, "top_p": {"top_p": 0.9}, "cold": {"temperature": 0.005}, "hot": {"temperature": 2.5}}

    def sample(**odd):
        return base.sample(prompt_of(PROMPTS[0]), 1, types.SamplingParams(max_tokens=4, **odd)).result()

    asked = {name: partial(sample, **values) for name, values in odd.items()} | {
        "prompt": lambda: base.compute_logprobs(prompt_of(PROMPTS[0])).result(),
        "alternatives": lambda: base.sample(prompt_of(PROMPTS[0]), 1, params, prompt_alt_tokens_k=2).result(),
    }
    assert {name: installation.num_places(work) for name, work in asked.items()} == {
        name: {ENGINE: 1} for name in asked
    }


def test_adapter_of_a_high_rank_goes_to_the_engine(installation, service):
    wide = service.create_lora_training_client(MODEL, rank=64).save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=2)
    assert installation.num_places(lambda: wide.sample(prompt_of(PROMPTS[0]), 1, params).result()) == {ENGINE: 1}


def test_stops_end_sequences_as_in_the_engine(installation, samplers):
    """Greedy samples, with a stop in the middle, from vLLM and, as a prompt's score is asked too, from the engine."""
    base, prompt = samplers[0], prompt_of(PROMPTS[1])
    [whole] = base.sample(prompt, 1, types.SamplingParams(max_tokens=12, temperature=0.0, stop=[])).result().sequences
    words = [load_tokenizer(TINY).decode([token]) for token in whole.tokens]
    text = next(word for word in words[3:] if word.strip() and "\ufffd" not in word)
    for stop in (None, [], [whole.tokens[4]], text, [text, "never"]):
        params = types.SamplingParams(max_tokens=12, temperature=0.0, stop=stop)
        results = {}
        for place, options in ((SAMPLER, {}), (ENGINE, {"include_prompt_logprobs": True})):

            def work(place=place, options=options, params=params, results=results):
                results[place] = base.sample(prompt, 2, params, **options).result()

            assert installation.num_places(work) == {place: 1}
        for mine, theirs in zip(results[SAMPLER].sequences, results[ENGINE].sequences, strict=True):
            assert (mine.tokens, mine.stop_reason) == (theirs.tokens, theirs.stop_reason)
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=TOLERANCE)
        assert not stop or results[SAMPLER].sequences[0].stop_reason == "stop"


def test_best_tokens_of_samples_are_the_engines(samplers):
    params = types.SamplingParams(max_tokens=5, temperature=0.0, stop=[])
    for sampler in samplers[:2]:
        [mine], [theirs] = (
            sampler.sample(prompt_of(PROMPTS[2]), 1, params, topk_sample_logprobs=3, **options).result().sequences
            for options in ({}, {"include_prompt_logprobs": True})
        )
        assert [[token for token, _ in row] for row in mine.topk_logprobs] == [
            [token for token, _ in row] for row in theirs.topk_logprobs
        ]
        np.testing.assert_allclose(mine.topk_logprobs, theirs.topk_logprobs, atol=TOLERANCE)


def test_streamed_tokens_come_one_by_one(installation):
    """Through the OpenAI-compatible route, whose samples are not journaled."""
    body = {"model": MODEL, "prompt": PROMPTS[3], "max_tokens": 24, "n": 4, "stream": True, "logprobs": 1}
    request = urllib.request.Request(
        f"{installation.server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line.decode().removeprefix("data: ").strip() for line in answer if line.strip()]
    assert lines[-1] == "[DONE]"
    pieces = [choice for line in lines[:-1] for choice in json.loads(line)["choices"] if choice["text"]]
    assert {choice["index"] for choice in pieces} == {0, 1, 2, 3}
    assert len(pieces) > 8
