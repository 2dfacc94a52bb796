"""Metrics of runs: steps worked out from operations, reports that correct one another, and reading on from a cursor."""

import math

import pytest
from sqlalchemy import delete, func, select

from lorimer.errors import TooLarge
from lorimer.store import metrics
from lorimer.store.metrics import Choice, Report, encode_reports
from lorimer.store.tables import metric_names, metric_totals, runs
from lorimer.store.tables import metrics as table

ROOM = {"max_names": 1000, "max_values": 1_000_000}


def report(c, model_id, reports, **room):
    return metrics.report(c, model_id, *encode_reports(reports), **room)


@pytest.fixture
def measure(store, run):
    """Commits an operation: one that is called a step ends one."""

    def add(seq_id, values, num_datums=1, is_step=False):
        store.write_now(metrics.add_operation, run.model_id, seq_id, values, num_datums=num_datums, is_step=is_step)

    return add


@pytest.fixture
def tell(store, run):
    """Reports the values of a step."""

    def tell(step, at=0.0, /, **values):
        return store.write_now(report, run.model_id, [Report(step, at, values)], **ROOM)

    return tell


@pytest.fixture
def read(store, run):
    """The points of each series, without their times, and the cursor."""

    def read(after=metrics.START, limit=10_000, **choice):
        found = store.read_now(metrics.read, run.model_id, after, limit, Choice(**choice))
        return plain(found), found.cursor

    return read


def plain(found):
    return {
        f"{source}/{name}": [(step, value) for step, _, value in one.points()]
        for (source, name), one in found.series.items()
    }


def test_a_step_is_the_number_of_optimiser_steps_before(measure, read):
    measure(1, {"loss:sum": 8.0})
    measure(2, {"grad_norm": 0.5}, is_step=True)
    measure(4, {"loss:sum": 6.0})  # 3 was a save
    assert read()[0] == {"engine/loss:sum": [(0, 8.0), (1, 6.0)], "engine/grad_norm": [(0, 0.5)]}
    measure(5, {"grad_norm": 0.25}, is_step=True)
    measure(6, {"grad_norm": 0.0}, is_step=True)
    assert read()[0]["engine/grad_norm"] == [(0, 0.5), (1, 0.25), (2, 0.0)]


def test_parts_of_a_step_are_told_as_one(measure, read):
    measure(1, {"loss:sum": 8.0, "ratio:mean": 1.0, "a:min": 3.0, "a:max": 3.0, "odd": 1.0}, num_datums=3)
    measure(2, {"loss:sum": 2.0, "ratio:mean": 2.0, "a:min": 4.0, "a:max": 4.0, "odd": 2.0}, num_datums=1)
    measure(3, {"loss:sum": 1.0}, num_datums=4)
    assert read()[0] == {
        "engine/loss:sum": [(0, 11.0)],
        "engine/ratio:mean": [(0, 1.25)],
        "engine/a:min": [(0, 3.0)],
        "engine/a:max": [(0, 4.0)],
        "engine/odd": [(0, 2.0)],
    }


def test_a_cursor_gives_what_is_new_or_written_again(measure, tell, read):
    measure(1, {"loss:sum": 8.0})
    tell(1, reward=0.5, length=7.0)
    tell(2, reward=0.75)
    _, cursor = read()
    assert read(cursor) == ({}, cursor)
    measure(2, {"loss:sum": 1.0})
    measure(3, {"grad_norm": 0.5}, is_step=True)
    tell(1, reward=0.25)
    changed, cursor = read(cursor)
    assert changed == {
        "engine/loss:sum": [(0, 9.0)],
        "engine/grad_norm": [(0, 0.5)],
        "client/reward": [(1, 0.25)],
    }
    measure(4, {"loss:sum": 3.0})
    assert read(cursor)[0] == {"engine/loss:sum": [(1, 3.0)]}
    everything, _ = read()
    assert everything["client/reward"] == [(1, 0.25), (2, 0.75)]
    assert everything["client/length"] == [(1, 7.0)]
    assert everything["engine/loss:sum"] == [(0, 9.0), (1, 3.0)]


