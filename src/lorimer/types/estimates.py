"""Estimates from graded items: means with 95 % confidence intervals, pass@k, and paired tests between two models.

Items are the unit: several samples of one item are averaged first, because they are not independent. Proportions get
Wilson's interval, other means Student's. Two models are compared on the items that both were asked: by McNemar's exact
test where every item is right or wrong, else by Wilcoxon's signed-rank test.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lorimer.errors import InvalidInput

Method = Literal["wilson", "t"]
Test = Literal["mcnemar", "wilcoxon"]

Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""
MAX_EXACT_DEGREES = 500
"""Above these degrees of freedom the quantile of Student's distribution is taken from its series in 1/v."""
MAX_EXACT_PAIRS = 200
"""Above so many unequal pairs the distribution of Wilcoxon's statistic is taken as normal."""


@dataclass(frozen=True)
class Interval:
    value: float
    std_error: float | None
    """None where one item leaves it open."""
    low: float | None
    high: float | None
    method: Method


@dataclass(frozen=True)
class Pairs:
    """Two models on the same items; differences are the second minus the first."""

    num_items: int
    difference: Interval
    num_first_better: int
    num_second_better: int
    test: Test
    p_value: float
    """Two-sided: how likely so large a difference is if both models are equally good."""


# ── one model ─────────────────────────────────────────────────────────────────────────────────────────


def estimate(grades: NDArray[np.float64]) -> dict[str, Interval]:
    """Return the mean as ``mean``, and with several samples ``pass@k``, of grades with a row for each item.

    For pass@k a grade of 0.5 or more is right; k is 1, 2, 4, ... and the number of samples.
    """
    num_items, num_samples = grades.shape
    if is_binary(grades):
        found = {"mean": proportion(int(grades.sum()), num_items)}
    else:
        found = {"mean": mean(grades.mean(axis=1).tolist(), within=bounds_of(grades))}
    if num_samples > 1:
        right = (grades >= 0.5).sum(axis=1).tolist()
        for k in powers_up_to(num_samples):
            chances = [pass_at_k(num_samples, count, k) for count in right]
            found[f"pass@{k}"] = mean(chances, within=(0.0, 1.0))
    return found


def is_binary(grades: NDArray[np.float64]) -> bool:
    """Return whether each item has one grade, which is 0 or 1."""
    return grades.shape[1] == 1 and bool(np.isin(grades, (0.0, 1.0)).all())


def bounds_of(grades: NDArray[np.float64]) -> tuple[float, float]:
    """Return the bounds of an interval: 0 and 1 if all grades are between them, else none."""
    is_share = grades.min() >= 0 and grades.max() <= 1
    return (0.0, 1.0) if is_share else (-math.inf, math.inf)


def powers_up_to(number: int) -> list[int]:
    return [2**power for power in range(number.bit_length()) if 2**power < number] + [number]


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that one of ``k`` samples is right, when ``num_correct`` of ``num_samples`` were: unbiased."""
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise InvalidInput(
            f"pass@{k} of {num_correct} right in {num_samples} cannot be told; accepted are k from 1 to the number of "
            "samples, and at most as many right ones as samples"
        )
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def proportion(num_right: int, num_items: int) -> Interval:
    """Return a share with Wilson's score interval, which is never empty and never beyond 0 or 1."""
    share = num_right / num_items
    scale = 1 + Z * Z / num_items
    centre = (share + Z * Z / (2 * num_items)) / scale
    half = Z / scale * math.sqrt(share * (1 - share) / num_items + Z * Z / (4 * num_items**2))
    low = 0.0 if num_right == 0 else centre - half
    high = 1.0 if num_right == num_items else centre + half
    return Interval(share, math.sqrt(share * (1 - share) / num_items), low, high, "wilson")


