"""Which sessions of a user are alive: heard of lately, and not finished.

Kept in memory, where heartbeats arrive; after a restart they fill it again within seconds.
"""

import time

from lorimer.errors import TooLarge

ALIVE_SECONDS = 600.0
"""A client beats every ten seconds, and may be cut off for minutes."""


class Presence:
    """The sessions that are alive, by user; ``most`` of each."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._heard: dict[str, dict[str, float]] = {}

    def check_room(self, user_id: str) -> None:
        """Refuse one more session of a user who has as many as are accepted."""
        heard = self._heard.get(user_id, {})
        if len(heard) >= self._most:
            self._forget_silent(heard)
        if len(heard) >= self._most:
            raise TooLarge(
                f"you have {len(heard)} open sessions; at most {self._most} is accepted (max_sessions_per_user): "
                "finish some, or wait until ten minutes after their last heartbeat"
            )

    def hear(self, user_id: str, session_id: str) -> None:
        """The session lives; those heard of longest ago come first."""
        heard = self._heard.setdefault(user_id, {})
        heard.pop(session_id, None)
        heard[session_id] = time.monotonic()

    def end(self, user_id: str, session_id: str) -> None:
        self._heard.get(user_id, {}).pop(session_id, None)

    def forget_silent(self) -> None:
        """Called now and then, so that sessions whose clients went away take no memory."""
        for user_id, heard in list(self._heard.items()):
            self._forget_silent(heard)
            if not heard:
                del self._heard[user_id]

    @staticmethod
    def _forget_silent(heard: dict[str, float]) -> None:
        oldest = time.monotonic() - ALIVE_SECONDS
        while heard and heard[first := next(iter(heard))] < oldest:
            del heard[first]
