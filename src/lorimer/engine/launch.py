"""Starts the processes of an engine and ends them together: one process, or the ranks that share a base model.

Rank 0 speaks to whoever started it; each other rank speaks to rank 0 only. When one rank ends, the others are killed,
and all end when the process that started them does. Does not import torch.
"""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

import msgspec

from lorimer.engine.channel import Connection
from lorimer.engine.config import EngineConfig

_SETTINGS = {
    # Let waiting threads spin only briefly. A spinning thread holds a core that another process, such as the client,
    # needs; with the default, small matrix products were measured twenty times slower beside one.
    "GOMP_SPINCOUNT": "2000",
    # Large blocks of memory come in large pages: a training pass otherwise takes a hundred thousand page faults.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Environment variables of engine processes, unless the user has set them."""
PROGRAM = "LORIMER_BENCH_ENGINE"
"""For benchmarks only: an environment variable with the name of a module that runs instead of the engine."""


class Link(Protocol):
    """An engine that was started, seen from outside."""

    @property
    def connection(self) -> Connection: ...
    @property
    def pid(self) -> int: ...
    def wait(self, timeout_seconds: float | None = None) -> str:
        """Wait until all of it has ended; return why. Raise ``subprocess.TimeoutExpired`` if it does not."""
        ...

    def kill(self) -> None: ...


Launcher = Callable[[EngineConfig], Link]


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one process among the ranks of an engine; descriptors are those it inherits."""

    rank: int
    size: int
    store: str
    """File by which the ranks find each other."""
    lifeline: int
    """A pipe that ends when the process that started the ranks ends."""
    peers: list[int]
    """Sockets: of rank 0 one to each other rank, of the others one to rank 0."""


def launch(config: EngineConfig) -> Link:
    """Start the processes of an engine on this machine."""
    if config.ranks > 1:
        return _Group(config.ranks)
    return _Single(os.environ.get(PROGRAM, "lorimer.engine") if config.vllm is None else "lorimer.engine.vllm")


def _start(module: str, descriptors: Collection[int], *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module, *arguments]
    variables = _SETTINGS | os.environ | variables
    return subprocess.Popen(command, pass_fds=tuple(descriptors), stdin=subprocess.DEVNULL, env=variables)


class _Single:
    def __init__(self, module: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _start(module, [theirs.fileno()], str(theirs.fileno()))
        self.connection = Connection(ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_seconds: float | None = None) -> str:
        code = self._process.wait(timeout_seconds)
        return f"the engine process {self.pid} ended with code {code}"

    def kill(self) -> None:
        self._process.kill()


class _Group:
    def __init__(self, size: int) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="lorimer-ranks-"))
        read, self._lifeline = os.pipe()
        pairs = [socket.socketpair() for _ in range(size)]
        """The first is that of rank 0 and its owner, the others those of rank 0 and each other rank."""
        hub = [ours.fileno() for ours, _ in pairs[1:]]
        self._processes: list[subprocess.Popen[bytes]] = []
        # Ranks must do everything in the same order, that of a set of strings included.
        hash_seed = str(secrets.randbelow(2**32))
        try:
            for rank, (_, theirs) in enumerate(pairs):
                peers = [theirs.fileno()] if rank else hub
                seat = Seat(rank=rank, size=size, store=str(self._directory / "store"), lifeline=read, peers=peers)
                descriptors = {theirs.fileno(), read, *peers}
                arguments = str(theirs.fileno()), msgspec.json.encode(seat).decode()
                self._processes.append(_start("lorimer.engine", descriptors, *arguments, PYTHONHASHSEED=hash_seed))
        except OSError:
            self.kill()
            raise
        finally:
            os.close(read)
            for number, (ours, theirs) in enumerate(pairs):
                theirs.close()
                if number:
                    ours.close()
        self.connection = Connection(pairs[0][0])
        self._lock = threading.Lock()
        self._first = ""
        """Which rank ended first, and how: the others are killed because of it."""
        self._watches = [
            threading.Thread(target=self._watch, args=[rank], name=f"engine-rank-{rank}", daemon=True)
            for rank in range(size)
        ]
        self._cleaning = threading.Thread(target=self._clean, name="engine-ranks", daemon=True)
        for thread in [*self._watches, self._cleaning]:
            thread.start()

    @property
    def pid(self) -> int:
        return self._processes[0].pid

    def _watch(self, rank: int) -> None:
        process = self._processes[rank]
        code = process.wait()
        with self._lock:
            size = len(self._processes)
            self._first = self._first or f"rank {rank} of {size}, process {process.pid}, ended with code {code}"
        self.kill()

    def _clean(self) -> None:
        for thread in self._watches:
            thread.join()
        os.close(self._lifeline)
        shutil.rmtree(self._directory, ignore_errors=True)

    def wait(self, timeout_seconds: float | None = None) -> str:
        stop = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        for process in self._processes:
            process.wait(None if stop is None else max(0.0, stop - time.monotonic()))
        self._cleaning.join()
        return f"the engine ended: {self._first}"

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
