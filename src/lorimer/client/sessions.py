"""A session: created when it is first needed, kept alive by heartbeats, finished on leaving.

It hands out the numbers by which a server knows a repeated request: those of runs, sampling sessions and losses.
"""

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import Any, Literal, TypeVar

from lorimer import __version__
from lorimer.client.connection import Connection
from lorimer.client.errors import APIError, APIStatusError
from lorimer.client.futures import AwaitableConcurrentFuture
from lorimer.client.retries import PATIENCE_SECONDS
from lorimer.types import CreateSessionRequest, CreateSessionResponse

log = logging.getLogger("lorimer")

T = TypeVar("T")

FinishStatus = Literal["success", "errored", "interrupted"]

HEARTBEAT_SECONDS = 10.0
SILENCE_SECONDS = 120.0
LEAST_REFRESH_SECONDS = 10.0
LAST_WORD_SECONDS = 2.0
"""For which a program that fails or is interrupted tries to say so to a server that is away."""


class Session:
    """What the clients of one session share. ``session_id`` is known once ``start`` has run."""

    def __init__(
        self,
        connection: Connection,
        *,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
        session_id: str = "",
    ) -> None:
        self.connection = connection
        self.session_id = session_id
        self._request = {
            "tags": [tag for tag in os.environ.get("TINKER_TAGS", "").split(",") if tag],
            "user_metadata": dict(user_metadata or {}),
            "sdk_version": f"lorimer {__version__}",
            "project_id": project_id,
            "display_name": display_name,
        }
        self._starting = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._lock = threading.Lock()
        self._numbers: dict[str, itertools.count[int]] = {}

    def next_number(self, kind: Literal["model", "sampling_session", "custom_loss"]) -> int:
        """The next free number of a kind, from 0."""
        with self._lock:
            return next(self._numbers.setdefault(kind, itertools.count()))

    def get_session_id(self) -> str:
        """As programs of the official SDK ask for it."""
        return self.session_id

    def run_coroutine_threadsafe(self, coroutine: Coroutine[Any, Any, T]) -> AwaitableConcurrentFuture[T]:
        return self.connection.run(coroutine)

    async def start(self) -> str:
        """Create the session, once; its id."""
        await self.connection.ready()
        async with self._starting:
            if not self.session_id:
                request = CreateSessionRequest.model_validate(self._request)
                answer = await self.connection.transport.ask(
                    CreateSessionResponse, "POST", "/api/v1/create_session", request
                )
                for level, text in (
                    (logging.INFO, answer.info_message),
                    (logging.WARNING, answer.warning_message),
                    (logging.ERROR, answer.error_message),
                ):
                    if text:
                        log.log(level, "%s", text)
                self.session_id = answer.session_id
                self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._refresh())]
                log.info("session %s at %s", self.session_id, self.connection.base_url)
        return self.session_id

    async def _beat(self) -> None:
        alive_at = told_at = time.monotonic()
        body = {"session_id": self.session_id, "type": "session_heartbeat"}
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            try:
                await self.connection.transport.call(
                    "POST", "/api/v1/session_heartbeat", body, timeout=HEARTBEAT_SECONDS, patience=0
                )
                alive_at = time.monotonic()
            except APIError as error:
                if isinstance(error, APIStatusError) and error.status_code == 410:
                    return
                now = time.monotonic()
                silence = now - alive_at
                if silence > SILENCE_SECONDS and now - told_at > SILENCE_SECONDS:
                    told_at = now
                    log.warning("session %s: no heartbeat accepted for %d seconds: %s", self.session_id, silence, error)

    async def _refresh(self) -> None:
        while True:
            seconds = self.connection.dynamic.refresh_interval_sec
            await asyncio.sleep(max(seconds, LEAST_REFRESH_SECONDS))
            try:
                await self.connection.refresh()
            except APIError as error:
                log.debug("the flags could not be read again: %s", error)

    async def finish(self, status: FinishStatus, detail: str | None = None) -> None:
        """Tell the server that the session is over and why; the first reason stands."""
        for task in self._tasks:
            task.cancel()
        try:
            if self.session_id:
                body: dict[str, Any] = {"reason": {"type": status}, "detail": detail}
                patience = PATIENCE_SECONDS if status == "success" else LAST_WORD_SECONDS
                await self.connection.transport.call(
                    "POST", f"/api/v1/sessions/{self.session_id}/finish", body, patience=patience
                )
        except APIError as error:
            if status == "success":
                raise
            log.debug("session %s could not be finished: %s", self.session_id, error)  # what ended it matters more
        finally:
            await self.connection.transport.close()
