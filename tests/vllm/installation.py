"""A server whose base model is sampled by vLLM, and what can be seen of it from outside."""

import json
import sqlite3
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.environments import VLLM
from tests.conformance.servers import RunningServer, running_server

READY_SECONDS = 600


def write_config(path: Path, model: str, source: str = "", **sampler: object) -> Path:
    """Write a configuration that samples a base model with vLLM."""
    values = {"kind": "vllm", "python": str(VLLM.python()), "max_loras": 2} | sampler
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items())
    # By default vLLM reserves much of the memory of the machine.
    lines = [f'[model."{model}"]', f"memory_bytes = {2**30}", f"sampler = {{ {table} }}"]
    path.write_text("\n".join([*lines, f'source = "{source}"' if source else "", ""]), "utf-8")
    return path


@dataclass(frozen=True)
class Installation:
    server: RunningServer
    model: str
    key: str = ""

    @property
    def pid(self) -> int:
        """The process id of the server, which holds the lock of its directory."""
        return int((self.server.data / "lock").read_text("utf-8").split()[1])

    def replica(self) -> dict[str, object]:
        """What the server says of the sampler replica."""
        request = urllib.request.Request(f"{self.server.url}/api/v1/replicas", headers={"X-API-Key": self.key})
        with urllib.request.urlopen(request, timeout=30) as answer:
            found = {replica["name"]: replica for replica in json.load(answer)["replicas"]}
        return found[f"{self.model}#sampler-0"]

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while (found := self.replica())["state"] != "ready":
            assert time.monotonic() < deadline, found
            time.sleep(0.5)

    def places(self) -> Counter[str]:
        """The number of samples that each replica was given."""
        with sqlite3.connect(f"file:{self.server.data / 'lorimer.db'}?mode=ro", uri=True) as database:
            query = "SELECT place, count(*) FROM futures WHERE kind = 'sample' GROUP BY place"
            return Counter(dict(database.execute(query).fetchall()))

    def num_places(self, work: Callable[[], object]) -> dict[str, int]:
        """Do something, and return the number of samples that each replica was given for it."""
        before = self.places()
        work()
        return dict(self.places() - before)


@contextmanager
def running_installation(
    data: Path, model: str, source: str = "", key: str = "", ignore_seeds: bool = True, **settings: object
) -> Iterator[Installation]:
    """Serve one base model until the block ends; vLLM is ready when the first line of the block runs."""
    config = write_config(data.parent / "vllm.toml", model, source, ignore_seeds=ignore_seeds)
    with running_server(data, [], config=config, start_engines="eager", **settings) as server:
        opened = Installation(server, model, key)
        opened.wait_until_ready()
        yield opened


def vllm_processes(ancestor: int) -> list[psutil.Process]:
    """The API servers of vLLM below a process."""
    found = psutil.Process(ancestor).children(recursive=True)
    return [process for process in found if "vllm.entrypoints.openai.api_server" in _command(process)[1:3]]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
