"""Token buckets by name, to rate-limit a user or an address.

A bucket refills at a rate and holds the tokens of several seconds, which allows bursts. Only buckets that are not full
need an entry; when there are too many, full and then least recently used buckets are evicted. Uses the monotonic clock.
"""

import time

MAX_BUCKETS = 10_000


class TokenBuckets:
    def __init__(self, burst_seconds: float, max_buckets: int = MAX_BUCKETS) -> None:
        self._burst_seconds, self._max_buckets = burst_seconds, max_buckets
        self._levels: dict[str, tuple[float, float]] = {}
        """The tokens left and the time of that level, most recently used last."""

    def __len__(self) -> int:
        return len(self._levels)

    def capacity(self, rate: float) -> float:
        return max(1.0, rate * self._burst_seconds)

    def take(self, name: str, rate: float) -> float:
        """Take a token from a bucket that refills at ``rate`` per second.

        Return 0, or the seconds until a token is available.
        """
        now, capacity = time.monotonic(), self.capacity(rate)
        level, at = self._levels.pop(name, (capacity, now))
        level = min(capacity, level + (now - at) * rate)
        is_taken = level >= 1
        if is_taken:
            level -= 1
        if len(self._levels) >= self._max_buckets:
            self._make_room(now, rate)
        self._levels[name] = (level, now)
        return 0.0 if is_taken else (1 - level) / rate

    def _make_room(self, now: float, rate: float) -> None:
        """Evict the buckets that are full again, or else the least recently used one."""
        full_before = now - self._burst_seconds - 1 / rate
        while self._levels and self._levels[oldest := next(iter(self._levels))][1] < full_before:
            del self._levels[oldest]
        if len(self._levels) >= self._max_buckets:
            del self._levels[next(iter(self._levels))]
