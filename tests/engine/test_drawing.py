"""Draws, truncation and seeds on distributions small enough to know the answer."""

import shutil

import numpy as np
import pytest
import torch

from lorimer.engine.native.rowwise import find
from lorimer.engine.sampling.drawing import (
    DrawRules,
    Rule,
    best,
    choose,
    derive_seed,
    draw,
    scaled_logprobs,
    uniforms,
)

compiled = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def drawn(probabilities, numbers, temperature=1.0, top_k=-1, top_p=1.0):
    logprobs = torch.tensor([probabilities] * len(numbers)).log()
    rules = DrawRules.of([Rule(temperature, top_k, top_p)] * len(numbers), logprobs.device)
    return draw(logprobs, rules, np.array(numbers)).tolist()


def test_a_number_picks_the_token_whose_share_of_the_unit_interval_it_falls_in():
    assert drawn([0.2, 0.0, 0.5, 0.3], [0.0, 0.19, 0.21, 0.69, 0.71, 0.999999]) == [0, 0, 2, 2, 3, 3]


def test_a_token_without_probability_is_never_drawn_even_at_the_ends():
    assert drawn([0.0, 1.0, 0.0], [0.0, 1 - 2**-53]) == [1, 1]


def test_vocabularies_larger_than_a_block_are_covered():
    probabilities = torch.full((1000,), 1e-9)
    probabilities[[3, 255, 256, 999]] = 0.25
    assert drawn(probabilities.tolist(), [0.1, 0.4, 0.6, 0.9]) == [3, 255, 256, 999]


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [(2, 1.0, {0, 1}), (-1, 0.5, {0, 1}), (-1, 0.39, {0}), (3, 0.99, {0, 1, 2}), (1, 0.1, {0}), (0, 1.0, {0, 1, 2, 3})],
)
def test_truncation_keeps_the_likeliest(top_k, top_p, expected):
    numbers = np.linspace(0, 0.9999, 200)
    assert set(drawn([0.4, 0.3, 0.2, 0.1], numbers, top_k=top_k, top_p=top_p)) == expected


def test_rows_are_truncated_each_by_its_own_rule(monkeypatch):
    """Against each row alone, in parts that hold two rows, with ties, zeros and rows without a rule."""
    monkeypatch.setattr("lorimer.engine.sampling.drawing._MAX_SORTED", 2 * 40)
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(9, 40, generator=generator).mul_(20).floor_().div_(20).softmax(-1)
    probabilities[:, 30:] = 0
    rules = [(1.0, k, p) for k, p in [(3, 1.0), (-1, 0.5), (0, 1.0), (5, 0.7), (100, 1.0), (1, 0.2), (-1, 1e-9)]]
    rules += [(1.0, 40, 0.999), (1.0, 7, 1.0)]
    for number in np.linspace(0, 0.9999, 50):
        found = draw(probabilities.log(), DrawRules.of(rules, torch.device("cpu")), np.full(9, number))
        for row, (_, top_k, top_p) in enumerate(rules):
            order = torch.sort(probabilities[row], descending=True, stable=True)
            kept = order.values[: top_k if top_k > 0 else None].double()
            size = int((kept.cumsum(0) < top_p * kept.sum()).sum()) + 1
            cut = torch.zeros(40)
            cut[order.indices[: min(size, len(kept))]] = order.values[: min(size, len(kept))]
            alone = draw(cut.log()[None], DrawRules.of([Rule(1.0, -1, 1.0)], torch.device("cpu")), np.array([number]))
            assert found[row] == alone[0]


def test_temperature_zero_takes_the_largest_whatever_the_number():
    assert drawn([0.3, 0.4, 0.3], [0.0, 0.5, 0.99], temperature=0) == [1, 1, 1]


def test_scaling_by_temperature():
    logits = torch.tensor([[1.0, 2.0, 4.0]] * 3)
    scaled = scaled_logprobs(logits.clone(), DrawRules.of([Rule(t, -1, 1.0) for t in (1.0, 0.5, 0.0)], logits.device))
    for row, divisor in enumerate((1.0, 0.5, 1.0)):
        assert torch.allclose(scaled[row], (logits[row] / divisor).log_softmax(-1), atol=1e-6)


def test_a_vanishing_temperature_stays_finite_where_it_matters():
    rules = DrawRules.of([Rule(1e-40, -1, 1.0)], torch.device("cpu"))
    scaled = scaled_logprobs(torch.tensor([[1.0, 2.0]]), rules)
    assert scaled[0, 1] == 0


@compiled
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("temperature", "token"), [(1e-50, 2), (1e-44, 2), (3e38, 1)])
def test_temperatures_at_the_ends_of_float32_are_right(temperature, token):
    logits, rules = torch.tensor([[1.0, 2.0, 4.0]]), [Rule(temperature, -1, 1.0)]
    tokens, chosen, _, values = choose(logits, rules, np.array([0.5]), 3, find("cpu", torch.float32))
    assert tokens.tolist() == [token]
    assert torch.cat([chosen, values[0]]).isnan().sum() == 0


def test_uniforms_are_uniform_and_repeatable():
    numbers = uniforms([5] * 10_000, list(range(10_000)))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, 10, (0, 1))[0]
    assert abs(counts - 1000).max() < 130
    assert (numbers == uniforms([5] * 10_000, list(range(10_000)))).all()
    assert (numbers != uniforms([6] * 10_000, list(range(10_000)))).all()
    # The same on every machine: written down once.
    assert uniforms([0, 1], [0, 0]).tolist() == pytest.approx([0.28176129772258496, 0.8628561488610587], abs=0)


def test_seeds_of_siblings_differ():
    seeds = {derive_seed(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 2500
    assert derive_seed(-1, 0) == derive_seed(2**64 - 1, 0)


def test_best_tokens_come_in_order():
    tokens, values = best(torch.tensor([[0.1, 0.5, 0.4]]).log(), 2)
    assert tokens.tolist() == [[1, 2]]
    assert values.exp().tolist() == [pytest.approx([0.5, 0.4])]


@compiled
@pytest.mark.parametrize("k", [0, 3])
def test_compiled_functions_draw_what_torch_draws_and_each_row_by_its_own_rule(k):
    native = find("cpu", torch.float32)
    assert not isinstance(native, str), native
    logits = 3 * torch.randn(8, 600, generator=torch.Generator().manual_seed(0))
    rules = [Rule(*rule) for rule in [(1, -1, 1), (0, -1, 1), (0.7, 5, 1), (1, -1, 0.5), (2, 0, 1), (0.5, -1, 1)] * 2][
        :8
    ]
    numbers = uniforms(list(range(8)), [0] * 8)
    mixed = choose(logits.clone(), rules, numbers, k, native)
    expected = choose(logits.clone(), rules, numbers, k, None)
    assert torch.equal(mixed[0], expected[0])
    for found, wanted in zip(mixed[1:], expected[1:], strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)
    if k:
        is_drawn = mixed[2] == mixed[0][:, None]
        assert is_drawn.any()
        assert torch.equal(mixed[3][is_drawn], mixed[1][is_drawn.any(1)]), "one token has one log probability"
    for i in range(8):
        alone = choose(logits[i : i + 1].clone(), rules[i : i + 1], numbers[i : i + 1], k, native)
        assert all(torch.equal(a, b[i : i + 1]) for a, b in zip(alone, mixed, strict=True))
