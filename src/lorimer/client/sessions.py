"""A session: created when it is first needed, kept alive by heartbeats, finished on leaving.

A session assigns the numbers by which the server recognises a repeated request: those of runs, sampling sessions and
losses. ``SamplerState`` carries a sampling client to another process: pickled with the key, or as text without it.
"""

import asyncio
import base64
import itertools
import json
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

from lorimer import __version__
from lorimer.client import embedded
from lorimer.client.connection import LOCAL, Connection
from lorimer.client.errors import APIError, APIStatusError, TinkerError
from lorimer.client.futures import AwaitableConcurrentFuture
from lorimer.client.retries import PATIENCE_SECONDS
from lorimer.types import CreateSessionRequest, CreateSessionResponse

log = logging.getLogger("lorimer")

T = TypeVar("T")

FinishStatus = Literal["success", "errored", "interrupted"]

HEARTBEAT_SECONDS = 10.0
SILENCE_SECONDS = 120.0
MIN_REFRESH_SECONDS = 10.0
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
        alive_at = warned_at = time.monotonic()
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
                if silence > SILENCE_SECONDS and now - warned_at > SILENCE_SECONDS:
                    warned_at = now
                    log.warning("session %s: no heartbeat accepted for %d seconds: %s", self.session_id, silence, error)

    async def _refresh(self) -> None:
        while True:
            seconds = self.connection.dynamic.refresh_interval_sec
            await asyncio.sleep(max(seconds, MIN_REFRESH_SECONDS))
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


# ── copies in other processes ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ServerState:
    """How a server is reached, and the flags it sent."""

    base_url: str
    default_headers_overrides: dict[str, str]
    client_config: dict[str, Any]
    client_dynamic_config: dict[str, Any]
    api_key: str | None = None


@dataclass(frozen=True)
class SamplerState:
    session_id: str
    sampling_session_id: str
    holder: ServerState
    record_stability_info: bool = False


def state_of(session: Session, sampling_session_id: str, record_stability_info: bool) -> SamplerState:
    connection = session.connection
    server = ServerState(
        connection.base_url,
        connection.headers,
        connection.config.model_dump(),
        connection.dynamic.model_dump(),
        connection.transport.credentials.key,
    )
    return SamplerState(session.session_id, sampling_session_id, server, record_stability_info)


def to_text(state: SamplerState) -> str:
    state = replace(state, holder=replace(state.holder, api_key=None))
    return base64.urlsafe_b64encode(json.dumps(asdict(state), separators=(",", ":")).encode()).decode()


def from_text(handle: str, api_key: str | None) -> SamplerState:
    try:
        values = json.loads(base64.urlsafe_b64decode(handle))
        server = ServerState(**(values.pop("holder") | {"api_key": api_key}))
        return SamplerState(**values, holder=server)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{handle[:40]!r}… is no text of get_sampler_handle: {error}") from None


_lock = threading.Lock()
_sessions: "weakref.WeakValueDictionary[str, Session]" = weakref.WeakValueDictionary()


def session_of(state: SamplerState) -> Session:
    """The session of a copied client; copies in one process share its connections."""
    server = state.holder
    if server.base_url == LOCAL and not embedded.is_running():
        raise TinkerError(
            "this sampling client is of a service that runs in another process without a port; "
            "start it with `lorimer serve` and give its address as base_url to use it from several processes"
        )
    key = json.dumps([state.session_id, asdict(server)], sort_keys=True)
    with _lock:
        session = _sessions.get(key)
        if session is None or session.connection.loop is not session.connection.current_loop():
            connection = Connection(server.base_url, server.api_key, server.default_headers_overrides)
            connection.adopt(server.client_config, server.client_dynamic_config)
            session = _sessions[key] = Session(connection, session_id=state.session_id)
        return session


def random_clone_id() -> int:
    """For servers that hand out none; with the stride of numbers it stays below 2**63."""
    return secrets.randbelow(1_000_000_000) + 1
