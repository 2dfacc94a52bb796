"""Tracks each user's live sessions: those with a recent heartbeat that are not finished.

Kept in memory. After a restart the clients' heartbeats fill it again within seconds.
"""

import time

from lorimer.errors import TooLarge

ALIVE_SECONDS = 600.0
"""A session expires after this time without a heartbeat.

Clients send one every ten seconds and may lose the network for minutes.
"""


class LiveSessions:
    """The live sessions of each user, at most ``max_sessions`` per user."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._last_seen: dict[str, dict[str, float]] = {}

    def check_room(self, user_id: str) -> None:
        """Raise ``TooLarge`` if the user cannot open another session."""
        last_seen = self._last_seen.get(user_id, {})
        if len(last_seen) >= self._max_sessions:
            self._evict_expired(last_seen)
        if len(last_seen) >= self._max_sessions:
            raise TooLarge(
                f"you have {len(last_seen)} open sessions; at most {self._max_sessions} is accepted "
                "(max_sessions_per_user): finish some, or wait until ten minutes after their last heartbeat"
            )

    def touch(self, user_id: str, session_id: str) -> None:
        """Record a heartbeat and move the session to the end: the least recently seen session comes first."""
        last_seen = self._last_seen.setdefault(user_id, {})
        last_seen.pop(session_id, None)
        last_seen[session_id] = time.monotonic()

    def end(self, user_id: str, session_id: str) -> None:
        self._last_seen.get(user_id, {}).pop(session_id, None)

    def evict_expired(self) -> None:
        """Evict expired sessions of all users, to free their memory. Called periodically."""
        for user_id, last_seen in list(self._last_seen.items()):
            self._evict_expired(last_seen)
            if not last_seen:
                del self._last_seen[user_id]

    @staticmethod
    def _evict_expired(last_seen: dict[str, float]) -> None:
        oldest = time.monotonic() - ALIVE_SECONDS
        while last_seen and last_seen[first := next(iter(last_seen))] < oldest:
            del last_seen[first]
