"""The order of groups in off-policy training, and what a checkpoint remembers of it."""

from typing import Any

from lorimer.cookbook.rl.asynchronous import GroupQueue, Ticket
from lorimer.cookbook.rl.envs import RLDataset


class Batches(RLDataset):
    """Three batches of two groups, which are names."""

    def get_batch(self, index: int) -> Any:
        return [f"{index}a", f"{index}b"]

    def __len__(self) -> int:
        return 3


def names(tickets: list[Ticket]) -> list[str]:
    return [str(ticket.builder) for ticket in tickets]


def test_groups_come_in_order_and_begin_again_after_the_last():
    queue = GroupQueue(Batches())
    assert names([queue.take() for _ in range(8)]) == ["0a", "0b", "1a", "1b", "2a", "2b", "0a", "0b"]


def test_group_that_is_put_back_comes_next_as_another_attempt():
    queue = GroupQueue(Batches())
    first, second = queue.take(), queue.take()
    queue.put_back(first)
    again = queue.take()
    assert (names([again]), again.attempt, second.attempt) == (["0a"], 1, 0)
    assert names([queue.take()]) == ["1a"]


def test_resumed_queue_leaves_out_what_is_done_and_nothing_else():
    queue = GroupQueue(Batches())
    tickets = [queue.take() for _ in range(5)]
    for done in (tickets[0], tickets[3], tickets[4]):
        queue.finish(done)
    assert queue.state() == {"batch": 0, "done": [(0, 0), (1, 1), (2, 0)]}
    resumed = GroupQueue(Batches(), queue.state())
    assert names([resumed.take() for _ in range(4)]) == ["0b", "1a", "2b", "0a"]
    queue.finish(tickets[1])
    assert queue.state() == {"batch": 1, "done": [(1, 1), (2, 0)]}
    queue.finish(tickets[2])
    assert queue.state() == {"batch": 2, "done": [(2, 0)]}
