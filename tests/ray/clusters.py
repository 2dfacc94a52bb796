"""A Ray cluster of several nodes on this machine, and an installation whose workers it places.

Imported only where Ray is installed: in the environment that ``make test-ray`` makes.
"""

import contextlib
import gc
import importlib
import itertools
import json
import os
import secrets
import signal
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from tests.cluster.installation import Installation, Member
from tests.conformance.servers import LORIMER, environment, is_fork_server
from tests.faults.supervisor import WAIT_SECONDS, eventually

OBJECT_BYTES = 80 * 2**20
TOKEN = secrets.token_hex(32)
"""Of every cluster of this process: Ray reads it once."""


class Nodes:
    """The nodes of a cluster; the first is its head."""

    def __init__(self, num_cpus: int, **arguments: object) -> None:
        utilities: Any = importlib.import_module("ray.cluster_utils")
        # Ray takes 127.0.0.1 for the address that others reach this machine by.
        self._addresses = (f"127.0.0.{number}" for number in itertools.count(2))
        head = self._arguments(num_cpus, **arguments) | {"include_dashboard": False}
        self._cluster = utilities.Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address

    def _arguments(self, num_cpus: int, **arguments: object) -> dict[str, object]:
        return {
            "num_cpus": num_cpus,
            "node_ip_address": next(self._addresses),
            "object_store_memory": OBJECT_BYTES,
            **arguments,
        }

    def add(self, num_cpus: int, **arguments: object) -> str:
        """Add a node; return its id."""
        node_id: str = self._cluster.add_node(**self._arguments(num_cpus, **arguments)).node_id
        return node_id

    def remove(self, node_id: str) -> None:
        """End all processes of a node without a warning."""
        (node,) = (node for node in self._cluster.worker_nodes if node.node_id == node_id)
        self._cluster.remove_node(node, allow_graceful=False)

    def others(self) -> list[str]:
        """Return the ids of the nodes besides the head."""
        return [node.node_id for node in self._cluster.worker_nodes]

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def ray_nodes(num_cpus: int, **arguments: object) -> Iterator[Nodes]:
    """Start a head with this many logical CPUs, on loopback, which asks for a token; try twice."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in [name for name in os.environ if name.startswith(("LORIMER_", "TINKER_"))]:
            patch.delenv(name)  # nodes pass their environment on to workers
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        patch.setenv("OMP_NUM_THREADS", "1")
        try:
            nodes = Nodes(num_cpus, **arguments)
        except Exception:
            nodes = Nodes(num_cpus, **arguments)
        patch.setenv("RAY_ADDRESS", nodes.address)
        try:
            yield nodes
        finally:
            nodes.close()
            gc.collect()


class RayInstallation(Installation):
    """Its workers are placed by ``lorimer cluster start``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **({"cluster": "ray"} | options))

    def add_worker(self, number: int) -> Member:
        """Start all workers with the first; the others are there already."""
        if number == 0:
            self.start_workers()
            self._stack.callback(self.command, "stop", "--config", str(self.config))
        return None  # type: ignore[return-value]

    def start_workers(self, *flags: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.command("start", "--config", str(self.config), "-f", "json"))
        return found

    def command(self, *words: str, code: int = 0) -> str:
        """Run ``lorimer cluster`` and return what it prints; of one that fails, its error."""
        done = subprocess.run(
            [*LORIMER, "cluster", *words],
            env=environment(**self._extra),
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    def placed(self) -> dict[str, dict[str, Any]]:
        """Return the workers by the replica that they compute."""
        found = json.loads(self.command("status", "--config", str(self.config), "-f", "json"))
        return {one["name"].rpartition("@")[0]: one for one in found}

    def wait_for_owners(self, number: int, seconds: float = WAIT_SECONDS) -> None:
        query = "select count(*) from replicas where owner_id is not null and state = 'ready'"
        eventually(lambda: self.postgres.execute(query) == [(number,)], f"{number} replicas have owners", seconds)

    def processes(self) -> list[psutil.Process]:
        """Return every worker of this installation, and every engine and fork server, but not that of the tests."""
        return [
            process
            for process in psutil.process_iter()
            if any(word in self._command_line(process) for word in (str(self.config), "lorimer.engine"))
            and "ray::" not in self._command_line(process)
            and not (is_fork_server(process) and process.ppid() == os.getpid())
        ]

    @staticmethod
    def _command_line(process: psutil.Process) -> str:
        with contextlib.suppress(psutil.Error):
            if process.environ().get("PYTEST_RUN_ID") == os.environ["PYTEST_RUN_ID"]:
                return " ".join(process.cmdline())
        return ""

    def orphans(self) -> list[str]:
        """Return workers whose actor is gone, and engines whose worker is gone."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                line, parents = self._command_line(process), process.parents()
                if " worker " in line or "lorimer.engine" in line:
                    expected = "ray::" if " worker " in line else " worker "
                    # An engine is a child of its worker, or of the worker's fork server.
                    if not any(expected in " ".join(parent.cmdline()) for parent in parents[:2]):
                        found.append(f"{process.pid} of {parents[:1]}: {line}")
        return found


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", f"{pid} ended", 30)