def test_operations_on_record_in_another_order_end_in_the_right_steps(measure, read):
    measure(1, {"loss:sum": 1.0})
    measure(3, {"loss:sum": 3.0})  # of the second step, whose first is not committed yet
    before, cursor = read()
    assert before == {"engine/loss:sum": [(0, 4.0)]}
    measure(2, {"grad_norm": 0.5}, is_step=True)
    changed, cursor = read(cursor)
    assert changed == read()[0] == {"engine/loss:sum": [(0, 1.0), (1, 3.0)], "engine/grad_norm": [(0, 0.5)]}
    measure(6, {"grad_norm": 0.125}, is_step=True)
    changed, cursor = read(cursor)
    assert changed == {"engine/grad_norm": [(1, 0.125)]}
    measure(4, {"grad_norm": 0.25}, is_step=True)  # before one that the reader has counted
    measure(5, {"loss:sum": 5.0})
    changed, cursor = read(cursor)
    assert changed["engine/grad_norm"] == [(1, 0.25), (2, 0.125)] and changed["engine/loss:sum"][-1] == (2, 5.0)
    measure(7, {"loss:sum": 7.0})
    assert read(cursor)[0] == {"engine/loss:sum": [(3, 7.0)]}
    assert read()[1][1:] == (6, 3)


@pytest.mark.parametrize("limit", [1, 2, 3, 300])
def test_pages_give_what_one_reading_gives(measure, tell, read, limit, monkeypatch):
    monkeypatch.setattr(metrics, "FIRST_ROWS_READ", 2)
    for step in range(1, 5):
        measure(3 * step - 2, {"loss:sum": float(step)})
        measure(3 * step - 1, {"loss:sum": 0.5})
        measure(3 * step, {"grad_norm": 1.0}, is_step=True)
        tell(step, reward=float(step))
    tell(1, reward=9.0)
    whole, end = read()
    pages: dict[str, dict[int, float]] = {}
    cursor = metrics.START
    while cursor < end:
        found, after = read(cursor, limit)
        assert after > cursor
        for name, points in found.items():
            pages.setdefault(name, {}).update(points)
        cursor = after
    assert {name: sorted(points.items()) for name, points in pages.items()} == whole


def test_one_reading_is_bounded_by_its_size(store, run, tell, monkeypatch):
    monkeypatch.setattr(metrics, "MAX_BYTES", 40)  # an entry of these has 23
    for step in range(4):
        tell(step, a=1.0, b=2.0)
    first = store.read_now(metrics.read, run.model_id)
    assert first.has_more and [len(one.steps) for one in first.series.values()] == [2, 2]
    rest = store.read_now(metrics.read, run.model_id, first.cursor)
    assert not rest.has_more and [one.steps[-1] for one in rest.series.values()] == [3, 3]


def train(store, run, num_steps, first=0):
    """Steps of two parts each and a report, with a spike and a gap in the middle; written as one."""
    middle = first + num_steps // 2

    def write(c):
        for step in range(first, first + num_steps):
            loss = 50.0 if step == middle else 1.0 + step % 7 / 8
            for part in range(2):
                add_part(c, 3 * step + 1 + part, {"loss:sum": loss / 2, "ratio:mean": 1.0})
            add_part(c, 3 * step + 3, {"grad_norm": math.nan if step == middle else step / 4}, is_step=True)
        reports = [Report(step, float(step), {"reward": step / 8}) for step in range(first, first + num_steps)]
        report(c, run.model_id, reports, **ROOM)

    def add_part(c, number, values, is_step=False):
        metrics.add_operation(c, run.model_id, number, values, num_datums=2, is_step=is_step)

    store.write_now(write)


