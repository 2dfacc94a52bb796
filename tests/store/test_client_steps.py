"""The engine's metrics at the steps of a client that takes several or no optimizer steps in one of its own."""

import random
from collections import defaultdict

import numpy as np
import pytest

from lorimer.store import metrics, run_curves
from lorimer.store.client_steps import ClientSteps
from lorimer.store.metrics import Choice, Report, encode_reports
from lorimer.types.runs import RunIdentity
from tests.store.runs import make_part
from tests.store.test_metrics import plain
from tests.store.test_tracking import save

ROOM = {"max_names": 99, "max_values": 10_000}


class History:
    """A training run whose steps have 0 to 3 optimizer steps of 1 or 2 passes each, and what it should look like."""

    def __init__(self, store, model_id, seed, first_step=0, is_late=False):
        """With ``is_late`` reports come after operations of later steps; then every step has an optimizer step."""
        self.store, self.model_id, self.rng = store, model_id, random.Random(seed)
        self.is_late, self.late = is_late, []
        self.number, self.count, self.step = 0, 0, first_step
        self.losses: dict[int, list[float]] = defaultdict(list)
        self.norms: dict[int, float] = {}

    def measure(self, values, is_step=False):
        self.number += 1
        self.store.write_now(metrics.add_operation, self.model_id, self.number, values, num_datums=1, is_step=is_step)

    def advance(self, pause=lambda: None):
        """Train one step of the client, and report it. ``pause`` is called between operations."""
        for _ in range(self.rng.choice([1, 1, 2, 3] if self.is_late else [0, 1, 1, 2, 3])):
            for _ in range(self.rng.choice([1, 2])):
                loss = self.rng.random()
                self.losses[self.step].append(loss)
                self.measure({"loss:sum": loss})
                pause()
            self.norms[self.step] = self.rng.random()
            self.measure({"grad_norm": self.norms[self.step]}, is_step=True)
            self.count += 1
            pause()
        self.late.append(Report(self.step, 0.0, {"reward": float(self.step)}, self.count))
        self.step += 1
        if not (self.is_late and self.rng.random() < 0.6):
            self.report()
            pause()

    def report(self):
        reports, self.late = self.late, []
        self.store.write_now(self._report, reports)

    def _report(self, c, reports):
        metrics.report(c, self.model_id, *encode_reports(reports), **ROOM)

    def expected(self, first=0, last=10**9):
        return {
            "engine/loss:sum": {
                step: pytest.approx(sum(x)) for step, x in self.losses.items() if first <= step <= last
            },
            "engine/grad_norm": {step: value for step, value in self.norms.items() if first <= step <= last},
        }


def engine_points(found):
    return {name: dict(points) for name, points in plain(found).items() if name.startswith("engine/")}


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_way_of_reading_finds_the_steps_of_the_client(store, run, seed, is_late):
    history = History(store, run.model_id, seed, is_late=is_late)
    cursor, followed = metrics.START, defaultdict(dict)

    def follow():
        nonlocal cursor
        if history.rng.random() < 0.4:
            return
        has_more = True
        while has_more:
            found = store.read_now(metrics.read, run.model_id, cursor, history.rng.choice([1, 3, 50]))
            cursor, has_more = found.cursor, found.has_more
            for name, points in engine_points(found).items():
                followed[name] |= points

    history.advance()  # a client that counts otherwise says so with its first step
    history.report()
    for _ in range(25):
        history.advance(follow)
    history.report()
    whole = store.read_now(metrics.read, run.model_id)
    assert engine_points(whole) == history.expected()
    assert whole.cursor.num_steps == history.count
    for first, last in ((0, 0), (3, 9), (20, 40), (0, 10**9)):
        found = engine_points(store.read_now(metrics.read, run.model_id, choice=Choice(steps=(first, last))))
        assert found == {name: points for name, points in history.expected(first, last).items() if points}
    rest = store.read_now(metrics.read, run.model_id, cursor)
    for name, points in engine_points(rest).items():
        followed[name] |= points
    assert dict(followed) == history.expected()


def test_the_time_decides_only_between_steps_without_an_optimizer_step():
    numbers, counts, entry_ids = (np.array(values) for values in ([3, 4, 5, 6], [0, 2, 2, 3], [1, 2, 3, 4]))
    steps = ClientSteps(numbers, counts, entry_ids, times=np.arange(4.0))
    for optim_steps, before, meanwhile, after in ((0, 3, 4, 4), (1, 4, 4, 4), (2, 5, 6, 6), (3, 7, 7, 7), (9, 7, 7, 7)):
        found = tuple(steps.num_done(optim_steps, at) for at in (-1.0, 2.5, 99.0))
        assert found == (before, meanwhile, after), optim_steps


def test_what_is_not_reported_yet_belongs_to_the_next_step(store, run):
    history = History(store, run.model_id, 1)
    history.advance()
    history.measure({"loss:sum": 2.0})
    history.measure({"grad_norm": 0.5}, is_step=True)
    history.measure({"loss:sum": 3.0})
    found = engine_points(store.read_now(metrics.read, run.model_id))
    assert (found["engine/loss:sum"][1], found["engine/grad_norm"][1]) == (5.0, 0.5)


def test_a_resumed_run_and_its_summary_have_the_clients_steps(store, session):
    first = store.write_now(make_part, session, 0, RunIdentity(run_key="k"))
    before = History(store, first.model_id, 3)
    for _ in range(8):
        before.advance()
    path = store.write_now(save, first, "eight")
    second = store.write_now(make_part, session, 1, RunIdentity(run_key="k", first_step=6), path)
    after = History(store, second.model_id, 4, first_step=6)
    for _ in range(5):
        after.advance()
    found = store.read_now(run_curves.read, first.run_id, run_curves.JoinedCursor(), 10_000, metrics.ALL)
    expected = {name: before.expected(0, 5)[name] | points for name, points in after.expected().items()}
    assert engine_points(found.reading) == expected
    states = store.read_now(run_curves.advance, first.run_id)
    summary = {one.name: one for one in run_curves.combined([state for _, state in states.parts])}
    norms = {**{step: value for step, value in before.norms.items() if step < 6}, **after.norms}
    last = max(norms)
    assert (summary["grad_norm"].last, summary["grad_norm"].last_step) == (norms[last], last)
    assert summary["grad_norm"].min == min(norms.values())
