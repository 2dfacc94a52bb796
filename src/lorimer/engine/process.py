"""The interface to an engine process: start it, send commands, receive results, and detect its death.

Every command gives a future; the process runs until ``close``. Nothing here waits for the engine but ``close``, so
commands may be sent from an event loop or from the callback of a future. Does not import torch, which keeps the API
process small.
"""

import subprocess
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import repeat
from queue import SimpleQueue
from typing import Any

import msgspec

from lorimer.engine.config import EngineConfig
from lorimer.engine.launch import Launcher, launch
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


class EngineProcess:
    """An engine in a process of its own, or in several that share its base model.

    ``on_event`` is called, on the reading thread, with loading progress and streamed tokens.
    """

    def __init__(
        self, config: EngineConfig, on_event: Callable[[Event], None] | None = None, launcher: Launcher = launch
    ) -> None:
        self._link = launcher(config)
        self._connection = self._link.connection
        self._on_event = on_event or (lambda event: None)
        self._lock = threading.Lock()
        self._pending: dict[str, Future[Result]] = {}
        self._death: str | None = None
        self._reason = ""
        """Why the process is about to end, if known."""
        self.ready: Future[ModelInfo] = _future()
        """Resolves when the model is loaded, or fails with the reason it cannot be."""
        self.ended: Future[str] = _future()
        """Resolves when the process has ended, with the reason if known."""
        self._outbox: SimpleQueue[list[bytes] | None] = SimpleQueue()
        self._num_queued = 0
        """Messages that the writing thread has still to send."""
        self._post([msgspec.msgpack.encode(config)])
        self._reader = threading.Thread(target=self._read, name="engine-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="engine-writer", daemon=True)
        self._reader.start()
        self._writer.start()

    @property
    def pid(self) -> int | None:
        """The process id; None while the process is being forked."""
        return self._link.pid

    @property
    def is_alive(self) -> bool:
        return self._death is None

    @property
    def num_pending(self) -> int:
        """Number of commands without a reply."""
        return len(self._pending)

    def submit(self, command: Command) -> "Future[Result]":
        """Send a command that has a ``request_id``; its future fails with an error of ``lorimer.errors``."""
        if isinstance(command, TrainBatch | Cancel | Shutdown):
            raise TypeError(f"{type(command).__name__} is not submitted; there are train(), cancel() and close()")
        return self._send(command, [command.request_id])[0]

    def train(self, batch: TrainBatch) -> "list[Future[Result]]":
        """Send a batch; return one future for each operation, in order."""
        payloads = batch.payloads
        bare = batch.with_payloads(repeat(b"")) if payloads else batch
        return self._send(bare, [operation.request_id for operation in batch.operations], payloads)

    def cancel(self, request_id: str) -> None:
        """Cancel a sample: its future fails with ``Cancelled``, unless the result has been sent already."""
        with self._lock:
            self._post([encode(Cancel(request_id=request_id))])

    def _send(self, command: Command, request_ids: list[str], payloads: Sequence[bytes] = ()) -> "list[Future[Result]]":
        try:
            data = encode(command)
            decode_command(data)  # fail here rather than send what the engine cannot decode
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
            self._post([data, *payloads])
        return futures

    def _post(self, frames: Sequence[bytes]) -> None:
        """Send frames as far as that needs no waiting; leave the rest to the writing thread. Needs the lock.

        For a small command this is quicker than waking a thread, which must wait for the GIL.
        """
        try:
            rest = self._connection.to_parts(frames) if self._num_queued else self._connection.try_send(frames)
        except OSError:  # the reading thread notices the death too, and fails all futures
            return
        if rest:
            self._num_queued += 1
            self._outbox.put(rest)

    def _write(self) -> None:
        while (rest := self._outbox.get()) is not None:
            try:
                self._connection.finish_sending(rest)
            except OSError:
                return
            with self._lock:
                self._num_queued -= 1

    def _read(self) -> None:
        try:
            while (data := self._connection.receive()) is not None:
                self._take(decode_reply(data))
        except Exception as error:  # another version of the protocol, as after an upgrade under a running server
            self._reason = f": its reply makes no sense: {type(error).__name__}: {error}"
            self._link.kill()
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
            except Exception:  # an error of the caller's callback; the other commands still need their replies
                traceback.print_exc()

    def _fail_pending(self) -> None:
        death = self._link.wait() + self._reason
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
        """Kill the process; requests in progress fail as when it dies by itself."""
        self._link.kill()

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Stop the process after the current pass; kill one that is loading or does not respond."""
        with self._lock:
            self._post([encode(Shutdown())])
        if not self.ready.done():
            self._link.kill()
        try:
            self._link.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._link.kill()
        self._reader.join()
        self._writer.join()
        self._connection.close()

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _future() -> "Future[Any]":
    """A future that cannot be cancelled, because the engine replies in any case."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _error(reply: Failed) -> Exception:
    kinds = {"user": InvalidInput, "server": EngineError, "cancelled": Cancelled}
    error = kinds[reply.category](reply.error)
    if reply.code == "disk_full":
        error.__cause__ = DiskFull(reply.error)
    return error
