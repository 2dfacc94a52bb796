"""How fast tokens go by: what was counted in the last minute."""

import time
from collections import deque

SECONDS = 60.0


class TokenRate:
    """Adds up tokens, in pieces of a second at least, and forgets those older than a minute."""

    def __init__(self) -> None:
        self.total = 0
        self._recent: deque[tuple[float, int]] = deque()
        """When a piece began, and its tokens."""

    def add(self, num_tokens: int) -> None:
        now = time.monotonic()
        self.total += num_tokens
        if self._recent and now - self._recent[-1][0] < 1.0:
            began, tokens = self._recent.pop()
            self._recent.append((began, tokens + num_tokens))
        elif num_tokens:
            self._forget(now)
            self._recent.append((now, num_tokens))

    @property
    def per_second(self) -> float:
        """Over the last minute, or since the first token of it if that is less."""
        now = time.monotonic()
        self._forget(now)
        if not self._recent:
            return 0.0
        return sum(tokens for _, tokens in self._recent) / max(1.0, now - self._recent[0][0])

    def _forget(self, now: float) -> None:
        while self._recent and now - self._recent[0][0] > SECONDS:
            self._recent.popleft()