def test_a_long_run_is_thinned_without_losing_spikes_and_gaps(store, run, tell, measure, read):
    train(store, run, 400)
    whole, end = read()
    assert all([step for step, _ in points] == list(range(400)) for points in whole.values())
    found = store.read_now(metrics.read, run.model_id, metrics.START, 10_000, Choice(max_points=50))
    assert (found.cursor, found.has_more, found.num_entries) == (end, False, 1600)
    for key, one in found.series.items():
        points = whole["/".join(key)]
        assert 14 <= len(one.steps) <= 50 and one.steps_per_bucket == 64
        assert [(step, value) for step, _, value in one.points() if not math.isnan(value)] == [
            point for point in points if point[0] in one.steps and not math.isnan(point[1])
        ]
        assert (one.steps[0], one.steps[-1]) == (0, 399)
    thinned = plain(found)
    assert (200, 50.0) in thinned["engine/loss:sum"]
    assert [step for step, value in thinned["engine/grad_norm"] if math.isnan(value)] == [200]
    tell(400, reward=7.0)
    tell(3, reward=8.0)
    measure(1201, {"loss:sum": 3.0})
    assert read(found.cursor, max_points=50)[0] == {
        "client/reward": [(3, 8.0), (400, 7.0)],
        "engine/loss:sum": [(400, 3.0)],
    }


def test_thinned_in_parts_is_thinned_as_one(store, run, monkeypatch):
    train(store, run, 400)
    choice = Choice(max_points=60)
    at_once = store.read_now(metrics.read, run.model_id, metrics.START, 10_000, choice)
    monkeypatch.setattr(metrics, "MAX_BYTES_TO_THIN", 2000)
    found = store.read_now(metrics.read, run.model_id, metrics.START, 10_000, choice)
    num_parts = 1
    while found.has_more:
        assert max(len(one.steps) for one in found.series.values()) <= 60
        found = store.read_now(metrics.read_on, run.model_id, found, 10_000, choice)
        num_parts += 1
    assert num_parts > 5 and (found.cursor, found.num_entries) == (at_once.cursor, at_once.num_entries)
    for key, one in found.series.items():
        other = at_once.series[key]
        assert one.steps_per_bucket <= other.steps_per_bucket
        assert {point[0]: repr(point) for point in one.points()}.items() >= {
            point[0]: repr(point) for point in other.points()
        }.items()


def test_many_metrics_share_the_room_of_an_answer(store, run, monkeypatch):
    monkeypatch.setattr(metrics, "MAX_THINNED_POINTS", 100)
    reports = [Report(step, 0.0, {f"m{n}": float(step) for n in range(10)}) for step in range(100)]
    store.write_now(report, run.model_id, reports, **ROOM)
    found = store.read_now(metrics.read, run.model_id, metrics.START, 10_000, Choice(max_points=50))
    assert len(found.series) == 10 and sum(len(one.steps) for one in found.series.values()) <= 100
    one = store.read_now(metrics.read, run.model_id, metrics.START, 10_000, Choice(frozenset(["m3"]), None, 50))
    assert list(one.series) == [("client", "m3")] and 10 < len(one.series["client", "m3"].steps) <= 50


@pytest.mark.parametrize("limit", [1, 7, 10_000])
@pytest.mark.parametrize("steps", [(0, 0), (1, 1), (5, 9), (18, 40), (0, 2**53 - 1), (30, 40)], ids=str)
def test_a_range_of_steps_is_given_in_full(store, run, read, measure, steps, limit):
    train(store, run, 20)
    measure(61, {"loss:sum": 3.0})  # of a step that has not ended
    whole, _ = read()
    wanted = {name: [point for point in points if steps[0] <= point[0] <= steps[1]] for name, points in whole.items()}
    found, cursor, has_more = {}, metrics.START, True
    while has_more:
        page = store.read_now(metrics.read, run.model_id, cursor, limit, Choice(steps=steps))
        assert page.num_entries <= limit
        for name, points in plain(page).items():
            found.setdefault(name, {}).update(points)
        cursor, has_more = page.cursor, page.has_more
    assert {name: repr(sorted(points.items())) for name, points in found.items()} == {
        name: repr(points) for name, points in wanted.items() if points
    }


