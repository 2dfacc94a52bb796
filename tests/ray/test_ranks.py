"""A worker of Ray whose engine has two ranks, over S3: ranks and the actor are killed, and nothing is left behind."""

from collections.abc import Iterator

import psutil
import pytest

from tests.cluster.installation import missing_programs
from tests.cluster.test_kills import expected, start
from tests.faults.programs import assert_same, finish_all
from tests.faults.supervisor import eventually
from tests.faults.tenant import MODEL, Plan
from tests.ray.clusters import RayInstallation, kill, ray_nodes
from tests.store.buckets import BUCKET, moto, variables

pytestmark = pytest.mark.timeout(1800)
PLACE = f"{MODEL}#0"


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayInstallation]:
    if missing := missing_programs():
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "bucket").mkdir()
    with moto(folder / "bucket") as url, pytest.MonkeyPatch.context() as patch:
        for name, value in variables(url).items():
            patch.setenv(name, value)  # workers have the environment of their node
        with ray_nodes(0) as nodes:
            nodes.add(2)
            options = {"num_workers": 1, "num_replicas": 1, "ranks": 2, "users": ["alice"], "snapshot_seconds": 0.2}
            options |= {"objects": f"s3://{BUCKET}/lorimer", "extra": variables(url)}
            with RayInstallation(folder / "installation", {MODEL: MODEL}, **options) as opened:
                yield opened
            assert opened.processes() == [], "processes outlived the installation"


def ranks(installation: RayInstallation) -> dict[int, psutil.Process]:
    """Return the processes of the engine by their rank."""
    return {
        rank: process
        for process in installation.processes()
        for rank in range(2)
        if f'"rank":{rank},' in " ".join(process.cmdline())
    }


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_ranks_under_ray_train_and_killed_ranks_and_actors_leave_nothing(installation, tmp_path):
    installation.wait_for_owners(1)
    plan, keys = Plan(seed=5, steps=20, sample_every=0, save_every=6), list(installation.keys.values())
    (known,) = expected(installation, keys, [plan], tmp_path)
    first = installation.placed()[PLACE]
    (program,) = start(installation, keys, [plan], tmp_path / "disturbed")
    try:
        for steps, victim in ((3, 1), (8, 0), (13, "actor")):
            eventually(lambda steps=steps: program.num_steps >= steps or not program.is_running, f"{steps} steps", 300)
            eventually(lambda: len(ranks(installation)) == 2, "an engine of two ranks", 120)
            assert installation.orphans() == []
            before = ranks(installation)
            if victim == "actor":
                kill(first["host_pid"])
            else:
                before[victim].kill()
            assert program.num_steps < plan.steps, "it was computing the run"
            for process in before.values():
                eventually(lambda process=process: not is_running(process), "both ranks ended", 30)
    finally:
        finish_all([program])
    assert assert_same(program, known) == 0.0, "the same bits"
    installation.wait_for_owners(1)
    assert installation.orphans() == []
    worker = installation.placed()[PLACE]
    assert worker["pid"] != first["pid"] and worker["host_pid"] != first["host_pid"]
    assert [psutil.Process(process.ppid()).pid for process in ranks(installation).values()] == [worker["pid"]] * 2
