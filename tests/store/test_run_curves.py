"""Curves over the parts of a run, and their summary, against the naive joining of all points."""

import math
import random

import pytest

from lorimer.store import metrics, run_curves, tracking
from lorimer.store.metrics import ALL, Choice
from lorimer.store.run_curves import JoinedCursor
from lorimer.types.runs import RunIdentity
from tests.store.runs import make_part
from tests.store.test_tracking import save, steps


def report(c, part, values):
    reports, names = metrics.encode_reports(
        [metrics.Report(step, 1.0, {"nll": value}) for step, value in values.items()]
    )
    metrics.report(c, part.model_id, reports, names, max_names=9, max_values=9999)


def read(store, run_id, after=JoinedCursor(), limit=10_000, choice=ALL):  # noqa: B008 (it cannot be changed)
    return store.read_now(run_curves.read, run_id, after, limit, choice)


def values_of(found, source, name):
    columns = found.reading.series[source, name]
    return dict(zip(columns.steps.tolist(), columns.values.tolist(), strict=True))


@pytest.fixture
def parts(store, session):
    """A run of six steps, killed, resumed from its checkpoint after step 4 and trained to step 7."""
    first = store.write_now(make_part, session, 0, RunIdentity(run_key="k"))
    store.write_now(steps, first, 1, 6)
    store.write_now(report, first, {step: 100.0 + step for step in range(6)})
    path = store.write_now(save, first, "four", 9)
    second = store.write_now(make_part, session, 1, RunIdentity(run_key="k", first_step=4), path)
    store.write_now(steps, second, 1, 3)
    store.write_now(report, second, {step: 200.0 + step for step in range(4, 7)})
    return first, second


def test_a_resumed_run_has_one_curve(store, parts):
    found = read(store, parts[0].run_id)
    assert values_of(found, "engine", "loss:sum") == {0: 9, 1: 8, 2: 7, 3: 6, 4: 9, 5: 8, 6: 7}
    assert values_of(found, "client", "nll") == {0: 100, 1: 101, 2: 102, 3: 103, 4: 204, 5: 205, 6: 206}
    assert (found.is_restarted, found.reading.has_more) == (False, False)
    middle = read(store, parts[0].run_id, choice=Choice(steps=(4, 5)))
    assert values_of(middle, "engine", "loss:sum") == {4: 9, 5: 8}
    assert values_of(middle, "client", "nll") == {4: 204, 5: 205}


def test_pages_join_to_the_same_curve(store, parts):
    whole = read(store, parts[0].run_id)
    for limit in (1, 3, 5):
        joined, cursor, has_more = {}, JoinedCursor(), True
        while has_more:
            page = read(store, parts[0].run_id, cursor, limit)
            for key, columns in page.reading.series.items():
                joined.setdefault(key, {}).update(zip(columns.steps.tolist(), columns.values.tolist(), strict=True))
            cursor, has_more = page.cursor, page.reading.has_more
        assert {key: sorted(one) for key, one in joined.items()} == {
            key: columns.steps.tolist() for key, columns in whole.reading.series.items()
        }
        assert joined["client", "nll"] == values_of(whole, "client", "nll")


def test_a_reader_follows_and_starts_again_with_a_new_part(store, session, parts):
    run_id = parts[0].run_id
    cursor = read(store, run_id).cursor
    store.write_now(report, parts[1], {7: 1.0})
    more = read(store, run_id, cursor)
    assert values_of(more, "client", "nll") == {7: 1.0}
    store.write_now(make_part, session, 2, RunIdentity(run_key="k", first_step=0))
    anew = read(store, run_id, more.cursor)
    assert anew.is_restarted and anew.reading.series == {}  # it begins from the first step
    assert not read(store, run_id, anew.cursor).is_restarted


def summary_of(store, run_id):
    states = store.read_now(run_curves.advance, run_id)
    store.write_now(run_curves.store_summary, run_id, states.parts)
    assert not store.read_now(run_curves.advance, run_id).is_changed
    return {one.name: one for one in run_curves.combined([state for _, state in states.parts])}


def test_the_summary_is_that_of_the_joined_curve(store, parts):
    found = summary_of(store, parts[0].run_id)
    loss, nll = found["loss:sum"], found["nll"]
    assert (loss.last, loss.last_step, loss.min, loss.min_step, loss.max, loss.max_step) == (7, 6, 6, 3, 9, 0)
    assert (nll.last, nll.last_step, nll.min, nll.min_step, nll.max, nll.max_step) == (206, 6, 100, 0, 206, 6)
    assert store.read_now(tracking.get, parts[0].run_id).optim_steps == 7


def test_an_unfinished_step_does_not_stay_in_the_summary(store, session):
    part = store.write_now(make_part, session, 0)

    def add(c, number, value):
        metrics.add_operation(c, part.model_id, number, {"loss:sum": value}, num_datums=1, is_step=False)

    store.write_now(add, 1, 5.0)
    assert summary_of(store, part.run_id)["loss:sum"].min == 5.0
    store.write_now(add, 2, 4.0)
    found = summary_of(store, part.run_id)["loss:sum"]
    assert (found.min, found.max, found.last) == (9.0, 9.0, 9.0)


def test_a_value_reported_again_replaces_the_old_one(store, session):
    part = store.write_now(make_part, session, 0)
    store.write_now(report, part, {0: 1.0, 1: 9.0, 2: math.nan})
    found = summary_of(store, part.run_id)["nll"]
    assert (found.last, found.last_step, found.min, found.max) == (9.0, 1, 1.0, 9.0)
    store.write_now(report, part, {0: 7.0})
    assert summary_of(store, part.run_id)["nll"].min == 7.0


def test_summaries_equal_the_naive_ones_for_random_histories(store, session):
    rng = random.Random(0)
    part = store.write_now(make_part, session, 0)
    known: dict[int, float] = {}
    for _ in range(40):
        new = {rng.randrange(30): rng.choice([math.inf, rng.random()]) for _ in range(rng.randrange(1, 4))}
        store.write_now(report, part, new)
        known |= new
        finite = {step: value for step, value in known.items() if math.isfinite(value)}
        found = summary_of(store, part.run_id).get("nll")
        if finite:
            assert (found.last, found.last_step) == (finite[max(finite)], max(finite))
            assert (found.min, found.max) == (min(finite.values()), max(finite.values()))


def test_runs_with_new_metrics_are_found(store, session, parts):
    changed, newest = store.read_now(run_curves.changed_runs, 0)
    assert changed == [parts[0].run_id]
    assert store.read_now(run_curves.changed_runs, newest) == ([], newest)
    alone = store.write_now(make_part, session, 9)
    store.write_now(report, alone, {0: 1.0})
    found, newest = store.read_now(run_curves.unsummarised_runs)
    assert sorted(found) == sorted([parts[0].run_id, alone.run_id])
    summary_of(store, alone.run_id)
    assert store.read_now(run_curves.unsummarised_runs) == ([parts[0].run_id], newest)
