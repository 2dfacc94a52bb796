"""The engine process: takes commands, runs the next piece of training or sampling, replies. Nothing polls or sleeps.

Training commands run in the order they came; samples join the running batch immediately. When both wait, each gets the
time the other used: after every training pass the sampler runs about as long, so neither starves. A training batch
in progress when the worker must stop is dropped; it has changed nothing yet.

Of an engine with several ranks, rank 0 is the worker; the others execute the commands it passes on (``follow``).
"""

import contextlib
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Literal

import msgspec

from lorimer.engine.channel import Connection
from lorimer.engine.config import EngineConfig
from lorimer.engine.engine import Engine, settle
from lorimer.engine.launch import Seat
from lorimer.engine.messages import (
    Cancel,
    Command,
    CreateRun,
    Done,
    DropRun,
    DropSampler,
    Failed,
    GetStatus,
    LoadProgress,
    LoadSampler,
    LoadState,
    OptimStep,
    PublishSampler,
    Ready,
    RegisterLoss,
    Reply,
    Result,
    SampleRequest,
    SaveState,
    Shutdown,
    TrainBatch,
    TrainResult,
    decode_command,
    encode,
)
from lorimer.engine.sharding import ALONE, Shards, take_seat
from lorimer.errors import LorimerError, is_disk_full


class _Closing(BaseException):
    """The other end is gone. Not an ``Exception``, so that no handler on the way catches it."""


Outcomes = list[tuple[str, Result | Exception]]
"""The result or error of each request of a command, by its id."""


