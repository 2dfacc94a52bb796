"""Decoding with an adapter merged into the weights: the same log probabilities, used only where it may be."""

import numpy as np
import pytest
import torch

from lorimer.engine.adapters.adapters import snapshot
from lorimer.engine.model.base_model import BaseModel
from lorimer.engine.model.device import Device
from lorimer.engine.sampling.merged import PATIENCE, MergedAdapter
from tests.engine.reference import DENSE, MOE, make_adapter, open_pair
from tests.engine.test_sampling import finish, make_sampler, prompt_of, request, trainer_logprobs

LONG = 2 * PATIENCE


@pytest.mark.parametrize(
    ("architecture", "flags"),
    [
        *((name, {}) for name in DENSE),
        ("phi3", {"use_rslora": True}),
        ("phi3", {"use_dora": True}),
        ("qwen2", {"use_dora": True}),
    ],
)
def test_logprobs_of_merged_steps_are_the_trainers(architecture, flags):
    model, _ = open_pair(architecture)
    adapter = make_adapter(model, rank=8, **flags)
    sampler = make_sampler(model)
    prompt = prompt_of(12)
    result = finish(sampler, request("r", prompt, "a", 3, max_tokens=LONG), adapters={"a": snapshot(adapter)})["r"]
    assert sampler._merged._matrices
    for sequence in result.sequences:
        expected = trainer_logprobs(model, np.concatenate([prompt, sequence.tokens]), adapter)
        assert abs(sequence.logprobs - expected[len(prompt) - 1 :]).max() < 1e-4


def test_an_adapter_of_some_layers_is_merged_into_those():
    model, _ = open_pair("llama")
    adapter = make_adapter(model, train_mlp=False, train_unembed=False)
    sampler = make_sampler(model)
    prompt = prompt_of(12)
    result = finish(sampler, request("r", prompt, "a", max_tokens=LONG), adapters={"a": snapshot(adapter)})["r"]
    assert id(model.head) not in sampler._merged._matrices
    tokens = result.sequences[0].tokens
    expected = trainer_logprobs(model, np.concatenate([prompt, tokens]), adapter)[len(prompt) - 1 :]
    assert abs(result.sequences[0].logprobs - expected).max() < 1e-4


def test_other_weights_replace_the_merged_ones():
    model, _ = open_pair("llama")
    adapters = {name: make_adapter(model, seed=seed) for seed, name in enumerate("ab")}
    frozen = {name: snapshot(adapter) for name, adapter in adapters.items()}
    sampler = make_sampler(model)
    prompt = prompt_of(12)
    for name, adapter in adapters.items():
        result = finish(sampler, request(name, prompt, name, max_tokens=LONG), adapters=frozen)[name]
        assert sampler._merged._weights == name
        tokens = result.sequences[0].tokens
        expected = trainer_logprobs(model, np.concatenate([prompt, tokens]), adapter)[len(prompt) - 1 :]
        assert abs(result.sequences[0].logprobs - expected).max() < 1e-4


def test_nothing_is_merged_beside_other_weights_or_for_a_few_tokens():
    model, _ = open_pair("llama")
    adapters = {"a": snapshot(make_adapter(model)), "b": snapshot(make_adapter(model, seed=1))}
    sampler = make_sampler(model)
    both = [request(name or "base", prompt_of(9), name, max_tokens=LONG) for name in ("a", "b", None)]
    finish(sampler, *both, request("few", prompt_of(5), "a", max_tokens=PATIENCE // 2), adapters=adapters)
    assert sampler._merged._matrices is None


@pytest.mark.parametrize("architecture", MOE)
def test_experts_are_not_merged(architecture):
    assert not MergedAdapter(open_pair(architecture)[0], 1 << 30).is_possible


def test_merging_needs_room_and_exact_sums():
    model, plain = open_pair("llama")
    possible = MergedAdapter(model, 1 << 30)
    assert possible.is_possible
    assert not MergedAdapter(model, possible.memory_bytes - 1).is_possible
    rounded = BaseModel(plain.bfloat16(), Device(torch.device("cpu"), torch.bfloat16, 1 << 30), name="llama")
    assert not MergedAdapter(rounded, 1 << 30).is_possible