def test_a_range_is_right_in_whatever_order_steps_came_on_record(measure, read):
    for number in (1, 2, 5, 6, 3, 4, 8, 7):
        measure(number, {"loss:sum": float(number)}, is_step=number % 2 == 0)
    assert read()[0] == {"engine/loss:sum": [(0, 3.0), (1, 7.0), (2, 11.0), (3, 15.0)]}
    for step, value in read()[0]["engine/loss:sum"]:
        assert read(steps=(step, step))[0] == {"engine/loss:sum": [(step, value)]}


def test_numbers_that_are_not_finite_stay_what_they_are(measure, tell, read):
    measure(1, {"loss:sum": math.inf})
    measure(2, {"loss:sum": -math.inf})
    tell(1, reward=math.nan, most=math.inf, least=-math.inf)
    found, _ = read()
    assert [math.isnan(found[name][0][1]) for name in ("client/reward", "engine/loss:sum")] == [True, True]
    assert (found["client/most"], found["client/least"]) == ([(1, math.inf)], [(1, -math.inf)])


def test_times_are_those_of_the_report(store, run, tell):
    tell(1, 1767225600.25, reward=1.0)
    found = store.read_now(metrics.read, run.model_id)
    assert found.series["client", "reward"].points() == [(1, 1767225600.25, 1.0)]


def test_the_last_of_one_report_counts(store, run, read):
    reports = [Report(1, 0.0, {"a": 1.0, "b": 1.0}), Report(1, 0.0, {"a": 2.0}), Report(2, 0.0, {})]
    assert store.write_now(report, run.model_id, reports, **ROOM) == 2
    assert read()[0] == {"client/a": [(1, 2.0)], "client/b": [(1, 1.0)]}


def test_repetition_takes_no_room(store, tell, read):
    for value in range(20):
        tell(1, reward=float(value), length=float(value))
        tell(1, reward=-1.0)
    rows = store.read_now(lambda c: c.execute(select(func.count()).select_from(table)).scalar_one())
    assert rows == 2
    assert read()[0] == {"client/reward": [(1, -1.0)], "client/length": [(1, 19.0)]}


def test_room_is_limited_by_values_and_names_and_a_refusal_keeps_nothing(store, run, read):
    def tell(step, **values):
        store.write_now(report, run.model_id, [Report(step, 0.0, values)], max_names=3, max_values=4)

    tell(1, a=1.0, b=1.0)
    tell(2, a=2.0, b=2.0)
    tell(2, a=3.0, b=3.0)  # in place of what is there
    tell(2, b=4.0)
    before = read()
    with pytest.raises(TooLarge, match=r"would have 5 reported values; at most 4 is .* \(max_metric_values_per_run\)"):
        tell(3, a=1.0)
    with pytest.raises(TooLarge, match=r"would have 4 reported metrics; at most 3 is .* \(max_metric_names_per_run\)"):
        tell(1, c=1.0, d=1.0)
    assert read() == before


def test_metrics_go_with_their_run_and_only_theirs(store, run, session, tell, measure):
    from lorimer.store.runs import create_run

    shape = {"rank": 8, "train_attn": True, "train_mlp": True, "train_unembed": True, "optimizer_type": "adamw"}
    names = {"session_id": session.session_id, "user_id": session.user_id, "base_model": "tiny", "model_seq_id": 1}
    other = store.write_now(create_run, project_id=None, seed=None, user_metadata={}, **shape, **names)
    store.write_now(report, other.model_id, [Report(1, 0.0, {"reward": 5.0})], **ROOM)
    tell(1, reward=1.0)
    measure(1, {"loss:sum": 1.0})
    store.write_now(lambda c: c.execute(delete(runs).where(runs.c.model_id == run.model_id)))
    assert store.read_now(metrics.read, run.model_id).series == {}
    for kept in (metric_names, metric_totals):
        assert store.read_now(lambda c, of=kept: list(c.execute(select(of.c.model_id)).scalars())) == [other.model_id]
    assert store.read_now(metrics.read, other.model_id).series["client", "reward"].points()[0][2] == 5.0
