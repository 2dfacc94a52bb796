"""Workers placed by Ray on two nodes: their processes, their actors and a node end, and tenants cannot tell."""

import logging
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.installation import missing_programs
from tests.cluster.test_kills import expected, start
from tests.faults.programs import RunningProgram, assert_same, finish_all
from tests.faults.supervisor import eventually
from tests.faults.tenant import MODEL, Plan
from tests.ray.clusters import Nodes, RayInstallation, kill, ray_nodes

pytestmark = pytest.mark.timeout(1800)
log = logging.getLogger(__name__)

STEPS = 40
REPLICAS = {f"{MODEL}#0", f"{MODEL}#1"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    if missing := missing_programs():
        pytest.skip(missing)
    with ray_nodes(0) as started:  # commands connect to the head, which can therefore not be removed
        started.add(1)
        started.add(1)
        yield started


@pytest.fixture(scope="module")
def installation(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayInstallation]:
    folder = tmp_path_factory.mktemp("ray") / "installation"
    with RayInstallation(folder, {MODEL: MODEL}, num_replicas=1, users=["alice"], snapshot_seconds=0.2) as opened:
        yield opened
    assert opened.processes() == [], "processes outlived the installation"


class Disturbed:
    """Programs that train while something happens, and what they come to when nothing does."""

    def __init__(self, installation: RayInstallation, plans: list[Plan], folder: Path) -> None:
        installation.wait_for_owners(2)
        self.installation = installation
        keys = list(installation.keys.values())[: len(plans)]
        self.known = expected(installation, keys, plans, folder)
        self.placed = installation.placed()
        self.programs = start(installation, keys, plans, folder / "disturbed")
        try:
            eventually(lambda: all(program.num_steps >= 3 for program in self.programs), "three steps each", 300)
        except BaseException:
            self.finish()
            raise

    def worker_of(self, program: RunningProgram) -> dict:
        """Return the worker that computes the run of a program."""
        query = f"select replica from runs where model_id = '{program.model_id}'"
        ((place,),) = self.installation.postgres.execute(query)
        return self.placed[place]

    def finish(self) -> None:
        finish_all(self.programs)

    def check(self, what: str) -> None:
        differences = [assert_same(program, one) for program, one in zip(self.programs, self.known, strict=True)]
        assert max(differences) <= 1e-6
        pause = max(program.longest_pause for program in self.programs)
        log.info("%s: the longest pause was %.1f s, the largest difference %g", what, pause, max(differences))


def family_of(worker: dict) -> list[psutil.Process]:
    """Return the processes of a worker: its own and its engines'."""
    process = psutil.Process(worker["pid"])
    found = [process, *process.children(recursive=True)]
    assert len(found) >= 2, "a worker and an engine"
    return found


def test_workers_are_on_different_nodes(installation):
    placed = installation.placed()
    assert placed.keys() == REPLICAS
    assert {one["state"] for one in placed.values()} == {"running"}
    assert len({one["node_id"] for one in placed.values()}) == 2
    header, *lines = installation.command("status", "--config", str(installation.config)).splitlines()
    assert header.split() == "worker state node pid exits last exit".split()
    assert sorted(line.partition("@")[0] for line in lines) == sorted(REPLICAS)
    installation.wait_for_owners(2)
    assert installation.orphans() == []


@pytest.mark.parametrize("what", ["pid", "host_pid"])
def test_a_killed_worker_and_a_killed_actor_are_replaced(installation, tmp_path, what):
    disturbed = Disturbed(installation, [Plan(seed=1, steps=STEPS)], tmp_path)
    try:
        victim = disturbed.worker_of(disturbed.programs[0])
        family = family_of(victim)
        kill(victim[what])
        assert disturbed.programs[0].num_steps < STEPS, "it was computing the run"
        eventually(lambda: not any(one.is_running() for one in family), "the worker and its engines ended", 30)
    finally:
        disturbed.finish()
    disturbed.check(f"{what} killed")
    installation.wait_for_owners(2)
    assert installation.orphans() == []
    (other,) = (one for one in installation.placed().values() if one["name"] == victim["name"])
    assert other["pid"] != victim["pid"]
    assert (other["host_pid"] == victim["host_pid"]) == (what == "pid")
    assert "code -9" in other["last_exit"] if what == "pid" else other["num_exits"] == 0


def test_a_node_is_removed_and_another_added(installation, nodes, tmp_path):
    """Its run moves to the other node's replica, and its worker to the node that comes."""
    disturbed = Disturbed(installation, [Plan(seed=2, steps=STEPS)], tmp_path)
    try:
        victim = disturbed.worker_of(disturbed.programs[0])
        family = family_of(victim)
        nodes.remove(victim["node_id"])
        assert disturbed.programs[0].num_steps < STEPS, "the node was computing the run"
        eventually(lambda: not any(one.is_running() for one in family), "the processes of the node ended", 30)
    finally:
        disturbed.finish()
    disturbed.check("node removed")
    place = victim["name"].rpartition("@")[0]
    assert installation.placed()[place]["state"] == "waiting"
    assert installation.orphans() == []
    node_id = nodes.add(1)
    eventually(lambda: installation.placed()[place]["state"] == "running", "the worker has a place", 120)
    assert installation.placed()[place]["node_id"] == node_id
    installation.wait_for_owners(2)
    assert installation.orphans() == []


def test_start_again_changes_nothing_and_a_changed_configuration_restarts_workers(installation):
    before = installation.placed()
    installation.start_workers()
    assert installation.placed() == before
    text = installation.config.read_text()
    installation.config.write_text(text.replace("num_threads = 1", "num_threads = 1\nmax_context = 512"))
    try:
        installation.start_workers()
        after = installation.placed()
        assert after.keys() == REPLICAS
        assert {one["name"] for one in after.values()}.isdisjoint(one["name"] for one in before.values())
        installation.wait_for_owners(2)
        assert installation.orphans() == []
    finally:
        installation.config.write_text(text)
