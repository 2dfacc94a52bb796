"""The door to an engine: starts its process, carries commands in and results out, notices its death.

Every command gives a future; the process runs until ``close``. Nothing here imports torch, so the API process that
owns the door stays light.
"""

import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from lorimer.engine.config import EngineConfig
from lorimer.engine.connection import Connection
from lorimer.engine.messages import (
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
    decode_reply,
    encode,
)
from lorimer.errors import Cancelled, EngineDied, EngineError, InvalidInput

Event = LoadProgress | SampleProgress


class EngineProcess:
    """An engine in a process of its own.

    ``on_event`` is called, on the reading thread, with loading progress and streamed tokens.
    """

    def __init__(self, config: EngineConfig, on_event: Callable[[Event], None] | None = None) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "lorimer.engine.worker", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._connection = Connection(ours)
        self._on_event = on_event or (lambda event: None)
        self._lock = threading.Lock()
        self._pending: dict[str, Future[Result]] = {}
        self._died: EngineDied | None = None
        self.ready: Future[ModelInfo] = Future()
        """Resolves when the model is loaded, or fails with the reason it cannot be."""
        self._connection.send(msgspec.msgpack.encode(config))
        self._reader = threading.Thread(target=self._read, name="engine-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._died is None

    def submit(self, command: Command) -> "Future[Result]":
        """Send a command that has a ``request_id``; its future fails with an error of ``lorimer.errors``."""
        return self._send(command, [command.request_id])[0]  # type: ignore[union-attr]

    def train(self, batch: TrainBatch) -> "list[Future[Result]]":
        """Send a batch; one future for each operation, in order."""
        return self._send(batch, [operation.request_id for operation in batch.operations])

    def _send(self, command: Command, request_ids: list[str]) -> "list[Future[Result]]":
        data = encode(command)
        futures: list[Future[Result]] = [Future() for _ in request_ids]
        with self._lock:
            if self._died is not None:
                raise self._died
            taken = [i for i in request_ids if i in self._pending]
            if taken or len(set(request_ids)) < len(request_ids):
                raise InvalidInput(f"request id {(taken or request_ids)[0]!r} is already under way")
            self._pending.update(zip(request_ids, futures, strict=True))
        try:
            self._connection.send(data)
        except OSError:
            self._fail_pending()
        return futures

    def _read(self) -> None:
        while (data := self._connection.receive()) is not None:
            self._handle(decode_reply(data))
        self._fail_pending()

    def _handle(self, reply: Reply) -> None:
        if isinstance(reply, Done | Failed):
            with self._lock:
                future = self._pending.pop(reply.request_id, None)
            if reply.request_id == "" and isinstance(reply, Failed):
                self.ready.set_exception(_error(reply))
            elif future is not None:
                if isinstance(reply, Done):
                    future.set_result(reply.result)
                else:
                    future.set_exception(_error(reply))
        elif isinstance(reply, Ready):
            self.ready.set_result(reply.info)
        else:
            self._on_event(reply)

    def _fail_pending(self) -> None:
        code = self._process.wait()
        error = EngineDied(f"the engine process {self.pid} ended with code {code}")
        with self._lock:
            self._died = error
            pending, self._pending = self._pending, {}
        if not self.ready.done():
            self.ready.set_exception(error)
        for future in pending.values():
            future.set_exception(error)

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Let the pass under way end, then stop the process; one that does not listen is killed."""
        try:
            self._connection.send(encode(Shutdown()))
            self._process.wait(timeout_seconds)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
        self._reader.join()
        self._connection.close()

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _error(reply: Failed) -> Exception:
    kinds = {"user": InvalidInput, "server": EngineError, "cancelled": Cancelled}
    return kinds[reply.category](reply.error)