class Executor:
    """Executes the commands that change runs and samplers, in the order they came; at every rank alike."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._handlers: dict[type, Callable[..., Result]] = {
            CreateRun: engine.create_run,
            OptimStep: engine.optim_step,
            SaveState: engine.save_state,
            LoadState: engine.load_state,
            DropRun: engine.drop_run,
            RegisterLoss: engine.register_loss,
            PublishSampler: engine.publish_sampler,
            LoadSampler: engine.load_sampler,
            DropSampler: engine.drop_sampler,
            SampleRequest: engine.score,
        }

    def run(self, command: Command, between_passes: Callable[[], None] | None = None) -> Outcomes:
        if isinstance(command, TrainBatch):
            return self._train(command, between_passes)
        outcome: Result | Exception
        try:
            outcome = self._handlers[type(command)](command)
        except Exception as error:
            outcome = error
        if not isinstance(command, SaveState):  # which rank 0 alone writes, and which changes no rank
            self._engine.shards.confirm(isinstance(outcome, Exception))
        request_id: str = command.request_id  # type: ignore[union-attr]
        return [(request_id, outcome)]

    def _train(self, batch: TrainBatch, between_passes: Callable[[], None] | None) -> Outcomes:
        results: Sequence[TrainResult | Exception]
        try:
            results = self._engine.train(batch.operations, between_passes)
        except Exception as error:  # not of one operation; a batch adds gradients only when it succeeds
            results = [error] * len(batch.operations)
        return [(operation.request_id, result) for operation, result in zip(batch.operations, results, strict=True)]


class Worker:
    def __init__(self, engine: Engine, connection: Connection) -> None:
        self._engine, self._connection = engine, connection
        self._executor = Executor(engine)
        self._commands: deque[Command] = deque()
        self._is_closing = False
        self._work_began = 0.0

    def run(self) -> None:
        """Serve until a stop command arrives or the other end is gone."""
        sampler = self._engine.sampler
        with contextlib.suppress(_Closing):
            while not self._is_closing:
                self._receive(wait=not self._commands and sampler.is_idle)
                if self._commands and not self._is_closing:
                    self._work_began = time.perf_counter()
                    self._run_command()
                    self._sample_as_long()
                elif not sampler.is_idle:
                    self._sample()

    def _receive(self, wait: bool) -> None:
        """Receive the messages that have arrived; with ``wait``, at least one."""
        while wait or self._connection.has_message():
            wait = False
            command = _receive(self._connection)
            if command is None:
                self._is_closing = True
                return
            self._take(command)

    def _take(self, command: Command) -> None:
        if isinstance(command, Shutdown):
            self._is_closing = True
        elif isinstance(command, SampleRequest) and not self._engine.is_score(command):
            self._answer_error(command.request_id, lambda: self._engine.add_sample(command))
        elif isinstance(command, Cancel):
            if self._engine.sampler.cancel(command.request_id):
                self.send(Failed(request_id=command.request_id, category="cancelled", error="cancelled by the client"))
        elif isinstance(command, GetStatus):
            self.send(Done(request_id=command.request_id, result=self._engine.status()))
        else:
            self._commands.append(command)

    def _run_command(self) -> None:
        command = self._commands.popleft()
        if not self._engine.shards.is_alone:
            self._engine.shards.tell(_frames(command))
        for request_id, outcome in self._executor.run(command, self._between_passes):
            if isinstance(outcome, Exception):
                self.send(_failure(request_id, outcome))
            else:
                self.send(Done(request_id=request_id, result=outcome))

    def _between_passes(self) -> None:
        """Receive messages and run the sampler; the trainer calls this after a pass."""
        self._receive(wait=False)
        self._sample_as_long()
        if self._is_closing:
            raise _Closing

    def _sample_as_long(self) -> None:
        """Run the sampler for as long as other work has run since its last turn."""
        self._sample_for(time.perf_counter() - self._work_began)
        self._work_began = time.perf_counter()

    def _sample_for(self, seconds: float) -> None:
        stop = time.perf_counter() + seconds
        while not self._engine.sampler.is_idle and time.perf_counter() < stop and not self._is_closing:
            self._sample()
            self._receive(wait=False)

    def _sample(self) -> None:
        try:
            replies = self._engine.sampler.step()
        except Exception as error:
            replies = self._engine.sampler.fail_all(error)
        for reply in replies:
            self.send(reply)

    def _answer_error(self, request_id: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.send(_failure(request_id, error))

    def send(self, reply: Reply) -> None:
        """Send a reply; stop if the other end is gone."""
        try:
            self._connection.send(encode(reply))
        except OSError:
            self._is_closing = True


def _receive(connection: Connection) -> Command | None:
    """Return the next command with its payloads; ``None`` when the other end is gone."""
    data = connection.receive()
    if data is None:
        return None
    command = decode_command(data)
    if isinstance(command, TrainBatch):
        # Payloads after the end of the connection are missing.
        received = [connection.receive() for _ in command.payloads]
        command = command.with_payloads(bytes(payload or b"") for payload in received)
    return command


def _frames(command: Command) -> list[bytes]:
    """Return the messages that ``_receive`` makes the command of."""
    if isinstance(command, TrainBatch) and command.payloads:
        return [encode(command.with_payloads(repeat(b""))), *command.payloads]
    return [encode(command)]


def follow(engine: Engine) -> None:
    """Execute what rank 0 executes, until it is gone; rank 0 answers."""
    executor = Executor(engine)
    while (command := _receive(engine.shards.leader)) is not None:
        executor.run(command)


def _follow_from(config: EngineConfig, shards: Shards) -> None:
    try:
        engine = Engine(config, shards=shards)
    except Exception:
        # All ranks have this error. The end of this one would kill rank 0 before it has reported it.
        shards.leader.receive()
        sys.exit(1)
    follow(engine)


def _failure(request_id: str, error: Exception) -> Failed:
    code: Literal["", "disk_full"] = "disk_full" if is_disk_full(error) else ""
    if isinstance(error, LorimerError):
        return Failed(request_id=request_id, category="user", error=str(error), code=code)
    traceback.print_exception(error)
    return Failed(request_id=request_id, category="server", error=f"{type(error).__name__}: {error}", code=code)


def main(descriptor: int, seat: str = "") -> None:
    """Serve the process at the other end of the socket ``descriptor``, as one of several ranks if there is a seat."""
    # Ctrl-C reaches the whole group; the process that owns this one decides what to do about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    shards = take_seat(msgspec.json.decode(seat, type=Seat)) if seat else ALONE
    connection = shards.leader if shards.rank else Connection(socket.socket(fileno=descriptor))
    data = connection.receive()
    if data is None:
        return
    if shards.rank:
        _follow_from(msgspec.msgpack.decode(data, type=EngineConfig), shards)
        return

    def report(stage: str, fraction: float | None) -> None:
        connection.send(encode(LoadProgress(stage=stage, fraction=fraction)))

    try:
        config = msgspec.msgpack.decode(data, type=EngineConfig)
        if not shards.is_alone:
            config = settle(config, report)
            shards.tell([msgspec.msgpack.encode(config)])
        engine = Engine(config, report, shards)
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send(encode(_failure("", error)))
        sys.exit(1)
    worker = Worker(engine, connection)
    worker.send(Ready(info=engine.info))
    worker.run()
