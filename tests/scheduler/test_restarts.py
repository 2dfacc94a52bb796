"""Servers killed and closed in the middle of things: the next one takes everything up."""

import asyncio
import json
import os
import random
import signal

import pytest

from lorimer.store import futures
from tests.scheduler.runs import STEPS, assert_equal_weights, submit, undisturbed
from tests.scheduler.service import Service


@pytest.mark.slow
async def test_a_server_that_is_killed_loses_and_doubles_nothing(tmp_path):
    await _kill_servers(tmp_path, seed=1, kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
async def test_servers_killed_at_random(tmp_path, seed):
    await _kill_servers(tmp_path, seed, kills=8)


async def _kill_servers(tmp_path, seed, kills):
    chance = random.Random(seed)
    path = tmp_path / "data"
    s = await Service.open(path)
    user, session = await s.session()
    expected = (await undisturbed(s, user, session, 0)).name
    run = await s.create(user, session, 1)
    sampler = await s.base_sampler(user, session)
    last, fetched, accepted, submitted, samples = 3 * STEPS + 1, {}, {}, 0, {}
    while submitted < 3 * STEPS or kills:
        for _ in range(chance.randint(1, 5)):
            if submitted < 3 * STEPS:
                submitted += 1
                accepted[submitted] = await submit(s, user, run, submitted)
        samples[len(samples)] = await s.sample(user, sampler, len(samples), max_tokens=20)
        seq_id = chance.choice(list(accepted))
        if chance.random() < 0.7:
            fetched[seq_id] = await s.done(accepted[seq_id])
        if kills:
            kills -= 1
            await asyncio.sleep(chance.random() * 0.2)
            await s.die()
            s = await Service.open(path)
            for seq_id, result in fetched.items():
                assert await s.done(accepted[seq_id]) == result
    await s.done(await s.scheduler.save_weights(user, run, last, kind="training", name="end"))
    assert_equal_weights(await s.saved(run, "end"), s.directory.weights / expected)
    for seq_id, each in accepted.items():
        result = await s.done(each)
        assert fetched.get(seq_id, result) == result
        if seq_id % 3 == 0:
            assert json.loads(result)["metrics"]["optimizer_step"] == seq_id // 3
    for each in samples.values():
        await s.done(each)
    rows = await s.store.read(futures.journal, run.model_id, -1)
    assert [row.seq_id for row in rows] == list(range(1, last + 1))
    await s.close()


@pytest.mark.slow
async def test_closing_is_bounded_and_loses_nothing(tmp_path):
    s = await Service.open(tmp_path / "data")
    user, session = await s.session()
    run = await s.create(user, session)
    sampler = await s.base_sampler(user, session)
    accepted = [await s.train(user, run, seq_id) for seq_id in range(1, 30)]
    sample = await s.sample(user, sampler, 0, max_tokens=100, num_samples=4)
    os.kill(s.slot.pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        await s.scheduler.close(timeout=1.0)
    s.store.close()
    s = await Service.open(tmp_path / "data")
    for each in accepted:
        await s.done(each)
    await s.done(sample)
    await s.close()
