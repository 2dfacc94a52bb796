"""Has engines forked by a process that has imported them, so that an engine starts without its imports.

``ForkServer`` starts that process (``forker.py``), which listens on a Unix socket and imports the engine at the first
request. ``start`` passes it the descriptors, environment and directory of an engine, and gets a descriptor of its
process by which to watch and kill it; when the process has ended, its exit code. The environment must equal that of the
fork server but for ``UNRELATED`` variables, because libraries read theirs when they are imported. Resource limits,
niceness and process group are those of the fork server. Linux only, and not beside a GPU, whose driver does not survive
a fork. Does not import torch.
"""

import contextlib
import hashlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

VARIABLE = "LORIMER_ENGINE_FORK_SERVER"
"""An environment variable with the socket of the fork server to ask, if there is one."""
UNRELATED = ("LORIMER_", "TINKER_", "PYTEST_", "AWS_", "PG", "OTEL_", "COLUMNS", "LINES", "TORCHINDUCTOR_")
"""Beginnings of the names of variables that nothing reads while the engine is imported."""
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
MAX_REQUEST_BYTES = 1 << 17


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Start an engine. Its descriptors come with the message, followed by those for standard output and error."""

    arguments: Sequence[str]
    descriptors: Sequence[int]
    """Numbers that the engine knows its descriptors by."""
    environment: Mapping[bytes, bytes]
    directory: str
    name: str
    """Name of the process, of at most 15 bytes."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine runs; a descriptor of its process comes with the message."""

    pid: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    code: int


_decode = msgspec.msgpack.Decoder(Started | Ended).decode


def process_name(owner_pid: int) -> str:
    """Return the name of the engines that ``owner_pid`` has started, as ``ps`` shows it."""
    return f"engine {owner_pid}"


def start(
    address: str, arguments: Sequence[str], descriptors: Collection[int], environment: Mapping[str, str]
) -> "ForkedProcess | None":
    """Ask the fork server at ``address`` for an engine, without waiting for it.

    Return None if the fork server has ended, or has another environment.
    """
    request = Request(
        arguments=arguments,
        descriptors=list(descriptors),
        environment=dict(_encoded(environment)),
        directory=str(Path.cwd()),
        name=process_name(os.getpid()),
    )
    if Path(address).name != _fingerprint(environment):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setblocking(False)
        connection.connect(address)
        socket.send_fds(connection, [msgspec.msgpack.encode(request)], [*request.descriptors, 1, 2])
    except OSError:
        connection.close()
        return None
    connection.setblocking(True)
    return ForkedProcess(connection)


class ForkedProcess:
    """An engine that a fork server starts; has the methods of ``subprocess.Popen`` that its owner needs.

    It is not there yet while the fork server imports the engine for the first time.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.RLock()
        self._pid: int | None = None
        self._descriptor: int | None = None
        self._code: int | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None until the process is there."""
        with self._lock:
            if self._descriptor is None and self._code is None and _is_readable(self._connection, 0):
                self._take_start()
            return self._pid

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative after a signal; -1 if the fork server ended before it could tell."""
        stop = None if timeout is None else time.monotonic() + timeout
        if self._descriptor is None and self._code is None:
            self._wait_for(self._connection, stop)
            self._take_start()
        if self._code is None:
            assert self._descriptor is not None
            self._wait_for(self._descriptor, stop)
        with self._lock:
            if self._code is None:
                ended = _decode(data) if (data := self._connection.recv(MAX_REQUEST_BYTES)) else None
                self._end(ended.code if isinstance(ended, Ended) else -1)
            assert self._code is not None
            return self._code

    def kill(self) -> None:
        """Kill the process. One that is not there yet counts as ended; it will find its socket closed."""
        with self._lock:
            if self._code is not None:
                return
            if self.pid is None:
                self._end(-signal.SIGKILL)
            elif self._descriptor is not None:
                with contextlib.suppress(ProcessLookupError):  # it has ended, and nobody has waited for it yet
                    signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def _wait_for(self, what: int | socket.socket, stop: float | None) -> None:
        timeout = None if stop is None else max(0.0, stop - time.monotonic())
        if not _is_readable(what, timeout):
            raise subprocess.TimeoutExpired("lorimer.engine", timeout or 0.0)

    def _take_start(self) -> None:
        with self._lock:
            if self._descriptor is not None or self._code is not None:
                return
            data, received, *_ = socket.recv_fds(self._connection, MAX_REQUEST_BYTES, 1)
            started = _decode(data) if data else None
            if not isinstance(started, Started):
                self._end(-1)
                return
            self._pid, (self._descriptor,) = started.pid, received

    def _end(self, code: int) -> None:
        self._code = code
        with contextlib.suppress(OSError):  # the fork server has ended
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for the start
        self._connection.close()
        if self._descriptor is not None:
            os.close(self._descriptor)


def _is_readable(what: int | socket.socket, timeout: float | None) -> bool:
    poll = select.poll()
    poll.register(what, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


class ForkServer:
    """Starts a fork server and ends it. Its socket is in a directory that only this user can enter."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        directory = tempfile.mkdtemp(prefix="lorimer-engines-")
        self.address = str(Path(directory, _fingerprint(environment)))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            try:
                listening.bind(self.address)
            except OSError:  # the path is too long, or its file system has no sockets
                shutil.rmtree(directory)
                raise
            listening.listen(64)
            read, self._lifeline = os.pipe()
            passed = listening.fileno(), read
            command = [sys.executable, "-m", "lorimer.engine.forker", *map(str, passed), directory]
            self._process = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL, env=dict(environment))
            os.close(read)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End the fork server; the engines it has started run on."""
        os.close(self._lifeline)
        self._process.kill()
        self._process.wait()
        shutil.rmtree(Path(self.address).parent, ignore_errors=True)


def is_usable() -> bool:
    """Say whether engines of this machine can be forked."""
    return sys.platform == "linux" and not any(Path(device).exists() for device in GPU_DEVICES)


def _fingerprint(environment: Mapping[str, str]) -> str:
    """Return the name of the socket of a fork server with this environment, whose values may be secret."""
    related = {name: value for name, value in environment.items() if not name.startswith(UNRELATED)}
    return hashlib.sha256(msgspec.msgpack.encode(_encoded(related))).hexdigest()[:16]


def _encoded(environment: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return the variables as the system has them, which need not be text."""
    return sorted((os.fsencode(name), os.fsencode(value)) for name, value in environment.items())
