"""Makes the actors of a Ray cluster those that a plan asks for, and says where they are.

Actors are detached: Ray keeps and restarts them when this program has ended. Ray carries no requests and owns no state;
all of it is in the database. `connected` is where to begin.
"""

import contextlib
import importlib
import ipaddress
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lorimer.cluster.plan import Resources, Worker
from lorimer.cluster.worker_host import WorkerHost
from lorimer.errors import LorimerError, NoServer, Unsupported

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 5.0
"""An actor that does not answer within this time has no place yet, or is being restarted."""
END_SECONDS = 30.0
LOOK_SECONDS = 0.5
_VARIABLES = {
    # Give up after seconds instead of minutes.
    "RAY_NUM_REDIS_GET_RETRIES": "2",
    "RAY_gcs_rpc_server_connect_timeout_s": "5",
}
"""Environment variables of Ray in this program, unless the user has set them."""


@dataclass(frozen=True)
class Placed:
    """A worker as Ray has it."""

    name: str
    state: str
    """``running``; ``restarting``: its process has ended and is started again; ``waiting``: it has no node."""
    node: str = ""
    node_id: str = ""
    pid: int | None = None
    host_pid: int | None = None
    """Of the actor, which runs the worker."""
    num_exits: int = 0
    """Ends of the worker since its actor was started."""
    last_exit: str = ""


class RayWorkers:
    """The workers of one installation; used by one program at a time."""

    def __init__(self, ray: Any, namespace: str) -> None:
        self._ray, self._namespace = ray, namespace

    # ── nodes ─────────────────────────────────────────────────────────────────────────────────────────

    def nodes(self) -> dict[str, Resources]:
        """Return what each node that is alive has in all, by its address and id."""
        found = {}
        for node in self._ray.nodes():
            if node["Alive"]:
                total = node["Resources"]
                found[f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"] = Resources(
                    num_gpus=int(total.get("GPU", 0)),
                    num_cpus=int(total.get("CPU", 0)),
                    memory_bytes=int(total.get("memory", 0)),
                )
        return found

    def is_open(self) -> bool:
        """Return whether a program without a token, on another machine, could give this cluster commands."""
        addresses = [node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]]
        is_local = all(ipaddress.ip_address(address).is_loopback for address in addresses)
        return not is_local and os.environ.get("RAY_AUTH_MODE", "").lower() != "token"

    # ── workers ───────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Disconnect; workers run on."""
        self._ray.shutdown()

    def names(self) -> list[str]:
        listed = self._ray.util.list_named_actors(all_namespaces=True)
        return sorted(one["name"] for one in listed if one["namespace"] == self._namespace)

    def create(self, worker: Worker) -> None:
        resources = worker.resources
        host = self._ray.remote(WorkerHost).options(
            name=worker.name,
            namespace=self._namespace,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=4,
            num_gpus=resources.num_gpus,
            num_cpus=resources.num_cpus,
            memory=resources.memory_bytes or None,
        )
        host.remote(list(worker.flags), resources.num_gpus)

    def stop(self, names: Sequence[str], seconds: float) -> None:
        """Let workers finish what they compute, for at most so long, and remove them."""
        hosts = [self._ray.get_actor(name, namespace=self._namespace) for name in names]
        ending = [host.stop.remote(seconds) for host in hosts if _is_there(self._ray, host)]
        if ending:
            self._ray.wait(ending, num_returns=len(ending), timeout=seconds + END_SECONDS)
        for host in hosts:
            self._ray.kill(host, no_restart=True)
        deadline = time.monotonic() + END_SECONDS
        while left := set(names) & set(self.names()):
            if time.monotonic() > deadline:
                raise LorimerError(f"Ray did not end {', '.join(sorted(left))} within {END_SECONDS:g} s")
            time.sleep(LOOK_SECONDS)

    def placed(self) -> list[Placed]:
        """Return the workers, each with its place."""
        names = self.names()
        hosts = [self._ray.get_actor(name, namespace=self._namespace) for name in names]
        asked = [host.status.remote() for host in hosts]
        self._ray.wait(asked, num_returns=len(asked), timeout=ANSWER_SECONDS) if asked else None
        return [self._placed(name, answer) for name, answer in zip(names, asked, strict=True)]

    def _placed(self, name: str, answer: Any) -> Placed:
        try:
            found = self._ray.get(answer, timeout=0)
        except (self._ray.exceptions.GetTimeoutError, self._ray.exceptions.RayActorError):
            return Placed(name, "waiting")
        return Placed(name, "restarting" if found["pid"] is None else "running", **found)


def _is_there(ray: Any, host: Any) -> bool:
    try:
        ray.get(host.status.remote(), timeout=ANSWER_SECONDS)
    except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
        return False
    return True


@contextmanager
def connected(namespace: str) -> Iterator[RayWorkers]:
    """Connect to the cluster that ``RAY_ADDRESS`` names, or that this machine is a node of.

    Within the block standard output is standard error: Ray prints news of nodes to it, and commands print JSON.
    """
    with contextlib.redirect_stdout(sys.stderr):
        workers = _connect(namespace)
        try:
            yield workers
        finally:
            workers.close()


def _connect(namespace: str) -> RayWorkers:
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise Unsupported(
            f"cluster 'ray' needs the package ray, which is not installed ({error}): pip install 'lorimer[cluster]'"
        ) from None
    address = os.environ.get("RAY_ADDRESS") or "auto"
    _check_address(address)
    with _standard_error() as said:
        try:
            ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="error")
            refusal = ""
        except Exception as error:
            refusal = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "InvalidAuthToken" in said():
        refusal = "it asks for a token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH"
    if refusal:
        raise NoServer(
            f"no Ray cluster answers this machine, which must be one of its nodes, at {address!r}: {refusal}"
        )
    return RayWorkers(ray, namespace)


@contextmanager
def _standard_error() -> Iterator[Callable[[], str]]:
    """Keep what Ray's libraries write there past Python: they repeat themselves where an exception says enough."""
    with tempfile.TemporaryFile() as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        text: list[str] = []
        try:
            yield lambda: text[0]
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            text.append(file.read().decode("utf-8", "replace"))


def _check_address(address: str) -> None:
    """Refuse what Ray would try for minutes, or cannot do."""
    if "://" in address:
        raise Unsupported(
            f"RAY_ADDRESS is {address!r}; HOST:PORT of the head is accepted, on a machine that is a node of the cluster"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise NoServer(
            f"no Ray cluster answers at {address!r} ({error.strerror or error}); RAY_ADDRESS names the head, such as"
            " '10.0.0.1:6379'"
        ) from error
