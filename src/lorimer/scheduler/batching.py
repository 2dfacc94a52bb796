"""Which operations an engine gets in its next turn. A pure function of what waits; its test has the table of cases.

A turn is at most one barrier of each run (optimiser step, save, load), then training operations of any runs and users
that are computed as one batch.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lorimer.scheduler.runs import BARRIER_TOKENS, Flight, Operation


@dataclass(frozen=True)
class Queue:
    """The operations that one run offers, in order."""

    user_id: str
    operations: Sequence[Operation]


@dataclass(frozen=True)
class Turn:
    barriers: list[Operation] = field(default_factory=list)
    training: list[Operation] = field(default_factory=list)

    @property
    def operations(self) -> list[Operation]:
        return [*self.barriers, *self.training]


@dataclass(eq=False)
class SentTurn:
    """A turn sent to the engine."""

    operations: list[Operation]
    unanswered: dict[Flight, Operation] = field(default_factory=dict)
    cost: int = 0
    """Of all its operations."""


def next_turn(
    queues: Sequence[Queue], served: Callable[[str], float], token_budget: int, *, alone: bool = False
) -> Turn:
    """Choose the next turn; empty if nothing waits. With ``alone`` it has a single operation.

    Training goes to the least served user, counting what this turn already gives, one operation at a time, until the
    budget is full. An operation larger than the budget gets its own turn.
    """
    barriers: list[Operation] = []
    training: list[Queue] = []
    accounts: dict[str, float] = {}
    for queue in queues:
        if not queue.operations:
            continue
        first, user_id = queue.operations[0], queue.user_id
        if user_id not in accounts:
            accounts[user_id] = served(user_id)
        if first.is_training:
            training.append(queue)
        else:
            barriers.append(first)
            accounts[user_id] += BARRIER_TOKENS
        if alone:
            return Turn(barriers, [] if barriers else [first])
    return Turn(barriers, _fill(training, accounts, token_budget))


def _prefix(queue: Queue, token_budget: int) -> list[Operation]:
    """Return the operations before the run's next barrier that fit into the budget."""
    prefix: list[Operation] = []
    room = token_budget
    for operation in queue.operations:
        if not operation.is_training or (prefix and operation.tokens > room):
            break
        prefix.append(operation)
        room -= operation.tokens
    return prefix


def _fill(queues: Sequence[Queue], accounts: dict[str, float], token_budget: int) -> list[Operation]:
    # Per user, the runs ordered by how long their next operation has waited; the numbers only break ties.
    by_user: dict[str, list[tuple[float, int, list[Operation]]]] = {}
    for number, queue in enumerate(queues):
        if prefix := _prefix(queue, token_budget)[::-1]:
            by_user.setdefault(queue.user_id, []).append((prefix[-1].received, number, prefix))
    users: list[tuple[float, str]] = []
    for user, runs in by_user.items():
        heapq.heapify(runs)
        users.append((accounts[user], user))
    heapq.heapify(users)
    taken: list[Operation] = []
    room = token_budget
    while users:
        account, user = heapq.heappop(users)
        _, number, waiting = heapq.heappop(by_user[user])
        if not taken or waiting[-1].tokens <= room:
            operation = waiting.pop()
            taken.append(operation)
            room -= operation.tokens
            account += operation.tokens
            if waiting:
                heapq.heappush(by_user[user], (waiting[-1].received, number, waiting))
        if by_user[user]:
            heapq.heappush(users, (account, user))
    return taken
