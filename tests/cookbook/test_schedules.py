"""Learning rates over the steps of a run."""

import pytest

from lorimer.cookbook.schedules import learning_rate


def rates(schedule, total=4, warmup=0):
    return [learning_rate(schedule, step, total, 1.0, warmup) for step in range(total)]


def test_schedules():
    assert rates("constant") == [1, 1, 1, 1]
    assert rates("linear") == [1, 0.75, 0.5, 0.25]
    assert rates("cosine") == pytest.approx([1, 0.8535534, 0.5, 0.1464466])


def test_warmup_rises_to_the_rate():
    assert rates("constant", 5, 3) == [0.25, 0.5, 0.75, 1, 1]
    assert rates("linear", 4, 2) == pytest.approx([1 / 3, 2 / 3, 1, 0.5])
    assert rates("linear", 2, 2) == pytest.approx([1 / 3, 2 / 3])


def test_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="'step'; accepted are constant, linear, cosine"):
        learning_rate("step", 0, 1, 1.0)