def mean(scores: Sequence[float], within: tuple[float, float] = (-math.inf, math.inf)) -> Interval:
    """Return a mean with Student's interval, cut to the values that it can have."""
    value = math.fsum(scores) / len(scores)
    if len(scores) == 1:
        return Interval(value, None, None, None, "t")
    variance = math.fsum((score - value) ** 2 for score in scores) / (len(scores) - 1)
    std_error = math.sqrt(variance / len(scores))
    half = student_quantile(len(scores) - 1) * std_error
    return Interval(value, std_error, max(value - half, within[0]), min(value + half, within[1]), "t")


def student_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's distribution."""
    if degrees > MAX_EXACT_DEGREES:
        z, v = Z, degrees
        return (
            z
            + (z**3 + z) / (4 * v)
            + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        )
    low, high = 0.0, 13.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < 0.95 else (low, middle)
    return (low + high) / 2


def _within(t: float, degrees: int) -> float:
    """Return the probability that Student's variable is between -t and t, by its finite sum."""
    angle = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    if degrees == 1:
        return 2 * angle / math.pi
    is_odd = degrees % 2
    term = total = cosine if is_odd else 1.0
    for number in range(2 + is_odd, degrees - 1, 2):
        term *= cosine * cosine * (number - 1) / number
        total += term
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


# ── two models ────────────────────────────────────────────────────────────────────────────────────────


def compare(first: NDArray[np.float64], second: NDArray[np.float64]) -> Pairs:
    """Compare the grades of two models; row n of both is the same item."""
    differences = second.mean(axis=1) - first.mean(axis=1)
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    test: Test = "mcnemar" if is_binary(first) and is_binary(second) else "wilcoxon"
    p_value = mcnemar(worse, better) if test == "mcnemar" else wilcoxon(differences)
    low, high = bounds_of(np.concatenate([first.ravel(), second.ravel()]))
    within = (-1.0, 1.0) if high == 1 and low == 0 else (low, high)
    return Pairs(len(differences), mean(differences.tolist(), within=within), worse, better, test, p_value)


def mcnemar(num_first: int, num_second: int) -> float:
    """Return the exact two-sided p-value of McNemar's test for items that only one of two models got right."""
    total = num_first + num_second
    tail = sum(math.comb(total, count) for count in range(min(num_first, num_second) + 1))
    return float(min(1.0, 2 * tail / 2**total)) if total < 1000 else min(1.0, 2 * _log_tail(total, num_first))


def _log_tail(total: int, num_first: int) -> float:
    """Return the tail of the binomial distribution through logarithms, where its terms exceed a float."""
    fewer = min(num_first, total - num_first)
    logs = [
        math.lgamma(total + 1) - math.lgamma(count + 1) - math.lgamma(total - count + 1) - total * math.log(2)
        for count in range(fewer + 1)
    ]
    return math.fsum(math.exp(each) for each in logs)


def wilcoxon(differences: NDArray[np.float64]) -> float:
    """Return the two-sided p-value of the signed-rank test; zeros are left out, equal sizes share their mean rank."""
    unequal = differences[differences != 0]
    if not len(unequal):
        return 1.0
    # Means of grades that are equal on paper can differ in the last bits.
    sizes = np.round(np.abs(unequal), 12)
    _, places, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    doubled = (2 * last - counts + 1)[places]  # twice the mean rank, an integer
    plus, total = int(doubled[unequal > 0].sum()), int(doubled.sum())
    extreme = min(plus, total - plus)
    if len(unequal) <= MAX_EXACT_PAIRS:
        return float(min(1.0, 2 * _sign_flips(doubled.tolist(), total)[: extreme + 1].sum()))
    deviation = math.sqrt(float((doubled.astype(np.float64) ** 2).sum()) / 4)
    return math.erfc((total / 2 - extreme) / deviation / math.sqrt(2))


def _sign_flips(doubled: list[int], total: int) -> NDArray[np.float64]:
    """Return the probability of each sum of positive ranks when every sign is as likely as the other."""
    chances = np.zeros(total + 1)
    chances[0] = 1.0
    for rank in doubled:
        moved = np.zeros_like(chances)
        moved[rank:] = chances[: total + 1 - rank]
        chances = (chances + moved) / 2
    return chances
