"""Samples of the system: what each range shows, against the naive averages, and how few rows stay."""

import random
from collections import defaultdict

import pytest
from sqlalchemy import func, select

from lorimer.store import system
from lorimer.store.tables import system_samples

START = 1_800_000_000


def naive(samples, period):
    """Return (bucket, mean, maximum) of samples ``(second, mean, maximum)``."""
    buckets = defaultdict(list)
    for at, mean, most in samples:
        buckets[at - at % period].append((mean, most))
    return [(at, sum(m for m, _ in found) / len(found), max(x for _, x in found)) for at, found in buckets.items()]


def test_every_range_shows_the_averages_of_what_was_sampled(store):
    """Seconds are irregular, there is a pause of some minutes, and a metric appears late."""
    rng = random.Random(0)
    at, taken = START, []
    for number in range(500):
        at += rng.choice([5, 5, 6]) + (400 if number == 200 else 0)
        values = {"cpu/machine": rng.random() * 100} | ({"tokens/training m#0": float(number)} if number > 250 else {})
        store.write_now(system.add, "node", at, values)
        taken.append((at, values))
    for name in ("cpu/machine", "tokens/training m#0"):
        raw = [(second, values[name], values[name]) for second, values in taken if name in values]
        minutes = [row for row in naive(raw, 60) if row[0] < at - at % 60]
        tens = [row for row in naive(minutes, 600) if row[0] < at - at % 600]
        hour = store.read_now(system.read, "hour", at)["node", name]
        assert hour == [row for row in raw if row[0] >= at - 3600]
        for chosen, expected in (("day", minutes), ("week", tens)):
            found = store.read_now(system.read, chosen, at)["node", name]
            assert [row[0] for row in found] == [row[0] for row in expected]
            assert [row[1:] for row in found] == [pytest.approx(row[1:]) for row in expected]
    later = store.read_now(system.read, "hour", at, taken[-3][0])
    assert [row[0] for row in later["node", "cpu/machine"]] == [second for second, _ in taken[-2:]]


def test_old_rows_go_and_sources_are_apart(store):
    for at in range(START, START + 3 * 86_400, 300):
        store.write_now(system.add, "a", at, {"cpu/machine": 1.0})
    store.write_now(system.add, "b", at, {"cpu/machine": 3.0})
    rows = store.read_now(
        lambda c: dict(c.execute(select(system_samples.c.period, func.count()).group_by("period")).all())
    )
    assert rows[0] <= 2 * 3600 // 300 + 2 and rows[60] <= 2 * 86_400 // 300 + 2 and rows[600] <= 3 * 86_400 // 600 + 1
    found = store.read_now(system.read, "hour", at)
    assert found["b", "cpu/machine"] == [(at, 3.0, 3.0)] and len(found["a", "cpu/machine"]) == 13
