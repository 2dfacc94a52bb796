"""Environments on the two nodes of a Ray cluster: played as here, also when a node goes away, and by a recipe."""

import asyncio
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorimer.cookbook.logs import read_metrics
from lorimer.cookbook.rl.remote_envs import EnvPool, EpisodeLost
from tests.conformance.servers import environment, running_server
from tests.cookbook.rl.playing import make_summing
from tests.cookbook.rl.test_graders import is_running
from tests.ray.clusters import Nodes, ray_nodes

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes(1) as started:
        started.add(1)
        yield started


@pytest.fixture(autouse=True)
def disconnected(nodes: Nodes) -> Iterator[None]:
    """Leave the cluster after each test: a pool joins it when it starts its first worker."""
    yield
    importlib.import_module("ray").shutdown()


async def test_a_node_that_goes_away_loses_its_episodes_only(nodes):
    """One worker is on each node, which has one CPU; the next one finds its CPU on the node that comes."""
    async with EnvPool(make_summing, num_workers=2, timeout_seconds=200, backend="ray") as pool:
        envs = [pool.env(n, 9) for n in range(2)]
        for env in envs:
            await env.initial_observation()
        pids = [(await env.step([30])).metrics["pid"] for env in envs]
        assert len(set(pids)) == 2
        nodes.remove(nodes.others()[0])
        async with asyncio.timeout(60):
            while all(is_running(pid) for pid in pids):  # a worker ends soon after its node
                await asyncio.sleep(0.1)
        results = await asyncio.gather(*(env.step([40]) for env in envs), return_exceptions=True)
        assert sorted(type(one) is EpisodeLost for one in results) == [False, True], results
        nodes.add(1)  # on this thread, because Ray sets signal handlers
        lost = envs[[type(one) for one in results].index(EpisodeLost)]
        await lost.initial_observation()
        assert (await lost.step([30])).reward >= 15.0, "another process has taken the place"
        pids = [(await env.step([30])).metrics["pid"] for env in envs]
    async with asyncio.timeout(30):
        while any(is_running(pid) for pid in pids):
            await asyncio.sleep(0.1)


def test_a_recipe_gets_the_same_rewards(nodes, tmp_path):
    """Samples have seeds, so that both runs of the recipe see the same replies."""
    found = {}
    with running_server(tmp_path / "data", ["lorimer/tiny"]) as server:
        for place in ("here", "ray"):
            found[place] = learn(server.url, tmp_path / place, place)
    names = ("env/all/reward/total", "env/all/tool_calls", "test/correct")
    rewards = {place: [[step.get(name) for name in names] for step in steps] for place, steps in found.items()}
    assert len(rewards["ray"]) >= 2
    assert rewards["ray"] == rewards["here"]
    assert any(calls for _, calls, _ in rewards["ray"]), "some episodes had several turns"


def learn(url: str, folder: Path, place: str) -> list[dict[str, float]]:
    options = {"base-url": url, "log-dir": folder, "environments": place, "steps": 2, "sft-steps": 30}
    options |= {"batch-size": 6, "group-size": 4}
    command = [sys.executable, "-m", "lorimer.recipes.tool_use_rl"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    run = subprocess.run(command, cwd=folder.parent, env=environment(), capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stderr[-3000:]
    return read_metrics(folder / "rl")
