"""Parts of many steps are reduced together to what they are reduced to one by one."""

import math

import numpy as np
import pytest

from lorimer.store.metric_series import reduce_parts
from lorimer.types.metrics import reduce_metric


@pytest.mark.parametrize("name", ["a:sum", "a:mean", "a:min", "a:max", "a:slack", "a:unique", "grad_norm"])
def test_many_steps_at_once_are_as_one_by_one(name):
    random = np.random.default_rng(0)
    sizes = random.integers(1, 12, 200)
    starts = np.cumsum(sizes) - sizes
    values, weights = random.normal(size=sizes.sum()) * 1e3, random.integers(1, 9, sizes.sum())
    values[[5, 50, 51]] = math.nan, math.inf, -math.inf
    expected = [
        reduce_metric(name, values[a : a + n].tolist(), weights[a : a + n].tolist()) if n > 1 else values[a]
        for a, n in zip(starts, sizes, strict=True)
    ]
    assert reduce_parts(name, values, weights, starts) == pytest.approx(expected, rel=1e-12, nan_ok=True)
