"""Fair sharing between users: accounts of tokens by which they take turns, and shared limits."""

import heapq
from collections import Counter
from collections.abc import Container


class SharedLimit:
    """A limit shared by users: a user may take more only while at least as much as they then hold stays free.

    One user alone reaches half of it, two reach a third each, and so on; the next user always finds room.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.held = 0
        """Held by all users."""
        self._held: Counter[str] = Counter()

    def held_by(self, user_id: str) -> int:
        return self._held.get(user_id, 0)

    def has_room(self, user_id: str, amount: int = 1) -> bool:
        return self._held.get(user_id, 0) + amount <= self.total - self.held

    def take(self, user_id: str, amount: int = 1) -> None:
        self.held += amount
        self._held[user_id] += amount

    def give_back(self, user_id: str, amount: int = 1) -> None:
        self.held -= amount
        self._held[user_id] -= amount
        if self._held[user_id] <= 0:
            del self._held[user_id]


class FairShare:
    """Tokens served per user. A user who returns after a pause starts level with the others, neither ahead nor behind.

    The level is the account of the user served last, so the cost of an operation does not depend on the number of
    users.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._open: Counter[str] = Counter()
        self._level = 0.0
        self._heap: list[tuple[float, str]] = []
        """Accounts of waiting users; stale entries, which differ from `served`, are skipped."""

    def enter(self, user_id: str) -> None:
        """Record that the user has an open request."""
        if not self._open[user_id]:
            self._served[user_id] = max(self._served.get(user_id, 0.0), self._level)
        self._open[user_id] += 1

    def leave(self, user_id: str) -> None:
        self._open[user_id] -= 1
        if self._open[user_id] <= 0:
            del self._open[user_id]
            if self._served.get(user_id, 0.0) <= self._level:
                self._served.pop(user_id, None)

    def charge(self, user_id: str, tokens: float) -> None:
        self._served[user_id] = self._served.get(user_id, self._level) + tokens
        if self._heap:
            self.offer(user_id)

    def served(self, user_id: str) -> float:
        return self._served.get(user_id, self._level)

    def reach(self, level: float) -> None:
        """Record that the user with this account is being served."""
        self._level = max(self._level, level)

    def offer(self, user_id: str) -> None:
        """Make the user eligible for `least_served`."""
        heapq.heappush(self._heap, (self._served.get(user_id, self._level), user_id))
        if len(self._heap) > 64 + 4 * len(self._open):
            self._heap = sorted({(self.served(user), user) for _, user in self._heap if self._open[user] > 0})

    def least_served(self, candidates: Container[str]) -> str:
        """Return the waiting user with the lowest account; each candidate was offered."""
        while True:
            served, user = self._heap[0]
            if user in candidates and served == self._served.get(user, self._level):
                self.reach(served)
                return user
            heapq.heappop(self._heap)

    def num_open_of(self, user_id: str) -> int:
        return self._open.get(user_id, 0)
