"""Submitting, order, retries, gaps, samples and limits, on one engine that nobody disturbs."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from lorimer import types
from lorimer.errors import Busy, InvalidInput
from lorimer.scheduler.stats import QueuedRequests
from lorimer.scheduler.translate import encoded_training
from lorimer.store import futures, samplers
from lorimer.types.encoding import decode_forward_backward_output, decode_sample_response, encode_training_request
from tests.scheduler.service import Service, training_request
from tests.scheduler.service import service as open_service

pytestmark = pytest.mark.asyncio(loop_scope="module")


LIMITS = {"gap_seconds": 0.5, "max_open_operations": 40, "max_loaded_runs": 3, "max_queued_samples": 30}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory) -> AsyncIterator[Service]:
    async with open_service(tmp_path_factory.mktemp("scheduler") / "data", **LIMITS) as opened:
        yield opened


async def test_operations_run_in_order_whatever_order_they_come_in(service):
    user, session = await service.session()
    run, other = await service.create(user, session, 0), await service.create(user, session, 1)
    numbers = {1: "train", 2: "train", 3: "step", 4: "train", 5: "step"}

    async def submit(to, seq_id):
        if numbers[seq_id] == "step":
            return await service.step(user, to, seq_id)
        return await service.train(user, to, seq_id, shift=seq_id)

    shuffled = {seq_id: await submit(run, seq_id) for seq_id in (5, 3, 4, 2, 1)}
    for seq_id in sorted(shuffled):
        result = await service.done(shuffled[seq_id])
        expected = await service.done(await submit(other, seq_id))
        if numbers[seq_id] == "train":
            result = decode_forward_backward_output(result).metrics["loss:sum"]
            expected = decode_forward_backward_output(expected).metrics["loss:sum"]
            assert result == pytest.approx(expected, abs=1e-5)
        else:
            assert json.loads(result)["metrics"]["optimizer_step"] == json.loads(expected)["metrics"]["optimizer_step"]


async def test_a_retry_gets_the_same_future_and_other_content_is_refused(service):
    user, session = await service.session()
    run = await service.create(user, session)
    copies = await asyncio.gather(*(service.train(user, run, 1) for _ in range(20)))
    assert len({accepted.request_id for accepted in copies}) == 1
    first = await service.done(copies[0])
    again = await service.train(user, run, 1)
    assert await service.done(again) == first
    with pytest.raises(InvalidInput, match="other content"):
        await service.train(user, run, 1, shift=3)
    with pytest.raises(InvalidInput, match="is a forward_backward"):
        await service.step(user, run, 1)
    step = json.loads(await service.done(await service.step(user, run, 2)))
    assert step["metrics"]["optimizer_step"] == 1  # twenty copies were one operation


async def test_a_submit_whose_caller_hangs_up_is_carried_out(service, caplog):
    user, session = await service.session()
    run = await service.create(user, session)
    hung_up = asyncio.ensure_future(service.train(user, run, 1))
    await asyncio.sleep(0)
    hung_up.cancel()
    await asyncio.wait([hung_up])
    async with asyncio.timeout(60):  # nobody asks again: look at what is stored
        while [row.state for row in await service.store.read(futures.journal, run.model_id, 0)] != ["done"]:
            await asyncio.sleep(0.01)
    # A driver that trips over the caller's absence is started again from the journal and carries the request out too.
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_refused_numbers_are_used_up(service):
    user, session = await service.session()
    run = await service.create(user, session)
    third = await service.train(user, run, 3)
    await service.scheduler.reject(user, run, 1, "no such thing")
    await service.scheduler.reject(user, run, 2, "nor this")
    await service.done(third)
    refused = await service.train(user, run, 2)
    outcome = await service.outcome(refused)
    assert (outcome.state, outcome.category, outcome.error) == ("failed", "user", "nor this")


async def test_a_gap_fails_those_behind_it_and_the_run_goes_on(service):
    user, session = await service.session()
    run = await service.create(user, session)
    waiting = [await service.train(user, run, seq_id) for seq_id in (3, 10**9)]
    for accepted in waiting:
        outcome = await service.outcome(accepted)
        assert outcome.state == "failed" and outcome.category == "user"
        assert "operation 1 to 2, 4 to 999999999" in outcome.error and "never arrived" in outcome.error
    await service.done(await service.train(user, run, 10**9 + 1))
    with pytest.raises(InvalidInput, match="answered long ago"):
        await service.train(user, run, 1)
    rows = await service.store.read(futures.journal, run.model_id, 0)
    assert len(rows) == 5  # a gap is one row, however wide


async def test_runs_share_batches(service, monkeypatch):
    user, session = await service.session()
    runs = [await service.create(user, session, number) for number in range(3)]
    sizes, train = [], service.slot.train

    def recording(batch, to):
        sizes.append({operation.model_id for operation in batch.operations})
        train(batch, to)

    monkeypatch.setattr(service.slot, "train", recording)
    accepted = [await service.train(user, run, seq) for seq in range(1, 5) for run in runs]
    for each in accepted:
        await service.done(each)
    assert max(map(len, sizes)) > 1
    assert len(sizes) < len(accepted)


async def test_a_flooding_user_does_not_hold_up_another(service):
    flood, flood_session = await service.session("flood")
    light, light_session = await service.session("light")
    busy, calm = await service.create(flood, flood_session), await service.create(light, light_session)
    many = [await service.train(flood, busy, seq, tokens=400) for seq in range(1, 31)]
    few = [await service.train(light, calm, seq, tokens=400) for seq in range(1, 3)]
    for each in few:
        await service.done(each)
    for each in many:
        await service.done(each)
    rows = [await service.store.read(futures.get, each.request_id) for each in [*few, *many]]
    light_ended = max(row.finished_at for row in rows[:2])
    assert sum(row.finished_at < light_ended for row in rows[2:]) < 25


async def test_too_many_operations_are_put_off(service):
    user, session = await service.session()
    run = await service.create(user, session)
    for seq_id in range(2, 42):  # number 1 is missing
        await service.train(user, run, seq_id)
    with pytest.raises(Busy, match="40 unfinished operations"):
        await service.train(user, run, 42)


async def test_waiting_operations_of_one_user_leave_room_for_another(tmp_path):
    async with open_service(tmp_path / "data", max_open_bytes=40_000) as service:
        flood, flood_session = await service.session("flood")
        light, light_session = await service.session("light")
        busy, calm = await service.create(flood, flood_session), await service.create(light, light_session)
        size = len(encode_training_request(training_request(busy, 2, tokens=400)))
        num_accepted = 0
        with pytest.raises(Busy, match=r"bytes of them yours; 40000 bytes are shared by its users \(max_open_bytes\)"):
            for seq_id in range(2, 42):  # number 1 is missing, so that they wait
                await service.train(flood, busy, seq_id, tokens=400)
                num_accepted += 1
        assert num_accepted == 20_000 // size
        await service.done(await service.train(light, calm, 1, tokens=400))


async def test_samples_repeat_by_seed_and_by_number(service):
    user, session = await service.session()
    run = await service.create(user, session)
    await service.done(await service.scheduler.save_ephemeral(user, run, 1, 0))
    sampler = await service.sampler(session, 0)

    async def tokens(accepted):
        response = decode_sample_response(await service.done(accepted), accepted.sample_sequence_ids)
        return [list(sequence.tokens) for sequence in response.sequences]

    first = await service.sample(user, sampler, 0, seed=3, num_samples=2)
    assert await tokens(first) == await tokens(await service.sample(user, sampler, 1, seed=3, num_samples=2))
    again = await service.sample(user, sampler, 0, seed=3, num_samples=2)
    assert (again.request_id, again.sample_sequence_ids) == (first.request_id, first.sample_sequence_ids)
    await service.scheduler.usage.flush()  # what was fetched is not listed
    found, cursor = await service.scheduler.completions(sampler.sampling_session_id, 0, 0, 0, [])
    assert found == []
    third = await service.sample(user, sampler, 2)
    listed, later = await service.scheduler.completions(sampler.sampling_session_id, 0, cursor, 60, [])
    assert [(entry.request_id, entry.state) for entry in listed] == [(third.request_id, "finished")]
    assert later > cursor
    nothing = await service.scheduler.completions(sampler.sampling_session_id, 0, later, 0, [third.request_id])
    assert nothing == ([], later)
    assert (await service.outcome(third)).state == "gone"


async def test_cancelling_a_sample_in_every_phase(service):
    user, session = await service.session()
    base = await service.base_sampler(user, session)
    long = [await service.sample(user, base, number, max_tokens=400, num_samples=2) for number in range(4)]
    await service.scheduler.cancel(long[0].request_id)  # just handed over
    while not service.slot._process.num_pending:
        await asyncio.sleep(0.01)
    await service.scheduler.cancel(long[1].request_id)  # in the engine
    for accepted in long[:2]:
        outcome = await service.outcome(accepted)
        assert outcome.state == "failed" and "cancelled" in outcome.error
    await service.scheduler.cancel(long[0].request_id)  # over
    for accepted in long[2:]:
        await service.done(accepted)
    assert service.core.sampling.num_running == 0


async def test_a_full_queue_of_samples_takes_no_more_from_who_filled_it(service):
    user, session = await service.session("flood")
    other, other_session = await service.session("light")
    sampler, theirs = await service.base_sampler(user, session), await service.base_sampler(other, other_session)
    accepted = [await service.sample(user, sampler, n, max_tokens=300, num_samples=64) for n in range(30)]
    with pytest.raises(Busy, match="samples are waiting"):
        await service.sample(user, sampler, 30)
    await service.done(await service.sample(other, theirs, 0))
    assert sum(not service.scheduler.results.open.get(each.request_id) for each in accepted) < 30
    for each in accepted:
        await service.scheduler.cancel(each.request_id)
    for each in accepted:
        assert (await service.outcome(each)).state in ("done", "failed")


async def test_runs_beyond_the_limit_take_turns_in_memory(service):
    user, session = await service.session()
    runs = [await service.create(user, session, number) for number in range(5)]
    for seq_id in range(1, 7):
        kind = service.train if seq_id % 2 else service.step
        accepted = [await kind(user, run, seq_id) for run in runs]
        results = [await service.done(each) for each in accepted]
    steps = [json.loads(result)["metrics"]["optimizer_step"] for result in results]
    assert steps == [3.0] * 5
    assert sum(state.phase == "loaded" for state in service.runs.values()) <= 3


async def test_a_loaded_run_starts_from_what_was_saved(service):
    user, session = await service.session()
    run, copy = await service.create(user, session, 0), await service.create(user, session, 1, seed=9)
    await service.done(await service.train(user, run, 1))
    await service.done(await service.step(user, run, 2))
    await service.save(user, run, 3, "first")
    weights = await service.weights(run, "first")
    path = f"tinker://{run.model_id}/weights/first"
    loaded = await service.scheduler.load_weights(user, copy, 1, path=path, weights=weights, optimizer=True)
    behind = await service.train(user, copy, 2)
    await service.done(loaded)
    assert (await service.run(copy.model_id)).resume_seq == 1
    expected = decode_forward_backward_output(await service.done(await service.train(user, run, 4)))
    found = decode_forward_backward_output(await service.done(behind))
    assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], abs=1e-6)
    request = types.LoadWeightsRequest(session_id=session.session_id, model_seq_id=2, path=path, optimizer=True)
    made = await service.scheduler.create_from_weights(user, session, request, weights)
    assert json.loads(await service.done(made)) == {"type": "load_weights", "path": path, "model_id": made.model_id}
    third = await service.run(made.model_id)
    assert third.resume_seq == 0
    found = decode_forward_backward_output(await service.done(await service.train(user, third, 1)))
    assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], abs=1e-6)


async def test_losses_of_other_sessions_are_refused(service):
    user, session = await service.session()
    run = await service.create(user, session)
    config = {"loss_id": "somebody:loss:0"}
    request = replace(training_request(run, 1), loss_fn="custom", loss_fn_config=config)
    with pytest.raises(InvalidInput, match="somebody:loss:0"):
        await service.scheduler.train(user, run, encoded_training(request))


async def test_a_name_that_is_taken_fails_the_save_and_leaves_nothing(service):
    user, session = await service.session()
    run = await service.create(user, session)
    await service.save(user, run, 1, "same")
    before = set(service.directory.weights.iterdir())
    again = await service.scheduler.save_weights(user, run, 2, kind="training", name="same")
    outcome = await service.outcome(again)
    assert outcome.state == "failed" and "same" in outcome.error and outcome.category == "user"
    async with asyncio.timeout(30):  # files are deleted in the background
        while set(service.directory.weights.iterdir()) != before:
            await asyncio.sleep(0.01)


async def test_what_there_is_to_do_can_be_asked(service):
    user, session = await service.session("asking")
    run = await service.create(user, session)
    behind = await service.train(user, run, 2)
    stats = service.scheduler.stats()
    assert stats.operations_by_run[run.model_id] == 1
    assert stats.requests_by_kind["forward_backward"] >= 1
    assert [entry for entry in stats.queued if entry.user_id == user.user_id] == [
        QueuedRequests(user.user_id, "forward_backward", num_requests=1, num_tokens=20, run_id=run.model_id)
    ]
    pending = await service.outcome(behind, 0.05)
    assert pending.reason == "waiting for operation 1 of this run, which has not arrived"
    await service.train(user, run, 1)
    await service.done(behind)
    assert user.user_id not in service.scheduler.stats().requests_by_user


async def test_the_sweep_keeps_the_disk_and_the_memory_small(service, monkeypatch):
    user, session = await service.session("sweeping")
    run = await service.create(user, session)
    now = {"result_seconds_after_fetch": 0, "result_seconds": 0, "history_seconds": 0, "sampler_idle_seconds": 0}
    rows, directories = [], []
    for turn in range(4):
        for seq_id in range(20 * turn + 1, 20 * turn + 20):
            await service.done(await service.train(user, run, seq_id))
        await service.done(await service.scheduler.save_ephemeral(user, run, 20 * turn + 20, turn))
        await service.park(user, run)
        await service.scheduler.usage.flush()
        limits = replace(service.scheduler.limits, ephemeral_samplers_per_run=2, **now)
        monkeypatch.setattr(service.scheduler.owner, "limits", limits)
        await service.scheduler.sweep()
        monkeypatch.undo()
        rows.append(len(await service.store.read(futures.journal, run.model_id, -1)))
        directories.append(len(list(service.directory.weights.iterdir())))
    assert rows == [20] * 4  # the clients have their results; the rest is what the last but one snapshot lacks
    assert directories[3] <= directories[1]
    assert [s.seq for s in await service.store.read(samplers.list_samplers, session.session_id)] == [2, 3]
    step = json.loads(await service.done(await service.step(user, run, 81)))
    assert step["metrics"]["optimizer_step"] == 1
    await service.done(await service.sample(user, await service.sampler(session, 2), 0))


async def test_a_run_that_nobody_uses_expires(service, monkeypatch):
    user, session = await service.session("leaving")
    run = await service.create(user, session)
    await service.done(await service.train(user, run, 1))
    snapshot = (await service.park(user, run)).resume_name
    assert (service.directory.snapshots / snapshot).is_dir()
    await service.scheduler.usage.flush()
    monkeypatch.setattr(
        service.scheduler.owner, "limits", replace(service.scheduler.limits, run_seconds=0, ephemeral_seconds=0)
    )
    await service.scheduler.sweep()
    monkeypatch.undo()
    assert not (service.directory.snapshots / snapshot).exists()
    with pytest.raises(InvalidInput, match="has expired"):
        await service.train(user, await service.run(run.model_id), 2)
    assert service.scheduler.results.open == {}
