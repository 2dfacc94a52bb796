"""Starts a real server process and measures the memory of its processes and the size of its directory."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.timing import say
from lorimer.engine.fork_server import process_name

MODEL = "lorimer/debug"
ADDRESS = re.compile(r" at http://([\d.]+):(\d+) ")
READY_LINE = "lorimer key create"
"""Prefix of the last line that a server prints when it is ready."""
END_SECONDS = 120
SPARE_FILES = 200


@dataclass(frozen=True)
class Weight:
    """Bytes: resident memory of both processes, and the data directory."""

    api: int
    engine: int
    disk: int


@dataclass(frozen=True)
class BenchServer:
    host: str
    port: int
    pid: int
    data: Path

    def cpu_seconds(self) -> float:
        """Return the CPU time of the API process so far, which depends little on other load."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    def engine_cpu_seconds(self) -> float:
        """Return the CPU time of the engines so far, with the process that imports their libraries and forks them."""
        times = [child.cpu_times() for child in psutil.Process(self.pid).children(recursive=True)]
        return sum(one.user + one.system for one in times)

    def weigh(self) -> Weight:
        api = psutil.Process(self.pid)
        # Engines are forked by a child of the server.
        name = process_name(self.pid)
        engines = [child for child in api.children(recursive=True) if child.name() == name]
        return Weight(api.memory_info().rss, sum(child.memory_info().rss for child in engines), disk_bytes(self.data))


def disk_bytes(directory: Path) -> int:
    """Return the disk usage of files; a file deleted in the meantime counts 0."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(Path(folder) / name).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


@contextmanager
def running_server(
    data: Path, num_threads: int, model: str = MODEL, /, *, config: Path | None = None, **settings: object
) -> Iterator[BenchServer]:
    """Serve until the block ends; the server is ready when the block starts. Its log is next to ``data``."""
    command = [sys.executable, "-m", "lorimer.cli.main", "serve", "--port", "0", "--data", str(data), "--model", model]
    command += ["--dtype", "float32", *(["--config", str(config)] if config is not None else [])]
    for name, value in (settings | {"num_threads": num_threads}).items():
        command += ["--set", f"{name}={value}"]
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("LORIMER_", "TINKER_"))}
    log = data.parent / f"{data.name}.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(command, env=ours, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            host, port = _address(process, log)
            yield BenchServer(host, port, process.pid, data)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the server ended with code {process.returncode}: {_tail(log)}")


def _address(process: "subprocess.Popen[str]", log: Path) -> tuple[str, int]:
    assert process.stdout is not None
    found = None
    for line in process.stdout:
        found = ADDRESS.search(line) or found
        if line.startswith(READY_LINE) and found:
            return found[1], int(found[2])
    raise RuntimeError(f"the server ended before it was ready: {_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text("utf-8", errors="replace")[-3000:]


def allow_files(num_files: int) -> int:
    """Raise the limit of open files if the system allows it. Return the number of connections it permits."""
    try:
        import resource
    except ImportError:  # a system without such limits
        return num_files
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_files + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        say(f"only {soft} files may be open here, so there are fewer connections than planned")
        return max(1, soft - SPARE_FILES)
    return num_files
