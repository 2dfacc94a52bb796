"""Keeps one engine running: starts it on demand, detects that it died or hangs, and restarts it.

Knows nothing of runs or samples. Everything an engine sends becomes an event for the driver: `EngineReady`,
`EngineEnded`, `Replied` and `SampleProgress`. Commands of an engine that ends are answered with ``EngineDied``.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Literal, Protocol

from lorimer.engine.config import EngineConfig
from lorimer.engine.launch import Launcher
from lorimer.engine.messages import Command, GetStatus, LoadProgress, ModelInfo, Result, SampleProgress, TrainBatch
from lorimer.engine.process import EngineProcess
from lorimer.errors import EngineDied, InvalidInput, LorimerError
from lorimer.scheduler.events import EngineEnded, EngineReady, NoReply, Replied, ReplyTo

log = logging.getLogger("lorimer.scheduler")

FIRST_RESTART_SECONDS, MAX_RESTART_SECONDS = 0.5, 30.0
State = Literal["idle", "starting", "ready", "failed", "closed"]


class Inbox(Protocol):
    """Takes events, on the event loop or from another thread (`Driver`)."""

    def post(self, event: object) -> None: ...
    def post_threadsafe(self, event: object) -> None: ...


class EngineSlot:
    """Holds one engine process at a time."""

    def __init__(
        self, name: str, config: EngineConfig, inbox: Inbox, launcher: Launcher, *, stall_seconds: float
    ) -> None:
        self.name, self.config = name, config
        self._launcher = launcher
        self.state: State = "idle"
        self.stage = ""
        """What a starting engine is doing, with percent."""
        self.error: str = ""
        """Why the last engine ended or failed to start, for users."""
        self.refusal: InvalidInput | None = None
        """Set if the model itself is the reason: it is missing, or cannot be served."""
        self.info: ModelInfo | None = None
        self.num_deaths = 0
        self._inbox = inbox
        self._stall_seconds = stall_seconds
        self._process: EngineProcess | None = None
        self._loop = asyncio.get_running_loop()
        self._failures_in_a_row = 0
        self._restart: asyncio.TimerHandle | None = None
        self._ending: asyncio.Future[None] | None = None
        """The end of an engine that was stopped; the next one may need its memory."""
        self._watch: asyncio.TimerHandle | None = None
        self._last_heard = 0.0
        self._pings = itertools.count()
        self._is_pinged = False

    @property
    def is_ready(self) -> bool:
        """Whether commands can be sent. The engine may have ended although its end is not handled yet."""
        return self.state == "ready" and self._process is not None and self._process.is_alive

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start an engine unless one is running or starting."""
        if self.state in ("idle", "failed") and self._restart is None:
            if self._ending is not None and not self._ending.done():
                self.state, self.stage = "starting", "waiting for the end of the last engine process"
                self._ending.add_done_callback(lambda _: self._spawn() if self.state == "starting" else None)
            else:
                self._spawn()

    def stop(self) -> None:
        """End an engine that has no work; the next start makes a new one."""
        process, self._process, self.state = self._process, None, "idle"
        if process is not None:
            self._ending = self._loop.run_in_executor(None, process.close)

    def _spawn(self) -> None:
        self._restart = None
        self.state, self.stage = "starting", "starting the engine process"
        process = EngineProcess(self.config, self._on_event, self._launcher)
        self._process, self._last_heard = process, time.monotonic()
        self._is_pinged = False
        self._set_watch(self._stall_seconds)
        process.ready.add_done_callback(lambda _: self._call(self._loaded, process))
        process.ended.add_done_callback(lambda future: self._call(self._ended, process, future.result()))

    def _call(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    def _on_event(self, event: LoadProgress | SampleProgress) -> None:
        """Post an event; called on the reader thread."""
        self._last_heard = time.monotonic()
        if isinstance(event, SampleProgress):
            self._inbox.post_threadsafe(event)
        else:
            self.stage = event.stage + (f" {event.fraction:.0%}" if event.fraction is not None else "")

    def _loaded(self, process: EngineProcess) -> None:
        if process is not self._process or self.state == "closed" or process.ready.exception() is not None:
            return  # the error is reported when the process ends
        self.info, self.state, self.stage, self._failures_in_a_row = process.ready.result(), "ready", "", 0
        log.info("engine ready", extra={"model": self.name, "pid": process.pid})
        level = logging.DEBUG if self.info.device == "cpu" else logging.INFO  # a CPU leaves nothing to choose
        for line in self.info.kernels:
            log.log(level, "engine on %s: %s", self.info.device, line, extra={"model": self.name})
        self._inbox.post(EngineReady(self.info))

    def _ended(self, process: EngineProcess, reason: str) -> None:
        if process is not self._process or self.state == "closed":
            return
        was_ready = self.state == "ready"
        self._process = None
        self._loop.run_in_executor(None, process.close)  # closes its socket and threads
        self.num_deaths += 1
        failure = process.ready.exception() if process.ready.done() else None
        reason = str(failure) if isinstance(failure, LorimerError) else reason
        log.error("engine ended: %s", reason, extra={"model": self.name})
        # Users see the model's name; its path is only in the log.
        self.error = reason.replace(self.config.model, self.name)
        self.refusal = type(failure)(self.error) if isinstance(failure, InvalidInput) else None
        self.state = "failed"
        delay = min(FIRST_RESTART_SECONDS * 2**self._failures_in_a_row, MAX_RESTART_SECONDS)
        if was_ready:
            delay = 0.0
        self._failures_in_a_row += 1
        self._restart = self._loop.call_later(delay, self._spawn)
        self._inbox.post(EngineEnded(self.error, is_final=self.refusal is not None))

    def stop_retrying(self) -> None:
        """Do not restart a failed engine until it is needed again."""
        if self._restart is not None and self.state == "failed":
            self._restart.cancel()
            self._restart = None

    # ── commands ──────────────────────────────────────────────────────────────────────────────────────

    def send(self, command: Command, to: ReplyTo) -> None:
        """Send a command now. The engine executes commands in the order they are sent."""
        try:
            self._expect([self._ready_process().submit(command)], [to])
        except LorimerError as error:
            self._inbox.post(Replied(to, error))

    def train(self, batch: TrainBatch, to: list[ReplyTo]) -> None:
        """Send a batch. Each of its operations gets a reply."""
        try:
            self._expect(self._ready_process().train(batch), to)
        except LorimerError as error:
            for one in to:
                self._inbox.post(Replied(one, error))

    def cancel(self, request_id: str) -> None:
        if self._process is not None and self.state == "ready":
            self._process.cancel(request_id)

    def _ready_process(self) -> EngineProcess:
        if self._process is None or self.state != "ready":
            raise EngineDied(f"no engine is ready for {self.name!r}")
        return self._process

    def _expect(self, futures: "list[Future[Result]]", to: list[ReplyTo]) -> None:
        assert self._process is not None
        if self._process.num_pending <= len(futures):
            self._last_heard = time.monotonic()
            self._set_watch(self._stall_seconds / 2)
        for future, one in zip(futures, to, strict=True):
            future.add_done_callback(partial(self._reply, self._process, one))

    def _reply(self, process: EngineProcess | None, to: ReplyTo, future: "Future[Result]") -> None:
        """Post a reply; called on the reader thread."""
        error = future.exception()
        if process is self._process:
            self._last_heard = time.monotonic()
            self._is_pinged = False
        assert error is None or isinstance(error, Exception)
        self._inbox.post_threadsafe(Replied(to, future.result() if error is None else error))

    def _set_watch(self, seconds: float) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self._loop.call_later(seconds, self._check_progress)

    def _check_progress(self) -> None:
        """Ping a silent engine that has work, and replace it if it does not answer.

        A computing engine answers between two passes. A stopped process cannot be distinguished from a hung one.
        """
        process = self._process
        if process is None or self.state == "closed" or (self.state == "ready" and not process.num_pending):
            return
        silent = time.monotonic() - self._last_heard
        if silent >= self._stall_seconds:
            log.error("engine said nothing for %.0f s; replacing it", silent, extra={"model": self.name})
            process.kill()
            return
        if silent >= self._stall_seconds / 2 and self.is_ready and not self._is_pinged:
            self._is_pinged = True
            self.send(GetStatus(request_id=f"ping:{next(self._pings)}"), NoReply())
        self._set_watch(max(self._stall_seconds * (1.0 if self._is_pinged else 0.5) - silent, 0.01))

    async def close(self) -> None:
        """Stop the engine after its current work."""
        self.state = "closed"
        for timer in (self._restart, self._watch):
            if timer is not None:
                timer.cancel()
        if self._process is not None:
            await asyncio.to_thread(self._process.close)
        if self._ending is not None:
            await self._ending
