"""What users share: the account of tokens by which they take turns, and limits of which each has a part."""

from collections import Counter
from collections.abc import Iterable


class SharedLimit:
    """A limit that users share: one may take more only while at least as much as they then hold stays free for others.

    One user alone reaches half of it, two reach a third each, and so on; whoever comes next finds room.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.held = 0
        """By all users."""
        self._held: Counter[str] = Counter()

    def held_by(self, user_id: str) -> int:
        return self._held.get(user_id, 0)

    def has_room(self, user_id: str, amount: int = 1) -> bool:
        return self.held_by(user_id) + amount <= self.total - self.held

    def take(self, user_id: str, amount: int = 1) -> None:
        self.held += amount
        self._held[user_id] += amount

    def give_back(self, user_id: str, amount: int = 1) -> None:
        self.held -= amount
        self._held[user_id] -= amount
        if self._held[user_id] <= 0:
            del self._held[user_id]


class Shares:
    """Tokens served by user. A user who comes after a pause starts level with the others, neither ahead nor behind."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._open: Counter[str] = Counter()

    def enter(self, user_id: str) -> None:
        """A request of the user waits from now on."""
        if not self._open[user_id]:
            present = [self._served[user] for user in self._open if self._open[user]]
            level = min(present) if present else max(self._served.values(), default=0.0)
            self._served[user_id] = max(self._served.get(user_id, 0.0), level)
        self._open[user_id] += 1

    def leave(self, user_id: str) -> None:
        self._open[user_id] -= 1
        if self._open[user_id] <= 0:
            del self._open[user_id]

    def charge(self, user_id: str, tokens: float) -> None:
        self._served[user_id] = self._served.get(user_id, 0.0) + tokens

    def served(self, user_id: str) -> float:
        return self._served.get(user_id, 0.0)

    def least_served(self, user_ids: Iterable[str]) -> str:
        return min(user_ids, key=lambda user: (self.served(user), user))

    def num_open_of(self, user_id: str) -> int:
        return self._open.get(user_id, 0)

    @property
    def num_open(self) -> dict[str, int]:
        """Unanswered requests by user."""
        return dict(self._open)
