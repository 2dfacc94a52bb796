"""The server's shared state for routes: the settings, the store, the scheduler, and the caller of a request.

``app.py`` builds it at startup as ``request.app.state.context``. It also buffers heartbeats, so that one transaction
persists many, and records whether the server is draining.
"""

import asyncio
import math
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from lorimer.scheduler.scheduler import Scheduler
from lorimer.scheduler.shares import SharedLimit
from lorimer.server.buckets import TokenBuckets
from lorimer.server.credentials import Credentials
from lorimer.server.decoders import Decoders
from lorimer.server.errors import error_response
from lorimer.server.live_sessions import LiveSessions
from lorimer.server.prometheus import Metrics
from lorimer.server.settings import Settings
from lorimer.server.signing import Signer
from lorimer.server.trainings import Trainings
from lorimer.store import sessions
from lorimer.store.database import Store
from lorimer.store.directory import DataDirectory
from lorimer.store.scratch import Scratch
from lorimer.store.users import ApiKey, User
from lorimer.types import UserQuotas
from lorimer.types.compatibility import SdkVersion


@dataclass(kw_only=True)
class Context:
    """The parts of one running server."""

    settings: Settings
    store: Store
    directory: DataDirectory
    scratch: Scratch
    scheduler: Scheduler
    credentials: Credentials
    metrics: Metrics
    signer: Signer
    live_sessions: LiveSessions
    incoming_bytes: SharedLimit
    """Bytes of request bodies that are still arriving."""
    requests: SharedLimit
    """Requests being held for users, long polls included."""
    rates: TokenBuckets
    """Rate-limits each user's requests by the quota ``requests_per_second``."""
    failed_lookups: TokenBuckets
    """Rate-limits failed lookups, by user or, without a valid key, by address."""
    decoders: Decoders
    trainings: Trainings
    checking: set[str] = field(default_factory=set)
    """Users of whom data are being checked."""
    training_kinds: dict[str, Any] = field(default_factory=dict)
    """The schemas of the kinds of training, once they were asked for."""
    kinds_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    url: str = ""
    """The URL the server listens on; empty while it does not listen."""
    started_at: float = field(default_factory=time.monotonic)
    is_draining: bool = False
    """The server is shutting down and accepts no new work."""
    _has_begun_to_drain: bool = False
    held: "set[asyncio.Future[Any]]" = field(default_factory=set)
    """The futures that held requests wait for; see ``polling.py``."""
    _heartbeats: dict[str, datetime] = field(default_factory=dict)

    @staticmethod
    def now() -> datetime:
        return datetime.now(UTC)

    def heartbeat(self, session: sessions.Session) -> None:
        """Record that a session is alive. ``flush`` persists it."""
        self.live_sessions.touch(session.user_id, session.session_id)
        self._heartbeats[session.session_id] = self.now()

    def seen_at(self, session: sessions.Session) -> datetime:
        """Return the time of the last heartbeat, persisted or not."""
        return max(session.last_seen_at, self._heartbeats.get(session.session_id, session.last_seen_at))

    def release(self) -> None:
        """Cancel the wait of every held request. Its client retries once the server is back."""
        for waiting in self.held:
            waiting.cancel()

    def refuse_guess(self, scope: Scope) -> Response | None:
        """Count a failed lookup; return a 429 response if the caller makes too many of them, else none.

        Only failed lookups are counted and refused, so guessing does not affect callers with valid ids and keys.
        """
        state, rate = scope["state"], self.settings.failed_lookups_per_second
        caller = f"user {state['user'].user_id}" if state["user"] else f"address {state['address']}"
        wait = self.failed_lookups.take(caller, rate) if rate else 0.0
        if not wait:
            return None
        detail = (
            f"too many of your requests name things that are not there or show wrong keys; {rate:g} of them are"
            " answered each second (failed_lookups_per_second)"
        )
        return error_response(scope, 429, "too_many_failures", detail, {"retry-after": str(math.ceil(wait))})

    async def flush(self) -> None:
        """Persist the heartbeats and key uses buffered since the last flush, and evict expired sessions."""
        beats, self._heartbeats = self._heartbeats, {}
        self.live_sessions.evict_expired()
        try:
            if beats:
                await self.store.write(sessions.touch_session, beats)
        except BaseException:
            self._heartbeats = beats | self._heartbeats
            raise
        await self.credentials.flush()

    async def drain(self) -> None:
        """Stop accepting work, finish the running batch, snapshot every run and stop the engines.

        Trainings that the server has started are interrupted before: they tell it how their runs ended. Later calls do
        nothing.
        """
        if not self._has_begun_to_drain:
            self._has_begun_to_drain = True
            await self.trainings.close()
            self.is_draining = True
            self.decoders.close()  # nothing that they decode would be accepted
            await self.scheduler.close(self.settings.shutdown_seconds)


def context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


def user_of(request: Request) -> User:
    """Return the authenticated user; set on every route that is not public."""
    user: User = request.state.user
    return user


def user_quotas(request: Request, stored_bytes: int = 0, rollout_bytes: int = 0) -> UserQuotas:
    """Return the caller's quotas: their own, or the server's settings."""
    user, settings = user_of(request), context_of(request).settings
    own_bytes, own_rate = user.max_stored_bytes, user.requests_per_second
    return UserQuotas(
        stored_bytes=stored_bytes,
        rollout_bytes=rollout_bytes,
        max_stored_bytes=(settings.max_stored_bytes if own_bytes is None else own_bytes) or None,
        requests_per_second=(settings.requests_per_second if own_rate is None else own_rate) or None,
    )


def key_of(request: Request) -> ApiKey | None:
    """Return the API key of the request; none in open mode."""
    key: ApiKey | None = request.state.key
    return key


def sdk_of(request: Request) -> SdkVersion:
    sdk: SdkVersion = request.state.sdk
    return sdk
