"""A real server for the tests: ``lorimer serve`` in a process of its own, on a free port of this machine."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from lorimer.engine import fork_server

ROOT = Path(__file__).parents[2]
LORIMER = [sys.executable, "-m", "lorimer.cli.main"]
ADDRESS = re.compile(r" at (http://\S+) ")
SOURCES = os.pathsep.join(
    dict.fromkeys(filter(None, [str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
)
"""What ``PYTHONPATH`` is for processes that tests start."""
END_SECONDS = 60
READY_LINE = "lorimer key create"
"""Begins the last line of what a server prints when it is ready."""


@dataclass(frozen=True)
class RunningServer:
    url: str
    data: Path


def environment(**values: str) -> dict[str, str]:
    """The environment of this process without what would steer a server or an SDK, with ``values``."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("LORIMER_", "TINKER_"))}
    if address := os.environ.get(fork_server.VARIABLE):
        ours[fork_server.VARIABLE] = address
    return ours | {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"} | values


def children(pid: int, *, recursive: bool = False) -> list[psutil.Process]:
    """The processes of a server, also engines that were forked for it, but no fork server; none if it has ended."""
    try:
        started = psutil.Process(pid).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []
    owners = {pid, *(one.pid for one in started)} if recursive else {pid}
    names = {fork_server.process_name(owner) for owner in owners}
    forked = [one for one in psutil.process_iter(["name"]) if one.info["name"] in names and one not in started]
    return [one for one in started if is_engine(one) or not is_fork_server(one)] + forked


def is_fork_server(process: psutil.Process) -> bool:
    try:
        return "lorimer.engine.forker" in process.cmdline()
    except psutil.Error:
        return False


def is_engine(process: psutil.Process) -> bool:
    try:
        return "lorimer.engine" in process.cmdline() or process.name().startswith("engine ")
    except psutil.Error:  # it has just ended
        return False


def create_key(data: Path, user: str) -> str:
    """The secret of a new key. An installation of several processes has its configuration beside the data."""
    config = data.parent / "lorimer.toml"
    command = [*LORIMER, "key", "create", user, "--data", str(data)]
    command += ["--config", str(config)] if config.exists() else []
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@contextmanager
def running_server(
    data: Path, models: Sequence[str], *, config: Path | None = None, **settings: object
) -> Iterator[RunningServer]:
    """Serve ``models`` until the block ends; ready when the first line of the block runs."""
    command = [*LORIMER, "serve", "--port", "0", "--data", str(data), "--dtype", "float32", "--set", "num_threads=1"]
    command += ["--config", str(config)] if config is not None else []
    for model in models:
        command += ["--model", model]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    log = data.parent / f"{data.name}.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            yield RunningServer(wait_for_address(process, log), data)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=END_SECONDS)
    assert process.returncode == 0, log.read_text("utf-8")[-3000:]


def wait_for_address(process: "subprocess.Popen[str]", log: Path) -> str:
    """The address of a server that has just become ready."""
    assert process.stdout is not None
    address = ""
    for line in process.stdout:
        if found := ADDRESS.search(line):
            address = found[1]
        if line.startswith(READY_LINE):
            return address
    raise AssertionError(f"the server ended before it was ready: {log.read_text('utf-8')}")
