"""Graders on the two nodes of a Ray cluster: each misbehaviour costs one grade, and a recipe gets the same rewards."""

import asyncio
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorimer.cookbook.logs import read_metrics
from lorimer.cookbook.rl.graders import GraderPool
from lorimer.errors import InvalidInput
from tests.conformance.servers import environment, running_server
from tests.cookbook.rl.test_graders import MISBEHAVE, is_running
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


async def until_ended(pid: int) -> None:
    async with asyncio.timeout(30):
        while is_running(pid):
            await asyncio.sleep(0.1)


async def test_misbehaviour_costs_one_grade(nodes, tmp_path):
    async with GraderPool(MISBEHAVE, num_workers=2, timeout_seconds=20, memory_mb=512, backend="ray") as pool:
        first, second = [int(grade.value) for grade in await asyncio.gather(pool.grade("pid"), pool.grade("pid"))]
        assert len({first, second, os.getpid()}) == 3, "two processes grade concurrently, neither of them here"
        for how, error, detail in [
            ("raise", "raised", "ValueError: no such answer"),
            ("memory", "memory", "memory"),
            ("eat", "memory", "memory"),
            ("sleep", "timeout", "20 seconds"),
            ("end", "died", "status 7"),
            ("kill", "died", "status -9"),
            ("text", "raised", "could not convert"),
        ]:
            grade = await pool.grade(how)
            assert (grade.error, detail in grade.detail) == (error, True), grade
            assert (await pool.grade("fine")).value == 1.0
        grade = await pool.grade("child", str(tmp_path / "pid"))
        assert grade.error == "timeout"
        await until_ended(int((tmp_path / "pid").read_text()))
        last = int((await pool.grade("pid")).value)
    await until_ended(last)
    with pytest.raises(InvalidInput, match="no_such_function"):
        async with GraderPool("tests.cookbook.rl.grading:no_such_function", backend="ray"):
            pass


async def test_a_node_that_goes_away_costs_the_grades_that_it_was_computing(nodes):
    """One worker is on each node, which has one CPU; the next one finds its CPU on the node that comes."""
    async with GraderPool(MISBEHAVE, num_workers=2, timeout_seconds=200, backend="ray") as pool:
        await asyncio.gather(pool.grade("pid"), pool.grade("pid"))
        sleeping = [asyncio.create_task(pool.grade("sleep")) for _ in range(2)]
        await asyncio.sleep(1)
        nodes.remove(nodes.others()[0])
        done, others = await asyncio.wait(sleeping, timeout=100, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().error for task in done] == ["died"]
        nodes.add(1)  # on this thread, because Ray sets signal handlers
        assert (await pool.grade("fine")).value == 1.0
        for task in others:
            assert not task.done(), "the other node still grades"
            task.cancel()
        await asyncio.wait(others)


def test_a_recipe_gets_the_same_rewards(nodes, tmp_path):
    """Samples have seeds, so that both runs of the recipe see the same replies."""
    found = {}
    with running_server(tmp_path / "data", ["lorimer/tiny"]) as server:
        for graders in ("processes", "ray"):
            found[graders] = learn(server.url, tmp_path / graders, graders)
    names = ("env/all/correct", "env/all/reward/total", "grader/graded", "grader/errors")
    rewards = {name: [[step[key] for key in names] for step in steps] for name, steps in found.items()}
    assert len(rewards["ray"]) == 3
    assert rewards["ray"] == rewards["processes"]
    assert any(correct for correct, *_ in rewards["ray"]), "some replies were right"


def learn(url: str, folder: Path, graders: str) -> list[dict[str, float]]:
    options = {"base-url": url, "log-dir": folder, "output": folder / "model.txt", "graders": graders, "steps": 3}
    options |= {"sft-steps": 30, "batch-size": 8, "group-size": 4, "num-held-out": 4, "learning-rate": 1e-3}
    command = [sys.executable, "-m", "lorimer.recipes.rl_gsm8k"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    began = time.monotonic()
    run = subprocess.run(command, cwd=folder.parent, env=environment(), capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    sys.stdout.write(f"{graders}: {time.monotonic() - began:.0f} s\n")
    return [metrics for metrics in read_metrics(folder) if "grader/graded" in metrics]
