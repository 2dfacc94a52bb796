"""Methods by their names, and the search of a learning rate."""

import asyncio
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorimer.cookbook.methods import FIELDS, RATE_STEP, Contender, parse, search
from lorimer.errors import InvalidInput
from lorimer.types.optim import OPTIMIZERS, make_params

LORA, FULL = 1e-3, 1e-4


def test_names() -> None:
    assert parse("lora-8", LORA, FULL) == Contender("lora-8", "lora", 8, "adamw", False, LORA)
    assert parse("loraplus-4", LORA, FULL) == Contender("loraplus-4", "lora", 4, "adamw", True, LORA / 4)
    assert parse(" full", LORA, FULL) == Contender("full", "full", 1, "adamw", False, FULL)
    assert parse("full-muon", LORA, FULL) == Contender("full-muon", "full", 1, "muon", False, FULL)
    assert parse("lora-2-sgd@0.5", LORA, FULL) == Contender("lora-2-sgd", "lora", 2, "sgd", False, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lora", "'lora' is not a method"),
        ("lora-0", "is not a method"),
        ("lora-x", "is not a method"),
        ("full-8", "is not a method"),
        ("full-schedule_free_adamw", "is not a method"),
        ("full-muon-muon", "is not a method"),
        ("full@fast", "is not a method"),
        ("dora-8", "accepted are lora-RANK, loraplus-RANK and full"),
        ("full-sgd", "sgd has no rule for its learning rate; give one, as in full-sgd@0.1"),
        ("full@0", "a number above 0 is accepted"),
        ("full@nan", "a number above 0 is accepted"),
    ],
)
def test_what_is_no_method_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse(text, LORA, FULL)


@pytest.mark.parametrize("optimizer", FIELDS)
def test_fields_are_those_of_the_optimizer_without_weight_decay(optimizer: str) -> None:
    fields = parse(f"loraplus-2-{optimizer}@1e-3", LORA, FULL).fields(0.25)
    params = make_params(optimizer, learning_rate=0.25, **fields)
    assert isinstance(params, OPTIMIZERS[optimizer])
    assert params.weight_decay == 0  # type: ignore[attr-defined]
    assert getattr(params, "adamw_learning_rate", 0.25) == 0.25


@given(st.integers(-4, 4), st.integers(1, 9), st.floats(1e-6, 1.0))
def test_search_ends_at_an_inner_rate_or_when_it_may_try_no_more(best: int, max_rates: int, start: float) -> None:
    tried: list[float] = []

    async def measure(rate: float) -> float:
        tried.append(rate)
        return abs(math.log(rate / start, RATE_STEP) - best) if best < 4 else math.inf

    found = asyncio.run(search(measure, start, max_rates))
    assert sorted(tried) == list(found) and len(set(tried)) == len(tried), "none is tried twice, and they are sorted"
    assert len(found) <= max(max_rates, 1)
    assert start in found
    rates = list(found)
    for smaller, larger in itertools.pairwise(rates):
        assert larger / smaller == pytest.approx(RATE_STEP)
    chosen = min(found, key=lambda rate: found[rate])
    assert chosen not in (rates[0], rates[-1]) or len(found) == max_rates
