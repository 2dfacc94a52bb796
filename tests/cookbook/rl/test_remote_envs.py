"""Environments in other processes are played as here; what one does wrong loses its episodes and nothing else."""

import asyncio
import os
import random

import pytest

from lorimer.cookbook.rl.remote_envs import EnvPool, EpisodeLost
from lorimer.errors import InvalidInput
from tests.cookbook.rl.playing import Summing, make_summing


def plain(result):
    """A step without what differs between processes."""
    metrics = {name: value for name, value in result.metrics.items() if name not in ("pid", "num_known")}
    return (
        result.reward,
        result.episode_done,
        result.next_observation,
        result.next_stop_condition,
        metrics,
        result.logs,
    )


async def test_episodes_in_any_order_are_those_of_environments_here():
    rng = random.Random(0)
    async with EnvPool(make_summing, num_workers=2) as pool:
        pairs, pids = [], set()
        for _ in range(150):
            if len(pairs) < 6 and rng.random() < 0.3:
                arguments = rng.randrange(100), rng.randint(1, 4)
                pairs.append((pool.env(*arguments), Summing(*arguments)))
                found, expected = [await env.initial_observation() for env in pairs[-1]]
                assert found == expected
                assert pairs[-1][0].prompt_messages() == pairs[-1][1].prompt_messages() != []
            elif pairs:
                chosen = rng.sample(pairs, rng.randint(1, len(pairs)))
                actions = [[rng.randint(10, 99)] * rng.randint(1, 3) for _ in chosen]
                steps = [pair[0].step(action) for pair, action in zip(chosen, actions, strict=True)]
                for pair, action, found in zip(chosen, actions, await asyncio.gather(*steps), strict=True):
                    assert plain(found) == plain(await pair[1].step(action))
                    pids.add(found.metrics["pid"])
                    if found.episode_done:
                        pairs.remove(pair)
        assert len(pids) == 2 and os.getpid() not in pids


async def test_what_an_environment_does_wrong_loses_its_episodes_only():
    async with EnvPool("tests.cookbook.rl.playing:make_summing", num_workers=2, timeout_seconds=5) as pool:
        one, other, third = (pool.env(n, 9) for n in range(3))  # the first and the third share a process
        for env in (one, other, third):
            await env.initial_observation()
        with pytest.raises(EpisodeLost, match="ValueError: no such move"):
            await one.step([0])
        assert (await third.step([30])).reward == 16.0, "the process goes on"
        for action, reason in (([1], "timeout: no answer after 5 seconds"), ([2], "died: .* status 7")):
            bad = pool.env(0, 9)
            while bad._host is not third._host:
                bad = pool.env(0, 9)
            await bad.initial_observation()
            with pytest.raises(EpisodeLost, match=reason):
                await bad.step(action)
            with pytest.raises(EpisodeLost, match="the process that played this episode has ended"):
                await third.step([30])
            assert (await other.step([40])).episode_done is False, "the other process is untouched"
            await third.initial_observation()
            assert (await third.step([30])).reward == 16.0, "another process has taken the place"


async def test_episodes_that_nobody_ends_are_forgotten():
    async with EnvPool(make_summing, num_workers=1) as pool:
        for _ in range(20):
            await pool.env(1, 9).initial_observation()
        last = pool.env(1, 9)
        await last.initial_observation()
        assert (await last.step([30])).metrics["num_known"] == 1


async def test_what_cannot_be_found_is_refused_before_anything_is_played():
    with pytest.raises(InvalidInput, match="no_such_function"):
        async with EnvPool("tests.cookbook.rl.playing:no_such_function"):
            pass
    with pytest.raises(InvalidInput, match="accepted are processes, ray"):
        EnvPool(make_summing, backend="threads")
    with pytest.raises(InvalidInput, match="num_workers is 0"):
        EnvPool(make_summing, num_workers=0)
