"""Which runs an engine holds when there are more than it has room for."""

import pytest

from lorimer.scheduler import restoring
from lorimer.scheduler.events import Expired
from lorimer.scheduler.policies import Eviction, runs_to_evict
from lorimer.scheduler.runs import Lane, Operation, RunState
from lorimer.store.runs import NO_SNAPSHOT, Run
from lorimer.store.values import utc_now
from tests.scheduler.runs import STEPS, assert_equal_weights, submit, undisturbed
from tests.scheduler.service import service

pytestmark = pytest.mark.asyncio(loop_scope="session")

NOW = 1000.0
NEVER = Eviction()
ROW = {
    "session_id": "s",
    "user_id": "u",
    "project_id": None,
    "model_seq_id": 0,
    "base_model": "debug",
    "rank": 4,
    "seed": 0,
    **dict.fromkeys(("train_attn", "train_mlp", "train_unembed"), True),
    "optimizer_type": "adamw",
    "user_metadata": {},
    **dict.fromkeys(("created_at", "last_request_at"), utc_now()),
    "snapshot_seq": NO_SNAPSHOT,
    **dict.fromkeys(("snapshot_name", "newest_seq", "newest_name", "corrupted")),
    "is_unloaded": False,
    "replica": None,
}


def held(name, *, loaded=0.0, used=NOW, busy=True, **values):
    """A run in the engine since ``loaded``, whose client was last heard of when it was ``used``."""
    values = {"phase": "loaded", "has_had_turn": True, "lane": Lane()} | values
    state = RunState(Run(model_id=name, **ROW), loaded_at=loaded, last_used=used, **values)
    if busy:
        state.operations[1] = Operation("r", "u", "s", "debug", name, 1, "forward_backward", status="held")
        state.lane.add(state.operations[1])
    return state


def leaving(*states, wanted=1, most=30.0, last=NEVER):
    return [state.model_id for state in runs_to_evict(states, wanted, NOW, most, last)]


async def test_those_whose_clients_are_away_leave_first_the_longest_unused_before_others():
    away = [held(f"away {used}", used=NOW - used, busy=False) for used in (5, 50, 20)]
    busy = [held(f"busy {loaded}", loaded=NOW - loaded) for loaded in (40, 90)]
    assert leaving(*busy, *away, wanted=2) == ["away 50", "away 20"]
    assert leaving(*busy, *away, wanted=4) == ["away 50", "away 20", "away 5", "busy 90"]
    assert leaving(*busy, *away, wanted=9) == ["away 50", "away 20", "away 5", "busy 90", "busy 40"]


async def test_between_two_steps_a_run_counts_as_busy():
    between = held("between", loaded=NOW - 20, used=NOW - 0.1, busy=False)
    assert leaving(between, held("busy", loaded=NOW - 10), wanted=2) == ["between", "busy"]
    assert leaving(held("between", loaded=NOW - 0.2, used=NOW - 0.1, busy=False)) == []


async def test_busy_runs_stay_as_long_as_moving_them_was_worth():
    def num_leaving(seconds, cost, num_moved=4, wanted=4):
        """How many leave so long after others had to."""
        runs = [held(f"run {n}", loaded=NOW - 90, snapshot_cost=cost) for n in range(6)]
        return len(leaving(*runs, wanted=wanted, last=Eviction(NOW - seconds, num_moved)))

    assert num_leaving(0.9, 0.0) == 0  # a moment in any case
    assert num_leaving(1.1, 0.0) == 4
    # Four saved and four loaded, half a second each, after no less than three times that.
    assert num_leaving(11.9, 0.5) == 0
    assert num_leaving(12.1, 0.5) == 4
    assert num_leaving(3.1, 0.5, num_moved=1) == 4
    assert num_leaving(11.9, 0.5, wanted=1) == 0  # those who come one by one do not drive others out one by one
    assert num_leaving(29.0, 60.0) == 0
    assert num_leaving(31.0, 60.0) == 4  # nobody waits longer than that
    assert leaving(held("just loaded", loaded=NOW - 0.9)) == []


async def test_a_run_does_not_leave_before_it_had_a_turn_nor_twice():
    fresh = held("fresh", loaded=NOW - 50, has_had_turn=False)
    restoring = held("restoring", loaded=NOW - 50, phase="restoring")
    assert leaving(fresh, restoring, wanted=2, most=0.0) == []
    assert leaving(fresh, held("other", loaded=NOW - 1), wanted=2, most=0.0) == ["other"]
    behind = held("behind a gap", loaded=NOW - 50, has_had_turn=False, lane=Lane(0))
    assert leaving(behind, wanted=2, most=0.0) == ["behind a gap"]  # which may never close


