"""Tokens per second, of the last minute."""

import pytest

from lorimer.scheduler import rates
from lorimer.scheduler.rates import TokenRate


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(rates.time, "monotonic", lambda: now[0])
    return now


def test_the_last_minute_counts(clock):
    rate = TokenRate()
    assert rate.per_second == 0.0
    for _ in range(10):
        rate.add(100)
        clock[0] += 0.5
    assert rate.total == 1000
    assert rate.per_second == pytest.approx(1000 / 5)
    clock[0] += 25.0
    assert rate.per_second == pytest.approx(1000 / 30)
    clock[0] += 60.0
    assert (rate.per_second, rate.total) == (0.0, 1000)


def test_nothing_is_no_beginning(clock):
    rate = TokenRate()
    rate.add(0)
    clock[0] += 30.0
    rate.add(300)
    clock[0] += 2.0
    assert rate.per_second == 150.0


def test_years_of_work_take_no_room(clock):
    rate = TokenRate()
    for _ in range(10_000):
        rate.add(7)
        clock[0] += 0.9
    assert len(rate._recent) <= 62
    assert rate.per_second == pytest.approx(7 / 0.9, rel=0.05)
