"""Samples within a grammar: nothing outside it is drawn, the probabilities are those of what is left."""

import json
import time

import numpy as np
import pytest
import torch

from lorimer.engine.messages import Done, Failed, SampleRequest, SamplingParams
from lorimer.engine.model.base_model import load_tokenizer
from lorimer.engine.sampling.constraints import Grammars
from lorimer.engine.sampling.sampler import Sampler
from lorimer.errors import InvalidInput, Unsupported
from lorimer.models.debug import make_debug_model
from tests.engine.reference import open_pair

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 20}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = f"start: %json {json.dumps(SCHEMA)}"


@pytest.fixture(scope="module")
def llama():
    return open_pair("llama")[0]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("debug")
    make_debug_model(directory)
    return load_tokenizer(directory)


def sample(sampler, grammar, num_samples=1, **params):
    message = SampleRequest(
        request_id="r",
        prompt=np.array([5, 6, 7]),
        num_samples=num_samples,
        params=SamplingParams(**{"max_tokens": 60, "seed": 1, **params}),
        topk_sample_logprobs=4,
        grammar=grammar,
    )
    sampler.add(message, None)
    while not sampler.is_idle:
        for reply in sampler.step():
            if isinstance(reply, Done | Failed):
                return reply
    raise AssertionError("no answer")


def make_sampler(model, tokenizer, memory_bytes=1 << 26):
    return Sampler(model, tokenizer, [EOS], memory_bytes, 64)


@pytest.mark.parametrize("memory_bytes", [1 << 26, 60_000], ids=["roomy", "short-of-memory"])
def test_every_sample_is_in_the_language(llama, tokenizer, memory_bytes):
    reply = sample(make_sampler(llama, tokenizer, memory_bytes), GRAMMAR, num_samples=16)
    found = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in reply.result.sequences]
    for text, sequence in zip(found, reply.result.sequences, strict=True):
        value = json.loads(text)
        assert value.keys() == {"a", "b"} and 0 <= value["a"] <= 20 and value["b"] in ("x", "yy")
        assert sequence.stop_reason == "stop"
    assert len(set(found)) > 3


def test_probabilities_are_of_what_the_grammar_leaves(llama, tokenizer):
    sequence = sample(make_sampler(llama, tokenizer), 'start: "a" | "b" | "he"').result.sequences[0]
    allowed = {tokenizer.convert_tokens_to_ids(text) for text in ("a", "b", "h", "he")}
    top = sequence.topk_logprobs
    assert set(top.token_ids[0].tolist()) == allowed
    assert np.exp(top.logprobs[0]).sum() == pytest.approx(1, abs=1e-5)


def test_a_free_request_beside_a_confined_one_is_not_touched(llama, tokenizer):
    def run(with_other):
        sampler = make_sampler(llama, tokenizer)
        params = SamplingParams(max_tokens=20, seed=3, stop=[])
        sampler.add(SampleRequest(request_id="free", prompt=np.array([9, 8]), params=params), None)
        if with_other:
            params = SamplingParams(max_tokens=40, seed=4)
            sampler.add(
                SampleRequest(request_id="bound", prompt=np.array([5, 6]), params=params, grammar=GRAMMAR), None
            )
        results = {}
        while not sampler.is_idle:
            results |= {r.request_id: r.result for r in sampler.step() if isinstance(r, Done)}
        return results["free"].sequences[0].tokens.tolist()

    assert run(with_other=True) == run(with_other=False)


def test_a_greedy_sample_takes_the_likeliest_that_is_allowed(llama, tokenizer):
    sequence = sample(make_sampler(llama, tokenizer), 'start: "aa" | "bb"', temperature=0).result.sequences[0]
    assert sequence.tokens[0] == sequence.topk_logprobs.token_ids[0, 0]
    assert tokenizer.decode(sequence.tokens, skip_special_tokens=True) in ("aa", "bb")


def test_the_end_comes_without_a_token_for_it_where_nothing_else_can_follow(llama, tokenizer):
    sequence = sample(make_sampler(llama, tokenizer), 'start: "abc"').result.sequences[0]
    assert tokenizer.decode(sequence.tokens, skip_special_tokens=False) == "abc"


@pytest.mark.parametrize("grammar", ["start: nothing", 'start: %json {"type": "objet"}', 'start: "'])
def test_a_wrong_grammar_is_refused_with_the_reason(llama, tokenizer, grammar):
    with pytest.raises(InvalidInput, match="the grammar is refused"):
        sample(make_sampler(llama, tokenizer), grammar)


def test_hostile_patterns_cost_little(tokenizer):
    """Patterns that take a backtracking matcher years: a few hundredths of a second, or the end of the sample."""
    patterns = ["(a+)+$", "(a|aa)*b", "(.*){1,500}x", "(.*a.*){1,200}", "((a?){50}){50}a", "a{1,100000}"]
    endless = ["(a{1,1000}){1,1000}", ".*" * 2000]
    grammars = Grammars(tokenizer, len(tokenizer), [EOS])
    for pattern in patterns + endless:
        began, reason = time.process_time(), ""
        constraint = grammars.compile(f"start: %json {json.dumps({'type': 'string', 'pattern': pattern})}")
        for token in tokenizer.encode('"' + "a" * 300):
            constraint.allowed(len(tokenizer))
            reason = reason or constraint.advance(token)
        assert ("too many expressions" in reason) == (pattern in endless), (pattern, reason)
        assert time.process_time() - began < 2, pattern


def test_a_model_without_a_tokenizer_refuses_grammars(llama):
    with pytest.raises(Unsupported, match="no fast tokenizer"):
        sample(make_sampler(llama, None), GRAMMAR)


def test_ids_beyond_the_tokenizer_are_never_drawn(tokenizer):
    grammars = Grammars(tokenizer, 400, [EOS])
    allowed = grammars.compile("start: /.*/").allowed(400)
    assert allowed.shape == (400,) and not allowed[len(tokenizer) :].any() and allowed[EOS]
    assert torch.from_numpy(allowed).dtype == torch.bool


def test_a_grammar_used_again_begins_anew(tokenizer):
    grammars = Grammars(tokenizer, len(tokenizer), [EOS])
    first = grammars.compile('start: "ab"')
    assert first.advance(tokenizer.convert_tokens_to_ids("a")) == ""
    again = grammars.compile('start: "ab"').allowed(len(tokenizer))
    assert np.flatnonzero(again).tolist() == [tokenizer.convert_tokens_to_ids("a")]
    assert "cannot be followed" in first.advance(EOS)
    for number in range(40):
        grammars.compile(f'start: "{number}"')
    assert len(grammars._compiled) == 32
