"""Starts the processes of an engine and ends them together: one process, or the ranks that share a base model.

Rank 0 speaks to whoever started it; each other rank speaks to rank 0 only. When one rank ends, the others are killed,
and all end when the process that started them does. Does not import torch.
"""

import contextlib
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

from lorimer.engine import fork_server
from lorimer.engine.channel import Connection
from lorimer.engine.config import EngineConfig
from lorimer.engine.fork_server import ForkedProcess, ForkServer

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
    def pid(self) -> int | None:
        """The process id; None while the process is being forked."""
        ...

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


def launch(config: EngineConfig, fork_address: str = "") -> Link:
    """Start the processes of an engine on this machine, by a fork server if there is one."""
    if config.ranks > 1:
        return _Group(config.ranks)
    if config.vllm is not None:
        return _Single("lorimer.engine.vllm")
    if program := os.environ.get(PROGRAM):
        return _Single(program)
    return _Single("lorimer.engine", os.environ.get(fork_server.VARIABLE) or fork_address)


class ForkingLauncher:
    """Forks engines where that is possible: the second one, or one started anew, is ready in a fraction of the time."""

    def __init__(self) -> None:
        self._forks: ForkServer | None = None

    def __call__(self, config: EngineConfig) -> Link:
        if config.ranks > 1 or config.vllm is not None or PROGRAM in os.environ or fork_server.VARIABLE in os.environ:
            return launch(config)
        if self._forks is not None and self._forks.has_ended:
            self.close()
        if self._forks is None and fork_server.is_usable():
            with contextlib.suppress(OSError):  # no place for its socket: engines are started alone
                self._forks = ForkServer(engine_environment())
        return launch(config, self._forks.address if self._forks else "")

    def close(self) -> None:
        """End the fork server, if there is one; engines run on."""
        if self._forks is not None:
            self._forks.close()
            self._forks = None


def engine_environment() -> dict[str, str]:
    """Return the environment variables of engine processes."""
    return _SETTINGS | os.environ


Process = subprocess.Popen[bytes] | ForkedProcess


def _start(module: str, descriptors: Collection[int], *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module, *arguments]
    environment = engine_environment() | variables
    return subprocess.Popen(command, pass_fds=tuple(descriptors), stdin=subprocess.DEVNULL, env=environment)


class _Single:
    def __init__(self, module: str, fork_address: str = "") -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            environment = engine_environment()
            forked = fork_server.start(fork_address, [str(number)], [number], environment) if fork_address else None
            self._process: Process = forked or _start(module, [number], str(number))
        self.connection = Connection(ours)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def wait(self, timeout_seconds: float | None = None) -> str:
        code = self._process.wait(timeout_seconds)
        return f"the engine process {self.pid} ended with code {code}"

    def kill(self) -> None:
        self._process.kill()
        if self.pid is None:  # the fork server holds the other end of the socket, and may for long
            self.connection.close()


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
