"""Tokens per second, of the last minute."""

import pytest

from lorimer.scheduler.stats import TokenRate


def test_the_last_minute_counts():
    rate, now = TokenRate(), 1000.0
    assert rate.per_second(now) == 0.0
    for _ in range(10):
        rate.add(100, now)
        now += 0.5
    assert rate.total == 1000
    assert rate.per_second(now) == pytest.approx(1000 / 5)
    assert rate.per_second(now + 25.0) == pytest.approx(1000 / 30)
    assert (rate.per_second(now + 85.0), rate.total) == (0.0, 1000)


def test_nothing_is_no_beginning():
    rate = TokenRate()
    rate.add(0, 0.0)
    rate.add(300, 30.0)
    assert rate.per_second(32.0) == 150.0


def test_years_of_work_take_no_room():
    rate, now = TokenRate(), 0.0
    for _ in range(10_000):
        rate.add(7, now)
        now += 0.9
    assert len(rate._recent) <= 62
    assert rate.per_second(now) == pytest.approx(7 / 0.9, rel=0.05)