async def test_a_run_does_not_leave_between_a_gradient_and_its_first_optimiser_step():
    def next_is(kind, **values):
        state = held(kind, loaded=NOW - 50, **values)
        state.operations[1].kind = kind
        return state

    assert leaving(next_is("optim_step")) == []
    assert leaving(next_is("optim_step", has_had_barrier=True)) == ["optim_step"]
    assert leaving(next_is("forward_backward")) == ["forward_backward"]


async def test_a_run_that_had_to_leave_waits_behind_those_that_wait_already():
    """Whose operations are older does not count: a client that has submitted much would keep all others out."""
    first, second = held("first"), held("second", phase="absent")
    first.operations[1].received, second.operations[1].received = NOW - 9, NOW - 5
    assert first.waiting_since < second.waiting_since
    first.leave_engine(NOW)
    assert second.waiting_since < first.waiting_since
    on_its_way = held("on its way", phase="restoring")
    received = on_its_way.waiting_since
    on_its_way.leave_engine(NOW)  # as when the engine ends: it had no turn yet
    assert on_its_way.waiting_since == received


def passed_over(loads):
    """Loads of a run that had been loaded before, and the runs that waited all the time between the two."""
    found = []
    for later, (run, waiting) in enumerate(loads):
        before = [number for number in range(later) if loads[number][0] == run]
        if before:
            between = {other for other, _ in loads[before[-1] : later]}
            found += [(before[-1], later, run, other) for other in loads[before[-1]][1] & waiting - between]
    return found


async def test_runs_that_wait_take_turns_with_those_in_memory(crowded, monkeypatch):
    """Five busy runs and room for two: none comes in twice while another waits, and all end as if they were alone."""
    user, session = await crowded.session("rotating")
    expected = await undisturbed(crowded, user, session, 0)
    runs = [await crowded.create(user, session, number) for number in range(1, 6)]
    for run in runs:
        await crowded.park(user, run)
    loads, begin = [], restoring.begin

    def recording(core, state):
        others = [other for other in core.runs.values() if other is not state]
        waiting = {other.model_id for other in others if other.phase == "absent" and other.has_work}
        loads.append((state.model_id, waiting))
        begin(core, state)

    monkeypatch.setattr(restoring, "begin", recording)
    last = []
    crowded.core.is_ready = False
    for run in runs:  # the first has all its operations in the queue before the second has any
        last.append([await submit(crowded, user, run, seq_id) for seq_id in range(1, 3 * STEPS + 1)][-1])
    crowded.core.is_ready = True
    crowded.driver.post(Expired())
    for accepted in last:
        await crowded.done(accepted)
    assert [run for run, _ in loads[:5]] == [run.model_id for run in runs]
    assert passed_over(loads) == []
    assert len(loads) >= 4 * len(runs), "they did not take turns"
    for run in runs:
        assert_equal_weights(await crowded.save(user, run, 3 * STEPS + 1, "end"), expected)


async def test_a_run_keeps_its_place_between_two_steps_and_leaves_when_its_client_does(tmp_path, monkeypatch):
    monkeypatch.setattr("lorimer.scheduler.policies.MIN_RESIDENCE_SECONDS", 6000.0)
    async with service(tmp_path / "data", max_loaded_runs=1, residence_seconds=6000.0) as opened:
        user, session = await opened.session()
        busy, other = [await opened.create(user, session, number) for number in range(2)]
        await opened.done(await opened.train(user, busy, 1))
        waiting = await opened.train(user, other, 1)
        for seq_id in range(2, 12):
            await opened.done(await opened.train(user, busy, seq_id))
            assert (await opened.outcome(waiting, timeout=0)).state == "pending"
        await opened.done(waiting)
        phases = {model_id: state.phase for model_id, state in opened.runs.items()}
        assert phases[other.model_id] == "loaded"


async def test_an_eviction_does_not_restart_the_wait_for_a_missing_operation(tmp_path, monkeypatch):
    monkeypatch.setattr("lorimer.scheduler.policies.MIN_RESIDENCE_SECONDS", 0.1)
    async with service(tmp_path / "data", max_loaded_runs=1, residence_seconds=0.1, gap_seconds=1.5) as opened:
        user, session = await opened.session()
        stuck, busy = [await opened.create(user, session, number) for number in range(2)]
        behind = await opened.train(user, stuck, 2)
        state, loads = opened.runs[stuck.model_id], 0
        for seq_id in range(1, 10_000):
            await opened.done(await opened.train(user, busy, seq_id))
            loads = max(loads, state.num_restores)
            if (outcome := await opened.outcome(behind, timeout=0)).state != "pending":
                break
        assert "operation 1 of run" in outcome.error and "never arrived" in outcome.error
        assert loads > 2, "it was not evicted while it waited"
