"""What every route may use: the settings, the store, the scheduler, and who is calling.

``app.py`` assembles it when the server starts; it is ``request.app.state.context`` from then on. It also collects
heartbeats, which are written together, and remembers whether the server is about to end.
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
from lorimer.server.metrics import Metrics
from lorimer.server.settings import Settings
from lorimer.server.signing import Signer
from lorimer.store import sessions
from lorimer.store.database import Store
from lorimer.store.directory import DataDirectory
from lorimer.store.users import ApiKey, User
from lorimer.types import UserQuotas
from lorimer.types.compatibility import SdkVersion


@dataclass(kw_only=True)
class Context:
    """The parts of one running server."""

    settings: Settings
    store: Store
    directory: DataDirectory
    scheduler: Scheduler
    credentials: Credentials
    metrics: Metrics
    signer: Signer
    live_sessions: LiveSessions
    incoming_bytes: SharedLimit
    """Of bodies that have begun to arrive, and not ended."""
    requests: SharedLimit
    """Those of users that are held, polls among them."""
    rates: TokenBuckets
    """Requests by user, against the quota ``requests_per_second``."""
    failed_lookups: TokenBuckets
    """By user, or by address where nobody has shown a key."""
    decoders: Decoders
    url: str = ""
    """Where the server listens; empty while it does not."""
    started_at: float = field(default_factory=time.monotonic)
    is_draining: bool = False
    """Nothing new is accepted: the server is about to end."""
    held: "set[asyncio.Future[Any]]" = field(default_factory=set)
    """What waiting requests wait for; see ``polling.py``."""
    _heartbeats: dict[str, datetime] = field(default_factory=dict)

    @staticmethod
    def now() -> datetime:
        return datetime.now(UTC)

    def heartbeat(self, session: sessions.Session) -> None:
        """Note that a session lives; ``flush`` writes it."""
        self.live_sessions.touch(session.user_id, session.session_id)
        self._heartbeats[session.session_id] = self.now()

    def seen_at(self, session: sessions.Session) -> datetime:
        """The last sign of life, written or not."""
        return max(session.last_seen_at, self._heartbeats.get(session.session_id, session.last_seen_at))

    def release(self) -> None:
        """End the wait of every held request: its client asks again once the server is back."""
        for waiting in self.held:
            waiting.cancel()

    def refuse_guess(self, scope: Scope) -> Response | None:
        """Count a lookup that found nothing; the answer to it if its caller makes too many.

        Only lookups that fail are counted and refused: whoever has valid ids and keys does not notice others' guesses.
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
        """Write the heartbeats and uses of keys since the last time."""
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
        """Take nothing new, finish what is being computed, secure every run, end the engines; once."""
        if not self.is_draining:
            self.is_draining = True
            self.decoders.close()  # nothing that they decode would be accepted any more
            await self.scheduler.close(self.settings.shutdown_seconds)


def context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


def user_of(request: Request) -> User:
    """Who is calling; there is one on every route that is not public."""
    user: User = request.state.user
    return user


def user_quotas(request: Request, stored_bytes: int = 0) -> UserQuotas:
    """The quotas of the caller, their own or those of the settings."""
    user, settings = user_of(request), context_of(request).settings
    own_bytes, own_rate = user.max_stored_bytes, user.requests_per_second
    return UserQuotas(
        stored_bytes=stored_bytes,
        max_stored_bytes=(settings.max_stored_bytes if own_bytes is None else own_bytes) or None,
        requests_per_second=(settings.requests_per_second if own_rate is None else own_rate) or None,
    )


def key_of(request: Request) -> ApiKey | None:
    """The key that was shown; none in open mode and with a JWT."""
    key: ApiKey | None = request.state.key
    return key


def sdk_of(request: Request) -> SdkVersion:
    sdk: SdkVersion = request.state.sdk
    return sdk
