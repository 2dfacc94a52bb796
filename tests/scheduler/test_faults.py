"""Engines killed, stopped and poisoned, disks full: runs end as if nothing had happened, on one server."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from lorimer.engine.translation import decode_operation
from lorimer.errors import Busy, EngineError, StorageError
from lorimer.scheduler import events
from lorimer.scheduler.engines import EngineSlot
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.store import futures, runs
from lorimer.types.encoding import decode_forward_backward_output, decode_sample_response
from tests.scheduler.runs import STEPS, assert_equal_weights, submit, undisturbed
from tests.scheduler.service import Service, service, start

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def s(tmp_path_factory) -> AsyncIterator[Service]:
    path = tmp_path_factory.mktemp("faults") / "data"
    async with service(path, snapshot_seconds=0.05, max_engine_deaths=3, stall_seconds=600) as opened:
        yield opened


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.002)


@pytest.mark.slow
async def test_an_engine_that_is_killed_changes_nothing(s):
    """While it trains, steps, saves and samples, and while it writes a snapshot."""
    user, session = await s.session()
    expected = await undisturbed(s, user, session, 0)
    run = await s.create(user, session, 1)
    accepted = {seq_id: await submit(s, user, run, seq_id) for seq_id in range(1, 8)}
    await s.done(accepted[1])
    s.kill_engine()  # some are done, some with the engine, some waiting
    fetched = await s.done(accepted[4])
    accepted |= {seq_id: await submit(s, user, run, seq_id) for seq_id in range(8, 3 * STEPS + 1)}
    ephemeral = await s.scheduler.save_ephemeral(user, run, 3 * STEPS + 1, 9)
    named = await s.scheduler.save_weights(user, run, 3 * STEPS + 2, kind="training", name="end")
    state = s.runs[run.model_id]
    await until(lambda: state.saving is not None or not state.operations)
    s.kill_engine()
    await s.done(ephemeral)
    await s.done(named)
    assert await s.done(accepted[4]) == fetched
    steps = [json.loads(await s.done(accepted[n]))["metrics"]["optimizer_step"] for n in range(3, 3 * STEPS + 1, 3)]
    assert steps == [float(n) for n in range(1, STEPS + 1)]
    assert_equal_weights(await s.saved(run, "end"), expected)
    sampler = await s.sampler(session, 9)
    before = await s.sample(user, sampler, 0, seed=5, max_tokens=50)
    response = decode_sample_response(await s.done(before), before.sample_sequence_ids)
    running = await s.sample(user, sampler, 1, seed=5, max_tokens=50)
    s.kill_engine()
    again = decode_sample_response(await s.done(running), running.sample_sequence_ids)
    assert list(again.sequences[0].tokens) == list(response.sequences[0].tokens)

    async def unknown() -> set[str]:
        found, _ = await s.store.read(runs.list_runs, user_id=user.user_id, limit=100, offset=0)
        known = {name for run in found for name in (run.snapshot_name, run.newest_name)}
        return {path.name for path in s.directory.snapshots.iterdir()} - known

    async with asyncio.timeout(30):  # the last one may just be being replaced
        while await unknown():
            await asyncio.sleep(0.01)


async def test_a_poisonous_request_is_found_and_the_innocent_survive(s, monkeypatch):
    user, session = await s.session()
    good, bad = await s.create(user, session, 0), await s.create(user, session, 1)
    train, deaths = s.slot.train, s.slot.num_deaths

    def deadly(batch, to):
        train(batch, to)
        if any(len(decode_operation(op).data[0].tokens) == 13 for op in batch.operations):
            s.kill_engine()

    monkeypatch.setattr(s.slot, "train", deadly)
    poison = await s.train(user, bad, 1, tokens=13)
    beside = [await s.train(user, good, seq_id) for seq_id in range(1, 4)]
    behind = await s.step(user, bad, 2)
    base = await s.base_sampler(user, session)
    samples = [await s.sample(user, base, number, max_tokens=100) for number in range(4)]
    outcome = await s.outcome(poison)
    assert outcome.state == "failed" and outcome.category == "server"
    assert "ended 3 times" in outcome.error
    for accepted in [*beside, behind, *samples]:
        await s.done(accepted)
    assert s.slot.num_deaths - deaths <= 6  # now and then it was sent behind another turn, which was then blamed


async def test_a_new_server_knows_which_request_killed_engines(tmp_path, monkeypatch):
    """Two servers are killed after two deaths of their engines each; a third gives the request up after one more."""
    path, limits, train = tmp_path / "data", SchedulerLimits(max_engine_deaths=5), EngineSlot.train

    def deadly(slot, batch, to):
        train(slot, batch, to)
        if any(len(decode_operation(op).data[0].tokens) == 13 for op in batch.operations):
            os.kill(slot.pid, signal.SIGKILL)

    monkeypatch.setattr(EngineSlot, "train", deadly)
    s = await Service.open(path, limits)
    user, session = await s.session()
    good, bad = await s.create(user, session, 0), await s.create(user, session, 1)
    poison = await s.train(user, bad, 1, tokens=13)
    for number in (1, 2):
        while s.store.read_now(futures.get, poison.request_id).deaths < 2 * number:
            await asyncio.sleep(0.01)
        await s.die()
        s = await Service.open(path, limits)
        beside = await s.train(user, good, number)
        assert s.core.open[poison.request_id].is_suspect
    outcome = await s.outcome(poison)
    assert outcome.state == "failed" and "ended 5 times" in outcome.error
    await s.done(beside)
    assert s.slot.num_deaths == 1
    await s.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def planted(tmp_path_factory) -> AsyncIterator[tuple[Service, Path]]:
    """A service whose engine process fails at samples while a file says which and how often."""
    folder = tmp_path_factory.mktemp("planted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "planted"))
        patch.setenv("PLANTED_FAULT", str(folder / "fault.json"))
        async with service(folder / "data", max_engine_deaths=4) as opened:
            await opened.ready()
            yield opened, folder / "fault.json"


async def test_a_sample_that_fails_by_an_error_of_the_engines_own_is_retried(planted):
    """The client gets the tokens it would have got; those beside it notice nothing, and no engine ends."""
    s, fault = planted
    user, session = await s.session()
    base = await s.base_sampler(user, session)
    first = await s.sample(user, base, 0, seed=3, max_tokens=31)
    expected = decode_sample_response(await s.done(first), first.sample_sequence_ids)
    fault.write_text(json.dumps({"max_tokens": 31, "times": 3}))
    accepted = await s.sample(user, base, 1, seed=3, max_tokens=31)
    beside = [await s.sample(user, base, number, max_tokens=20) for number in range(2, 8)]
    found = decode_sample_response(await s.done(accepted), accepted.sample_sequence_ids)
    assert list(found.sequences[0].tokens) == list(expected.sequences[0].tokens)
    for one in beside:
        await s.done(one)
    assert json.loads(fault.read_text())["times"] == 0
    assert s.slot.num_deaths == 0
    assert (s.core.sampling.num_waiting, s.core.sampling.num_running) == (0, 0)


async def test_a_sample_that_keeps_failing_is_given_up_and_others_are_served(planted):
    s, fault = planted
    user, session = await s.session()
    base = await s.base_sampler(user, session)
    fault.write_text(json.dumps({"max_tokens": 31, "times": 1000}))
    bad = await s.sample(user, base, 0, max_tokens=31)
    beside = [await s.sample(user, base, number, max_tokens=20) for number in range(1, 7)]
    outcome = await s.outcome(bad)
    assert (outcome.state, outcome.category) == ("failed", "server")
    assert "planted" in outcome.error
    for one in beside:
        await s.done(one)
    assert json.loads(fault.read_text())["times"] == 1000 - 4
    assert s.slot.num_deaths == 0


async def test_an_engine_that_hangs_is_replaced(s):
    user, session = await s.session()
    run = await s.create(user, session)
    deaths = s.slot.num_deaths
    s.slot._stall_seconds = 1.0
    os.kill(s.slot.pid, signal.SIGSTOP)
    accepted = await s.train(user, run, 1)
    await until(lambda: s.slot.num_deaths > deaths)
    s.slot._stall_seconds = 600.0  # a start on a busy machine is no hang
    s.slot._set_watch(600.0)
    await s.done(accepted)
    assert s.slot.num_deaths == deaths + 1


async def test_a_full_disk_only_delays(s, monkeypatch):
    user, session = await s.session()
    run = await s.create(user, session)
    submit, is_full = s.store.submit, False

    def failing(function, stores=b""):
        if is_full:
            raise StorageError("the disk is full")
        return submit(function, stores)

    monkeypatch.setattr(s.store, "submit", failing)
    first = await s.train(user, run, 1)
    is_full = True
    with pytest.raises(StorageError, match="disk is full"):
        await s.step(user, run, 2)
    assert (await s.outcome(first, 0.5)).state == "pending"
    is_full = False
    await s.done(first)
    step = json.loads(await s.done(await s.step(user, run, 2)))
    assert step["metrics"]["optimizer_step"] == 1


async def test_a_load_that_cannot_be_secured_did_not_happen(s, tmp_path):
    """The engine loads the weights, then finds no room for the snapshot: the run is as it was."""
    user, session = await s.session()
    run = await s.create(user, session)
    await s.done(await s.train(user, run, 1))
    await s.done(await s.step(user, run, 2))
    await s.save(user, run, 3, "first")
    fresh = await s.create(user, session, 1, seed=8)
    before = decode_forward_backward_output(await s.done(await s.train(user, fresh, 1, forward=True)))
    s.directory.snapshots.chmod(0o500)
    s.directory.snapshots.rename(tmp_path / "away")
    s.directory.snapshots.write_bytes(b"no directory can be made in a file")
    weights = await s.weights(run, "first")
    load = await s.scheduler.load_weights(
        user, fresh, 2, path="tinker://r:train:0/weights/p", weights=weights, optimizer=False
    )
    assert (await s.outcome(load)).state == "failed"
    s.directory.snapshots.unlink()
    (tmp_path / "away").rename(s.directory.snapshots)
    s.directory.snapshots.chmod(0o700)
    after = decode_forward_backward_output(await s.done(await s.train(user, fresh, 3, forward=True)))
    assert after.metrics["loss:sum"] == pytest.approx(before.metrics["loss:sum"], abs=1e-6)


async def test_a_defect_of_the_scheduler_costs_nothing_but_time(s, monkeypatch, caplog):
    """The core raises when the engine replies: a new one takes everything up from the journal."""
    user, session = await s.session()
    expected = await undisturbed(s, user, session, 0)
    run = await s.create(user, session, 1)
    core, handle = s.core, s.core.handle

    def defective(happened, now):
        if any(isinstance(event, events.Replied) for event in happened):
            raise RuntimeError("a planted defect")
        return handle(happened, now)

    async def submitted(seq_id):
        while True:
            try:
                return await submit(s, user, run, seq_id)
            except Busy:  # the scheduler failed meanwhile, and asks for it again
                await asyncio.sleep(0.01)

    monkeypatch.setattr(core, "handle", defective)
    accepted = [await submitted(seq_id) for seq_id in range(1, 4)]
    await until(lambda: s.core is not core)
    accepted += [await submitted(seq_id) for seq_id in range(4, 3 * STEPS + 1)]
    for each in accepted:
        await s.done(each)
    await s.done(await s.scheduler.save_weights(user, run, 3 * STEPS + 1, kind="training", name="end"))
    assert_equal_weights(await s.saved(run, "end"), expected)
    assert "a planted defect" in caplog.text


async def test_the_death_of_the_engine_ends_what_was_handed_out_and_repeats_the_rest(s):
    await s.ready()
    user, _ = await s.session("unlucky")
    streamed = start(s, user.user_id, max_tokens=480, num_samples=16)
    whole = start(s, user.user_id, stream=False, max_tokens=480, num_samples=16, seed=4)
    await until(lambda: streamed.sample.num_streamed)
    s.kill_engine()
    with pytest.raises(EngineError, match="the engine ended while it computed this"):
        async for _ in streamed.pieces():
            pass
    response = await whole.answer
    assert len(response.sequences) == 16
    assert s.core.is_isolating is False
