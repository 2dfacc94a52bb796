"""Token buckets: a burst, then a rate, and never more of them than memory is meant for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorimer.server.buckets import TokenBuckets


@pytest.fixture
def clock(monkeypatch):
    times = [1000.0]
    monkeypatch.setattr("lorimer.server.buckets.time.monotonic", lambda: times[0])
    return times


def test_a_burst_then_the_rate(clock):
    buckets = TokenBuckets(burst_seconds=10)
    assert [buckets.take("a", 2) for _ in range(20)] == [0] * 20
    assert buckets.take("a", 2) == pytest.approx(0.5)
    assert buckets.take("b", 2) == 0, "each has its own"
    clock[0] += 0.5
    assert [buckets.take("a", 2) for _ in range(2)] == [0, pytest.approx(0.5)]
    clock[0] += 3600
    assert sum(buckets.take("a", 2) == 0 for _ in range(100)) == 20


@given(st.lists(st.floats(0, 5), min_size=1, max_size=50), st.floats(0.1, 20))
def test_no_more_are_let_than_the_burst_and_the_rate(pauses, rate):
    with pytest.MonkeyPatch.context() as patch:
        now = [0.0]
        patch.setattr("lorimer.server.buckets.time.monotonic", lambda: now[0])
        buckets, taken = TokenBuckets(burst_seconds=3), 0
        for pause in pauses:
            now[0] += pause
            wait = buckets.take("a", rate)
            taken += wait == 0
            assert taken <= buckets.capacity(rate) + now[0] * rate + 1e-6
            if wait:
                now[0] += wait * (1 + 1e-9)
                assert buckets.take("a", rate) < 1e-6
                taken += 1


def test_memory_is_bounded(clock):
    buckets = TokenBuckets(burst_seconds=10, max_buckets=100)
    for number in range(1000):
        assert buckets.take(f"caller {number}", 1) == 0
    assert len(buckets) == 100
    for _ in range(20):
        buckets.take("greedy", 1)
        buckets.take(f"other {_}", 1)
    assert buckets.take("greedy", 1) > 0, "those in use stay"
