"""Tells the user why work is waiting: in the server's words, once a minute at most."""

import logging
import time

from lorimer.types import TryAgainResponse

log = logging.getLogger("lorimer")

REPEAT_SECONDS = 60.0
DEFAULT_REASONS = {
    "paused_capacity": "the server has no room at the moment",
    "paused_rate_limit": "a limit of this account is reached",
}


class QueueNotes:
    """The messages about one thing, such as ``training of S:train:0``."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._said_at = -REPEAT_SECONDS

    def hear(self, answer: TryAgainResponse) -> None:
        if answer.queue_state == "active" or time.monotonic() - self._said_at < REPEAT_SECONDS:
            return
        self._said_at = time.monotonic()
        reason = answer.queue_state_reason or DEFAULT_REASONS.get(answer.queue_state, answer.queue_state)
        log.warning("%s is waiting: %s", self._subject, reason)
