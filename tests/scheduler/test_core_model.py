"""The core against any order of events, and kills after any of its effects.

After each story everything is let go on, and `World.check` looks: every acknowledged operation was applied exactly once
and in order, every waiter got one answer, nobody starves. The last tests plant a bug of each kind, which must be found.
"""

import ast
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lorimer.scheduler import core, events, journal, policies, runs, snapshots
from lorimer.scheduler.policies import EarlyForward
from lorimer.scheduler.runs import PHASE_STEPS, STATUS_STEPS, Operation, RunState
from lorimer.store.runs import Run
from tests.scheduler.test_eviction import ROW as VALUES
from tests.scheduler.world import LIMITS, World

ROW = Run(model_id="run", **VALUES)

NUM_KILLS = int(os.environ.get("LORIMER_CORE_KILLS", "10000"))


class Core(RuleBasedStateMachine):
    """Hypothesis chooses what happens, and makes the story short when something goes wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(num_tenants=2)

    tenant = st.integers(0, 1)

    @rule(tenant=tenant, count=st.integers(1, 3), is_reversed=st.booleans())
    def submit(self, tenant, count, is_reversed):
        one = self.world.tenants[tenant]
        if 0 not in one.acknowledged:
            self.world.submit(one, 0)
            return
        numbers = range(one.next_seq, one.next_seq + count)
        one.next_seq += count
        for seq_id in reversed(numbers) if is_reversed else numbers:
            self.world.submit(one, seq_id)

    @rule(tenant=tenant, chance=st.randoms(use_true_random=False))
    def retry(self, tenant, chance: random.Random):
        one = self.world.tenants[tenant]
        self.world.submit(one, chance.randrange(one.next_seq))

    @rule()
    def sample(self):
        self.world.submit_sample()

    @rule(max_events=st.integers(1, 4))
    def turn(self, max_events):
        self.world.turn(max_events)

    @precondition(lambda self: self.world.commits or self.world.reads)
    @rule()
    def commit(self):
        self.world.apply_commit()
        self.world.apply_read()

    @precondition(lambda self: self.world.commands)
    @rule()
    def compute(self):
        self.world.compute()

    @rule()
    def engine_ready(self):
        self.world.engine_ready()

    @rule()
    def kill_engine(self):
        self.world.kill_engine()

    @rule(num_effects=st.integers(0, 5), num_commits=st.integers(0, 3))
    def kill_server(self, num_effects, num_commits):
        self.world.kill_server(num_effects, num_commits)

    @invariant()
    def engine_holds_no_more_runs_than_it_has_room_for(self):
        assert len(self.world.core.held) <= self.world.limits.max_loaded_runs

    def teardown(self):
        self.world.settle()
        self.world.check()


TestCore = Core.TestCase
TestCore.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def story(seed: int) -> World:
    """A story of many kills, chosen by chance."""
    world = World(seed, num_tenants=3)
    for _ in range(120):
        world.step(kill_rate=0.05)
    world.settle()
    world.check()
    return world


def test_ten_thousand_kills_lose_double_and_reorder_nothing():
    num_kills = num_engine_kills = num_early = seed = 0
    while num_kills < NUM_KILLS:
        world = story(seed)
        num_kills += world.num_kills
        num_engine_kills += world.num_engine_kills
        num_early += world.num_early
        seed += 1
    assert num_engine_kills > NUM_KILLS / 4
    assert num_early > NUM_KILLS / 100


# ── bugs that must be found ───────────────────────────────────────────────────────────────────────────


def find_bug(num_stories: int = 300) -> str:
    for seed in range(num_stories):
        try:
            story(seed)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_running_samples_are_counted_by_sequences():
    """`max_running_samples` sequences run simultaneously; a request of more than that runs alone."""
    world = World(limits=replace(LIMITS, max_running_samples=3))
    for num_samples in (2, 2, 1, 9):
        world.submit_sample(num_samples)

    def running() -> list[int]:
        while world.turn() or world.apply_commit() or world.engine_ready():
            pass
        return [one.request.num_samples for one in world.samples.values() if one.status == "running"]

    seen = [running()]
    while seen[-1]:
        assert world.compute()
        seen.append(running())
    assert [9] in seen, seen
    assert all(sum(now) <= 3 or now == [9] for now in seen), seen
    assert max(map(len, seen)) == 2, seen


def test_a_lost_effect_is_found(monkeypatch):
    """Every fifth finished operation is not sent to the database."""
    commit, count = core.Core.commit, [0]

    def forgetful(self, transaction, run=None):
        if isinstance(transaction, journal.FinishOperation):
            count[0] += 1
            if count[0] % 5 == 0:
                return
        commit(self, transaction, run)

    monkeypatch.setattr(core.Core, "commit", forgetful)
    assert "never" in find_bug()


def test_an_operation_applied_twice_is_found(monkeypatch):
    """A snapshot says that it lacks the last operation it holds, which is then replayed on top of it."""
    save = snapshots._save

    def modest(core, run, saving):
        save(core, run, saving)
        saving.seq_id -= 1

    monkeypatch.setattr(snapshots, "_save", modest)
    assert find_bug()


def test_a_wrong_order_is_found(monkeypatch):
    """Operations leave in the order of their arrival."""

    def add(self, operation):
        operation.advance("queued")
        self.ready.append(operation)
        self.next_seq = max(self.next_seq, operation.seq_id + 1)

    monkeypatch.setattr(runs.Lane, "add", add)
    assert find_bug()


def test_a_reply_used_before_the_commit_is_found(monkeypatch):
    """What an engine computed early is answered without waiting for the row."""
    replied = EarlyForward.replied

    def hasty(self, flight):
        is_early = flight is self._flight
        replied(self, flight)
        if is_early:
            for run in self._core.runs.values():
                for operation in run.operations.values():
                    if operation.early is flight:
                        self._core.emit(events.Resolve(operation, runs.Outcome("done")))

    monkeypatch.setattr(EarlyForward, "replied", hasty)
    assert find_bug()


def test_a_forgotten_waiter_is_found(monkeypatch):
    """A sample that an engine died over is not enqueued again."""
    enqueue = core.Sampling._enqueue

    def forgetful(self, sample, *, first=False):
        if not first:
            enqueue(self, sample)

    monkeypatch.setattr(core.Sampling, "_enqueue", forgetful)
    assert "never answered" in find_bug()


def test_a_starved_run_is_found(monkeypatch):
    """Runs that wait are never let in while others are loaded."""
    policy = tuple(one for one in policies.POLICIES if one.decide is not policies.evict_for_waiting)
    monkeypatch.setattr(policies, "POLICIES", policy)
    assert find_bug()


def test_policies_without_anything_to_decide_are_not_called(monkeypatch):
    called = []
    spies = [one._replace(decide=lambda core, one=one: called.append(one.decide)) for one in policies.POLICIES]
    monkeypatch.setattr(policies, "POLICIES", spies)
    world = World(num_tenants=0)
    world.core.handle([events.Cancelled("unknown")], world.now)
    assert called == []
    world.submit_sample()
    while world.turn() or world.apply_commit():
        pass
    assert called == [policies.send_samples]


# ── the tables ────────────────────────────────────────────────────────────────────────────────────────


def table(heading: str) -> dict[str, set[str]]:
    """The steps that the docstring of ``runs.py`` lists under a heading."""
    text = runs.__doc__.split(heading)[1]
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if not line.startswith("    ") or "→" not in line:
            if found and line.strip():
                break
            continue
        left, right = line.split("→", 1)
        for before in left.split(","):
            for after in right.split("  ")[0].split(","):
                found.setdefault(before.strip(), set()).add(after.strip())
    return found


@pytest.mark.parametrize(
    ("heading", "steps", "make", "walk"),
    [
        (
            "``Operation.status``",
            STATUS_STEPS,
            lambda at: Operation("", "", "", "", "", 1, "forward", status=at),
            "advance",
        ),
        ("``RunState.phase``", PHASE_STEPS, lambda at: RunState(ROW, 0.0, phase=at), "enter"),
    ],
)
def test_only_the_steps_of_the_table_can_be_taken(heading, steps, make, walk):
    assert table(heading) == {before: set(after) for before, after in steps.items() if after}
    for before, allowed in steps.items():
        for after in steps:
            if after in allowed:
                getattr(make(before), walk)(after)
            else:
                with pytest.raises(AssertionError):
                    getattr(make(before), walk)(after)


def assigned_fields(source: str) -> list[str]:
    """Return assignments to fields of ``run`` or to ``status``, wherever they stand."""
    targets: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):
            targets += [part for target in node.targets for part in getattr(target, "elts", [target])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets.append(node.target)
    fields = [target for target in targets if isinstance(target, ast.Attribute)]
    return [ast.unparse(one) for one in fields if ast.unparse(one.value) in ("run", "state") or one.attr == "status"]


def test_runs_and_operations_are_changed_in_one_module():
    assert assigned_fields("run.saving, x = None, 1\noperation.status = 'done'") == ["run.saving", "operation.status"]
    found = {path.name: assigned_fields(path.read_text()) for path in Path(runs.__file__).parent.glob("*.py")}
    assert [name for name, fields in found.items() if fields] == ["runs.py"]
