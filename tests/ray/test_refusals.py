"""What ``lorimer cluster`` and ``lorimer serve`` are refused with ``cluster = "ray"``: each in one sentence.

The first tests need no Ray cluster; where Ray is not installed, the message about that is tested in
``tests/cluster/test_start.py``.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.test_start import refused
from tests.faults.supervisor import eventually, free_port
from tests.ray.clusters import Nodes, RayInstallation, ray_nodes
from tests.store.postgres import find_binaries

pytestmark = pytest.mark.timeout(600)


def write(path: Path, *lines: str) -> Path:
    path.write_text(
        "\n".join(['cluster = "ray"', 'database = "postgresql://l@127.0.0.1:1/none"', "num_threads = 1", *lines])
    )
    return path


def test_an_address_that_nobody_has(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    line = refused("cluster", "start", "--config", str(write(tmp_path / "lorimer.toml")), code=5)
    assert "no Ray cluster answers at '127.0.0.1:" in line and "Connection refused" in line


def test_a_machine_without_a_node(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    line = refused("cluster", "status", "--config", str(write(tmp_path / "lorimer.toml")), code=5)
    assert "no Ray cluster answers this machine" in line and "Could not find any running Ray instance" in line


def test_an_address_of_a_ray_client(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    line = refused("cluster", "stop", "--config", str(write(tmp_path / "lorimer.toml")), code=2)
    assert "HOST:PORT of the head is accepted" in line


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes(2, num_gpus=4, memory=2**30) as started:
        yield started


def test_a_wrong_token(nodes, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    line = refused("cluster", "status", "--config", str(write(tmp_path / "lorimer.toml")), code=5)
    assert "at '127.0.0.2:" in line and "it asks for a token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN" in line


@pytest.mark.parametrize(
    ("table", "needs"),
    [
        ('device = "cuda"\nranks = 8', "8 GPU, 8 CPU"),
        ('device = "cpu"\nnum_threads = 3', "3 CPU"),
        (f'device = "cpu"\nmemory_bytes = {2**31}', "1 CPU, 2.0 GiB"),
    ],
)
def test_a_worker_that_no_node_can_have(nodes, tmp_path, table, needs):
    config = write(tmp_path / "lorimer.toml", '[model."lorimer/debug"]', table)
    line = refused("cluster", "start", "--config", str(config), code=2)
    assert f"the worker of lorimer/debug#0 needs {needs} on one node; the nodes have 127.0.0.2 (" in line
    assert "4 GPU, 2 CPU, 1.0 GiB" in line


def test_threads_of_an_engine_on_the_cpu_must_be_given(nodes, tmp_path):
    config = write(tmp_path / "lorimer.toml", '[model."lorimer/debug"]', 'device = "cpu"', "num_threads = 0")
    line = refused("cluster", "start", "--config", str(config), code=2)
    assert "num_threads of 'lorimer/debug' is 0" in line


@pytest.mark.skipif(find_binaries() is None, reason="PostgreSQL is not installed")
def test_a_worker_sees_the_gpus_that_ray_reserved_for_it(nodes, tmp_path):
    """The GPUs are numbers here, so that its engine finds none; Lorimer passes on what Ray says."""
    options = {"num_apis": 0, "num_workers": 1, "num_replicas": 1, "ranks": 2, "device": "cuda"}
    installation = RayInstallation(tmp_path / "gpus", {"lorimer/debug": "lorimer/debug"}, **options)
    with installation:
        eventually(lambda: installation.placed()["lorimer/debug#0"]["pid"], "the worker was started")
        worker = psutil.Process(installation.placed()["lorimer/debug#0"]["pid"])
        seen = worker.environ()["CUDA_VISIBLE_DEVICES"].split(",")
        assert len(seen) == 2 and set(seen) < set("0123")
    assert installation.processes() == []
