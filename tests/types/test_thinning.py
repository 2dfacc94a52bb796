"""Thinning: within its bounds, without losing extremes or gaps, however often and in whatever parts it is done."""

import math

import numpy as np
import pytest

from lorimer.types.thinning import Columns, join, thin


def series(values, steps=None):
    steps = np.arange(len(values)) if steps is None else np.array(steps)
    return Columns(steps, steps / 2, np.array(values, float))


def noise(size, seed=0):
    return np.random.default_rng(seed).normal(size=size)


def test_few_points_stay_as_they_are():
    given = series(noise(50))
    assert thin(given, 50) is given and given.steps_per_bucket == 1


@pytest.mark.parametrize("most", [5, 6, 50, 999])
@pytest.mark.parametrize("apart", [1, 10, 2**33], ids=str)
def test_what_stays_are_points_of_the_series_with_all_extremes(most, apart):
    steps = np.arange(1000) * apart
    given = series(noise(1000), steps)
    kept = thin(given, most)
    assert len(kept.steps) <= most
    places = np.searchsorted(steps, kept.steps)
    assert (kept.values == given.values[places]).all() and (kept.times == given.times[places]).all()
    width = kept.steps_per_bucket
    assert width & (width - 1) == 0
    for bucket in np.unique(steps // width):
        of_all, of_kept = given.values[steps // width == bucket], kept.values[kept.steps // width == bucket]
        ends = [of_all[0], of_all[-1], of_all.min(), of_all.max()]
        assert [of_kept[0], of_kept[-1], of_kept.min(), of_kept.max()] == ends
    finer = (len(np.unique(steps // (width // 2)))) * 5
    assert finer > most, "a finer look would have had room"


def test_what_is_not_finite_stays_once_and_hides_no_extreme():
    values = noise(1000)
    values[100:200] = math.nan
    values[500], values[501], values[700] = math.inf, 9.0, -math.inf
    kept = thin(series(values), 100)
    bad = kept.steps[~np.isfinite(kept.values)].tolist()
    assert {100, 500, 700} <= set(bad) and len(bad) < 15
    assert kept.values[kept.steps == 501] == 9.0
    nothing = thin(series([math.nan] * 1000), 100)
    assert np.isnan(nothing.values).all() and len(nothing.steps) <= 100


def test_a_later_part_corrects_an_earlier_one():
    first, second = series([1.0, 2.0, 3.0]), series([7.0, 8.0], [1, 4])
    assert join([first, second]).points() == [(0, 0.0, 1.0), (1, 0.5, 7.0), (2, 1.0, 3.0), (4, 2.0, 8.0)]
    assert join([series([1.0, 2.0], [3, 3])]).points() == [(3, 1.5, 2.0)]


def test_thinned_again_the_extremes_are_the_same():
    given = series(noise(5000))
    parts = [thin(given.take(given.steps // 700 == part), 100) for part in range(8)]
    again, at_once = thin(join(parts), 200), thin(given, 200)
    assert again.steps_per_bucket == at_once.steps_per_bucket
    for end in (np.minimum, np.maximum):
        assert extremes(again, end) == extremes(at_once, end)


def extremes(kept, end):
    starts = np.flatnonzero(np.diff(kept.steps // kept.steps_per_bucket, prepend=-1))
    return end.reduceat(kept.values, starts).tolist()
