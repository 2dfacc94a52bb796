"""Which sessions of a user are alive: last_seen of lately, and not finished.

Kept in memory, where heartbeats arrive; after a restart they fill it again within seconds.
"""

import time

from lorimer.errors import TooLarge

ALIVE_SECONDS = 600.0
"""A client beats every ten seconds, and may be cut off for minutes."""


class LiveSessions:
    """The sessions that are alive, by user; ``most`` of each."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._last_seen: dict[str, dict[str, float]] = {}

    def check_room(self, user_id: str) -> None:
        """Refuse one more session of a user who has as many as are accepted."""
        last_seen = self._last_seen.get(user_id, {})
        if len(last_seen) >= self._most:
            self._evict_expired(last_seen)
        if len(last_seen) >= self._most:
            raise TooLarge(
                f"you have {len(last_seen)} open sessions; at most {self._most} is accepted (max_sessions_per_user): "
                "finish some, or wait until ten minutes after their last heartbeat"
            )

    def touch(self, user_id: str, session_id: str) -> None:
        """The session lives; those last_seen of longest ago come first."""
        last_seen = self._last_seen.setdefault(user_id, {})
        last_seen.pop(session_id, None)
        last_seen[session_id] = time.monotonic()

    def end(self, user_id: str, session_id: str) -> None:
        self._last_seen.get(user_id, {}).pop(session_id, None)

    def evict_expired(self) -> None:
        """Called now and then, so that sessions whose clients went away take no memory."""
        for user_id, last_seen in list(self._last_seen.items()):
            self._evict_expired(last_seen)
            if not last_seen:
                del self._last_seen[user_id]

    @staticmethod
    def _evict_expired(last_seen: dict[str, float]) -> None:
        oldest = time.monotonic() - ALIVE_SECONDS
        while last_seen and last_seen[first := next(iter(last_seen))] < oldest:
            del last_seen[first]
