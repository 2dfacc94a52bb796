"""The door to an engine: starts its process, carries commands in and results out, notices its death.

Every command gives a future; the process runs until ``close``. Nothing here waits for the engine but ``close``, so
commands may be sent from an event loop or from the callback of a future. Nothing here imports torch, so the API
process that owns the door stays light.
"""

import os
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import repeat
from queue import SimpleQueue
from typing import Any

import msgspec

from lorimer.engine.config import EngineConfig
from lorimer.engine.connection import Connection
from lorimer.engine.messages import (
    Cancel,
    Command,
    Done,
    Failed,
    LoadProgress,
    ModelInfo,
    Ready,
    Reply,
    Result,
    SampleProgress,
    Shutdown,
    TrainBatch,
    decode_command,
    decode_reply,
    encode,
)
from lorimer.errors import Cancelled, DiskFull, EngineDied, EngineError, InvalidInput

Event = LoadProgress | SampleProgress

_SETTINGS = {
    # Threads that wait for one another spin only briefly. A thread that spins holds the core that another process, such
    # as the client's, needs; beside one, small matrix products were measured twenty times slower by default.
    "GOMP_SPINCOUNT": "2000",
    # Large blocks of memory come in large pages: a training pass otherwise takes a hundred thousand page faults.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Of the engine's process, where the user has not set them."""


class EngineProcess:
    """An engine in a process of its own.

    ``on_event`` is called, on the reading thread, with loading progress and streamed tokens.
    """

    def __init__(self, config: EngineConfig, on_event: Callable[[Event], None] | None = None) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "lorimer.engine", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=_SETTINGS | os.environ
        )
        theirs.close()
        self._connection = Connection(ours)
        self._on_event = on_event or (lambda event: None)
        self._lock = threading.Lock()
        self._pending: dict[str, Future[Result]] = {}
        self._death: str | None = None
        self._reason = ""
        """Why the process is about to end, if it is known."""
        self.ready: Future[ModelInfo] = _future()
        """Resolves when the model is loaded, or fails with the reason it cannot be."""
        self.ended: Future[str] = _future()
        """Resolves when the process has ended, with what is known of why."""
        self._outbox: SimpleQueue[list[bytes] | None] = SimpleQueue()
        self._outbox.put([msgspec.msgpack.encode(config)])
        self._reader = threading.Thread(target=self._read, name="engine-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="engine-writer", daemon=True)
        self._reader.start()
        self._writer.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._death is None

    @property
    def num_pending(self) -> int:
        """Commands that are not answered."""
        return len(self._pending)

    def submit(self, command: Command) -> "Future[Result]":
        """Send a command that has a ``request_id``; its future fails with an error of ``lorimer.errors``."""
        if isinstance(command, TrainBatch | Cancel | Shutdown):
            raise TypeError(f"{type(command).__name__} is not submitted; there are train(), cancel() and close()")
        return self._send(command, [command.request_id])[0]

    def train(self, batch: TrainBatch) -> "list[Future[Result]]":
        """Send a batch; one future for each operation, in order."""
        payloads = batch.payloads
        bare = batch.with_payloads(repeat(b"")) if payloads else batch
        return self._send(bare, [operation.request_id for operation in batch.operations], payloads)

    def cancel(self, request_id: str) -> None:
        """Give a sample up: its future fails with ``Cancelled``, unless the result is already on its way."""
        self._outbox.put([encode(Cancel(request_id=request_id))])

    def _send(self, command: Command, request_ids: list[str], payloads: Sequence[bytes] = ()) -> "list[Future[Result]]":
        try:
            data = encode(command)
            decode_command(data)  # what the engine could not read must not reach it
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidInput(f"{type(command).__name__} cannot be sent: {error}") from error
        futures: list[Future[Result]] = [_future() for _ in request_ids]
        with self._lock:
            if self._death is not None:
                raise EngineDied(self._death)
            if not all(request_ids) or len(set(request_ids)) < len(request_ids):
                raise InvalidInput(f"request ids {request_ids!r} hold an empty one or one twice; others are accepted")
            if taken := self._pending.keys() & request_ids:
                raise InvalidInput(f"request id {min(taken)!r} is under way; it is accepted again once it is answered")
            self._pending.update(zip(request_ids, futures, strict=True))
            self._outbox.put([data, *payloads])
        return futures

    def _write(self) -> None:
        while (frames := self._outbox.get()) is not None:
            try:
                for data in frames:
                    self._connection.send(data)
            except OSError:  # the reader finds the same, and says so
                return

    def _read(self) -> None:
        try:
            while (data := self._connection.receive()) is not None:
                self._take(decode_reply(data))
        except Exception as error:  # it speaks another language, as after an upgrade under a running server
            self._reason = f": its reply makes no sense: {type(error).__name__}: {error}"
            self._process.kill()
        self._fail_pending()

    def _take(self, reply: Reply) -> None:
        if isinstance(reply, Ready):
            self.ready.set_result(reply.info)
        elif isinstance(reply, Failed) and not reply.request_id:
            self._reason = f": {reply.error}"
            self.ready.set_exception(_error(reply))
        elif isinstance(reply, Done | Failed):
            with self._lock:
                future = self._pending.pop(reply.request_id)
            if isinstance(reply, Done):
                future.set_result(reply.result)
            else:
                future.set_exception(_error(reply))
        else:
            try:
                self._on_event(reply)
            except Exception:  # the caller's, and no reason to leave all others without answers
                traceback.print_exc()

    def _fail_pending(self) -> None:
        death = f"the engine process {self.pid} ended with code {self._process.wait()}{self._reason}"
        with self._lock:
            self._death = death
            pending, self._pending = self._pending, {}
        self._outbox.put(None)
        if not self.ready.done():
            self.ready.set_exception(EngineDied(death))
        for future in pending.values():
            future.set_exception(EngineDied(death))
        self.ended.set_result(death)

    def kill(self) -> None:
        """End the process at once; what it was doing fails as when it dies by itself."""
        self._process.kill()

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Let the pass under way end, then stop the process; one that loads, or does not listen, is killed."""
        self._outbox.put([encode(Shutdown())])
        if not self.ready.done():
            self._process.kill()
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join()
        self._writer.join()
        self._connection.close()

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _future() -> "Future[Any]":
    """A future that its owner cannot cancel: the engine answers it in any case."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _error(reply: Failed) -> Exception:
    kinds = {"user": InvalidInput, "server": EngineError, "cancelled": Cancelled}
    error = kinds[reply.category](reply.error)
    if reply.code == "disk_full":
        error.__cause__ = DiskFull(reply.error)
    return error
