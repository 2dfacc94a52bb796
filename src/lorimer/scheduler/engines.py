"""Keeps one engine running: starts it when it is needed, notices its death or silence, and starts it again.

It knows nothing of runs or samples. Its owner is told when an engine is ready and when one has ended, and does the
rest; commands given to an engine that then ends fail with ``EngineDied``.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Literal

from lorimer.engine.config import EngineConfig
from lorimer.engine.messages import Command, GetStatus, LoadProgress, ModelInfo, Result, SampleProgress, TrainBatch
from lorimer.engine.process import EngineProcess
from lorimer.errors import EngineDied, InvalidInput, LorimerError

log = logging.getLogger("lorimer.scheduler")

_FIRST_RESTART_SECONDS, _LAST_RESTART_SECONDS = 0.5, 30.0
State = Literal["idle", "starting", "ready", "failed", "closed"]


class EngineSlot:
    """A place for one engine process after another."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        *,
        stall_seconds: float,
        on_ready: Callable[[ModelInfo], None],
        on_end: Callable[[str], None],
        on_progress: Callable[[SampleProgress], None],
    ) -> None:
        self.name, self.config = name, config
        self.state: State = "idle"
        self.stage = ""
        """What a starting engine is doing, with percent."""
        self.error: str = ""
        """Why the last one ended or could not start, for users."""
        self.refusal: InvalidInput | None = None
        """Set when the model itself is the trouble: it is not there, or cannot be served."""
        self.info: ModelInfo | None = None
        self.num_deaths = 0
        self._on_ready, self._on_end, self._on_progress = on_ready, on_end, on_progress
        self._stall_seconds = stall_seconds
        self._process: EngineProcess | None = None
        self._events: deque[LoadProgress | SampleProgress] = deque()
        """Heard on the reading thread and not yet taken; they wake the loop once, however many there are."""
        self._loop = asyncio.get_running_loop()
        self._failures_in_a_row = 0
        self._restart: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._num_pending = 0
        self._last_heard = 0.0
        self._pings = itertools.count()
        self._is_pinged = False

    @property
    def is_ready(self) -> bool:
        """Whether commands can be sent. An engine may have ended although nobody has been told yet."""
        return self.state == "ready" and self._process is not None and self._process.is_alive

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start an engine unless one is there or about to be."""
        if self.state in ("idle", "failed") and self._restart is None:
            self._spawn()

    def _spawn(self) -> None:
        self._restart = None
        self.state, self.stage = "starting", "starting the engine process"
        process = EngineProcess(self.config, self._hear_event)
        self._process, self._num_pending, self._last_heard = process, 0, time.monotonic()
        self._is_pinged = False
        self._set_watch(self._stall_seconds)
        process.ready.add_done_callback(lambda _: self._call(self._loaded, process))
        process.ended.add_done_callback(lambda future: self._call(self._ended, process, future.result()))

    def _call(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(function, *args)

    def _hear_event(self, event: LoadProgress | SampleProgress) -> None:
        self._events.append(event)
        if len(self._events) == 1:
            self._call(self._take_events)

    def _take_events(self) -> None:
        self._last_heard = time.monotonic()
        while self._events:
            event = self._events.popleft()
            if isinstance(event, SampleProgress):
                self._on_progress(event)
            else:
                self.stage = event.stage + (f" {event.fraction:.0%}" if event.fraction is not None else "")

    def _loaded(self, process: EngineProcess) -> None:
        if process is not self._process or self.state == "closed" or process.ready.exception() is not None:
            return  # what went wrong is told by the process's end
        self.info, self.state, self.stage, self._failures_in_a_row = process.ready.result(), "ready", "", 0
        log.info("engine ready", extra={"model": self.name, "pid": process.pid})
        self._on_ready(self.info)

    def _ended(self, process: EngineProcess, reason: str) -> None:
        if process is not self._process or self.state == "closed":
            return
        was_ready = self.state == "ready"
        self._process = None
        self._loop.run_in_executor(None, process.close)  # its socket and threads
        self.num_deaths += 1
        failure = process.ready.exception() if process.ready.done() else None
        reason = str(failure) if isinstance(failure, LorimerError) else reason
        log.error("engine ended: %s", reason, extra={"model": self.name})
        # Users are told the model's name; where the operator keeps it is in the log.
        self.error = reason.replace(self.config.model, self.name)
        self.refusal = type(failure)(self.error) if isinstance(failure, InvalidInput) else None
        self.state = "failed"
        delay = min(_FIRST_RESTART_SECONDS * 2**self._failures_in_a_row, _LAST_RESTART_SECONDS)
        if was_ready:
            delay = 0.0
        self._failures_in_a_row += 1
        self._restart = self._loop.call_later(delay, self._spawn)
        self._on_end(self.error)

    def stop_retrying(self) -> None:
        """Leave a failed engine alone until it is needed again; nothing waits for it."""
        if self._restart is not None and self.state == "failed":
            self._restart.cancel()
            self._restart = None

    # ── commands ──────────────────────────────────────────────────────────────────────────────────────

    def submit(self, command: Command) -> "asyncio.Future[Result]":
        """Send a command now; commands are computed in the order they are sent."""
        return self._expect([self._ready_process().submit(command)])[0]

    def train(self, batch: TrainBatch) -> "list[asyncio.Future[Result]]":
        return self._expect(self._ready_process().train(batch))

    def cancel(self, request_id: str) -> None:
        if self._process is not None and self.state == "ready":
            self._process.cancel(request_id)

    def _ready_process(self) -> EngineProcess:
        if self._process is None or self.state != "ready":
            raise EngineDied(f"no engine is ready for {self.name!r}")
        return self._process

    def _expect(self, futures: list) -> "list[asyncio.Future[Result]]":  # type: ignore[type-arg]
        if not self._num_pending:
            self._last_heard = time.monotonic()
            self._set_watch(self._stall_seconds / 2)
        self._num_pending += len(futures)
        wrapped = [asyncio.wrap_future(future, loop=self._loop) for future in futures]
        for future in wrapped:
            future.add_done_callback(partial(self._hear_answer, self._process))
        return wrapped

    def _hear_answer(self, process: EngineProcess | None, future: "asyncio.Future[Result]") -> None:
        if not future.cancelled():
            future.exception()  # those who asked see it; one that nobody awaits is no news
        if process is self._process:
            self._last_heard = time.monotonic()
            self._is_pinged = False
            self._num_pending -= 1

    def _set_watch(self, seconds: float) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self._loop.call_later(seconds, self._check_progress)

    def _check_progress(self) -> None:
        """Ask an engine that has work and is silent whether it is there; replace it if it does not answer either.

        One that computes answers between two passes. A stopped process looks just like a hung one.
        """
        process = self._process
        if process is None or self.state == "closed" or (self.state == "ready" and not self._num_pending):
            return
        silent = time.monotonic() - self._last_heard
        if silent >= self._stall_seconds:
            log.error("engine said nothing for %.0f s; replacing it", silent, extra={"model": self.name})
            process.kill()
            return
        if silent >= self._stall_seconds / 2 and self.is_ready and not self._is_pinged:
            self._is_pinged = True
            self.submit(GetStatus(request_id=f"ping:{next(self._pings)}"))
        self._set_watch(max(self._stall_seconds * (1.0 if self._is_pinged else 0.5) - silent, 0.01))

    async def close(self) -> None:
        """End the engine after what it is computing."""
        self.state = "closed"
        for timer in (self._restart, self._watch):
            if timer is not None:
                timer.cancel()
        if self._process is not None:
            await asyncio.to_thread(self._process.close)
