"""Estimates against published values, exact fractions and the enumeration of every outcome."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorimer.types.estimates import compare, estimate, mcnemar, mean, proportion, student_quantile, wilcoxon

STUDENT = {
    1: 12.706204736,
    2: 4.302652730,
    3: 3.182446305,
    4: 2.776445105,
    9: 2.262157163,
    10: 2.228138852,
    29: 2.045229642,
    30: 2.042272456,
    60: 2.000297822,
    100: 1.983971519,
    120: 1.979930405,
    1000: 1.962339081,
}
"""The 97.5 % quantiles of the published tables."""


def column(*grades):
    return np.array(grades, np.float64).reshape(-1, 1)


def test_quantiles_of_students_distribution_are_those_of_the_tables():
    assert {v: student_quantile(v) for v in STUDENT} == pytest.approx(STUDENT, abs=2e-9)


@pytest.mark.parametrize(
    ("num_right", "num_items", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_are_those_of_newcombe_1998(num_right, num_items, low, high):
    found = proportion(num_right, num_items)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)
    mirrored = proportion(num_items - num_right, num_items)
    assert mirrored.low is not None and mirrored.high is not None
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_ends_of_a_wilson_interval_are_one_quantile_away(numbers):
    """The definition: at either end, the observed share is z standard deviations of that end away."""
    num_right, num_items = numbers
    found = proportion(num_right, num_items)
    for end in (found.low, found.high):
        assert end is not None
        distance = 1.959963984540054**2 * end * (1 - end) / num_items
        if 0 < end < 1:
            assert (found.value - end) ** 2 == pytest.approx(distance, rel=1e-9)


def test_interval_of_a_mean():
    found = mean([4.0, 6.0, 5.0, 7.0])  # deviation sqrt(5/3), three degrees of freedom
    half = 3.182446305 * math.sqrt(5 / 3 / 4)
    assert (found.value, found.std_error, found.low, found.high) == pytest.approx(
        (5.5, math.sqrt(5 / 12), 5.5 - half, 5.5 + half)
    )
    assert mean([3.0]).low is None
    assert mean([0.0, 1.0], within=(0.0, 1.0)).high == 1.0


def test_samples_of_an_item_are_averaged_first():
    grades = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], np.float64)
    found = estimate(grades)
    assert list(found) == ["mean", "pass@1", "pass@2", "pass@4"]
    assert found["mean"].value == found["pass@1"].value == pytest.approx(0.25)
    assert found["mean"].std_error == pytest.approx(0.25 / math.sqrt(3))
    assert found["pass@2"].value == pytest.approx((1 - Fraction(1, 6) + 1 - Fraction(3, 6)) / 3)
    assert found["pass@4"].value == pytest.approx(2 / 3)
    assert estimate(column(1, 0, 1))["mean"] == proportion(2, 3)
    assert estimate(column(1, 0.5))["mean"].method == "t"


@given(st.integers(0, 12), st.integers(0, 12))
def test_mcnemar_counts_every_outcome_of_fair_coins(num_first, num_second):
    total = num_first + num_second
    extreme = [heads for heads in range(total + 1) if abs(heads - total / 2) >= abs(num_first - total / 2)]
    share = sum(math.comb(total, heads) for heads in extreme) / 2**total
    assert mcnemar(num_first, num_second) == pytest.approx(share)


@pytest.mark.parametrize(("num_first", "num_second"), [(499, 500), (600, 500), (3000, 3100), (1500, 0)])
def test_mcnemar_of_many_items(num_first, num_second):
    total = num_first + num_second
    tail = sum(math.comb(total, count) for count in range(min(num_first, num_second) + 1))
    exact = min(Fraction(1), Fraction(2 * tail, 2**total))
    assert mcnemar(num_first, num_second) == pytest.approx(float(exact), rel=1e-9, abs=1e-300)
    assert mcnemar(num_second, num_first) == mcnemar(num_first, num_second)


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_wilcoxon_counts_every_choice_of_signs(differences):
    """Whatever ties and zeros there are."""
    found = wilcoxon(np.array(differences, np.float64))
    sizes = [abs(each) for each in differences if each]
    ranks: list[float] = [sum(o < s for o in sizes) + (sum(o == s for o in sizes) + 1) / 2 for s in sizes]
    observed = sum(rank for rank, each in zip(ranks, filter(None, differences), strict=True) if each > 0)
    middle = sum(ranks) / 2
    sums = [
        sum(r for r, sign in zip(ranks, signs, strict=True) if sign) for signs in product((0, 1), repeat=len(ranks))
    ]
    share = sum(abs(each - middle) >= abs(observed - middle) for each in sums) / len(sums)
    assert found == pytest.approx(share)


def test_wilcoxon_has_the_critical_values_of_the_tables():
    """Two-sided 5 %: the largest sum of ranks that is significant is 2 of 7, 8 of 10, 52 of 20, 137 of 30 pairs."""
    for num_pairs, critical in ((7, 2), (10, 8), (20, 52), (30, 137)):
        for extreme, is_significant in ((critical, True), (critical + 1, False)):
            signs, left = [], extreme
            for rank in range(num_pairs, 0, -1):
                signs.append(rank if rank <= left else -rank)
                left -= rank if rank <= left else 0
            assert (wilcoxon(np.array(signs, np.float64)) <= 0.05) is is_significant


def test_the_normal_distribution_continues_the_exact_one():
    rng = np.random.default_rng(0)
    for shift in (0.0, 0.1, 0.2):
        differences = rng.normal(shift, 1, 200).round(1)
        more = np.append(differences, [1e-3, -1e-3])
        assert wilcoxon(more) == pytest.approx(wilcoxon(differences), rel=0.05, abs=1e-3)


def test_comparison_is_paired():
    first, second = column(1, 1, 0, 0, 0, 0, 1), column(1, 1, 1, 1, 1, 1, 0)
    found = compare(first, second)
    assert (found.test, found.num_first_better, found.num_second_better) == ("mcnemar", 1, 4)
    assert found.p_value == pytest.approx(2 * 6 / 32)
    assert found.difference.value == pytest.approx(3 / 7)
    swapped = compare(second, first)
    assert (swapped.p_value, swapped.difference.value) == pytest.approx((found.p_value, -3 / 7))
    scores = compare(column(3, 5, 6), column(4, 7, 6))
    assert (scores.test, scores.p_value, scores.num_items) == ("wilcoxon", 0.5, 3)
