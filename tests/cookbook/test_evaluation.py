"""Evaluators on a real server, and pass@k against counting all subsets."""

import asyncio
import math
import re
from itertools import combinations
from pathlib import Path

import pytest

from lorimer import ModelInput
from lorimer.cookbook.datums import conversation_to_datum, datum_from_tokens, mean_nll
from lorimer.cookbook.evaluation import accuracy, exact_match, nll, pass_at_k, together
from lorimer.cookbook.renderers import get_renderer
from lorimer.cookbook.service import get_tokenizer
from lorimer.errors import InvalidInput

MODEL = "lorimer/tiny"
ROWS = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in (2, 3) for b in (2, 3, 4)]


@pytest.mark.parametrize("num_samples", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(num_samples):
    for num_correct in range(num_samples + 1):
        results = [True] * num_correct + [False] * (num_samples - num_correct)
        for k in range(1, num_samples + 1):
            subsets = list(combinations(results, k))
            share = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(share)


@pytest.mark.parametrize("arguments", [(4, 2, 0), (4, 2, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_cannot_be(arguments):
    with pytest.raises(InvalidInput, match=r"pass@-?\d"):
        pass_at_k(*arguments)


@pytest.fixture(scope="module")
def renderer(service):
    return get_renderer("auto", get_tokenizer(service, MODEL))


@pytest.fixture(scope="module")
def sampler(service):
    return service.create_sampling_client(base_model=MODEL)


async def test_accuracy_is_that_of_the_replies(sampler, renderer):
    heard = []

    async def grade(reply, row):
        heard.append((row["question"], reply))
        return 0.5 * (reply.strip() == row["answer"])

    found = await accuracy(ROWS, renderer, exact_match(), max_tokens=8)(sampler)
    half = await accuracy(ROWS, renderer, grade, max_tokens=8, name="half")(sampler)
    right = sum(
        reply.strip() == row["answer"] for row in ROWS for question, reply in heard if question == row["question"]
    )
    assert len(heard) == len(ROWS)
    assert 0 < found["test/accuracy"] == pytest.approx(right / len(ROWS))
    assert half == {"half/accuracy": pytest.approx(found["test/accuracy"] / 2)}


async def test_more_samples_find_more(sampler, renderer):
    evaluate = accuracy(ROWS, renderer, exact_match(), max_tokens=8, temperature=1.0, num_samples=4, k=[1, 4])
    found = await evaluate(sampler)
    assert found["test/pass@1"] == pytest.approx(found["test/accuracy"])
    assert found["test/pass@4"] > found["test/pass@1"]
    assert await evaluate(sampler) == found, "samples depend on the seed alone"
    with pytest.raises(InvalidInput, match="num_samples 1"):
        accuracy(ROWS, renderer, exact_match(), k=[2])


async def test_nll_is_that_of_a_forward_pass(service, sampler, renderer):
    turns = [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}] for row in ROWS
    ]
    data = [conversation_to_datum(messages, renderer) for messages in turns]
    found = await nll(data)(sampler)
    client = await service.create_lora_training_client_async(MODEL, rank=4)
    output = await client.forward(data, "cross_entropy")
    expected = mean_nll(data, [one["logprobs"].to_numpy() for one in output.loss_fn_outputs])
    assert found["test/nll"] == pytest.approx(expected, abs=2e-3)
    assert found["test/perplexity"] == pytest.approx(math.exp(found["test/nll"]))


async def test_evaluators_run_together_under_different_names(sampler):
    data = [datum_from_tokens(ModelInput.from_ints([5, 6, 7]), [0, 1, 1])]
    found = await together(nll(data), nll(data, name="again"))(sampler)
    assert found["test/nll"] == found["again/nll"]
    with pytest.raises(InvalidInput, match="test/nll"):
        await together(nll(data), nll(data))(sampler)


def test_documented_examples_run(base_url, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "evaluation.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    monkeypatch.setenv("LORIMER_BASE_URL", base_url)
    names = {}
    for block in blocks:
        exec(block, names)
    with names["service"]:
        found = asyncio.run(names["measure"](names["sampler"]))
    assert found.keys() == {"test/accuracy", "test/pass@1", "test/pass@4"}
