"""The next turn, case by case: ``run:user kinds with tokens``, what was served before, and who gets the turn."""

import pytest

from lorimer.scheduler.batching import Queue, next_turn
from lorimer.scheduler.runs import Operation


def queue(text: str) -> Queue:
    """``a/r1 f10 f20 s`` is run r1 of user a with two trainings of 10 and 20 tokens, then a step."""
    (name, *kinds) = text.split()
    user, run = name.split("/")
    operations = [
        Operation(
            request_id=f"{run}{number}",
            user_id=user,
            session_id="",
            base_model="m",
            lane=run,
            seq_id=number,
            kind="forward_backward" if kind[0] == "f" else "optim_step",
            tokens=int(kind[1:] or 0),
            received=number,
        )
        for number, kind in enumerate(kinds, 1)
    ]
    return Queue(user, operations)


CASES = {
    "nothing waits": ([], {}, "", ""),
    "empty queues": (["a/r"], {}, "", ""),
    "one operation": (["a/r f10"], {}, "", "r1"),
    "a run's operations up to its barrier": (["a/r f10 f10 s f10"], {}, "", "r1 r2"),
    "a barrier holds its own run only": (["a/r s f10", "a/q f10"], {}, "r1", "q1"),
    "one barrier of each run": (["a/r s s", "b/q s"], {}, "r1 q1", ""),
    "runs and users share a batch": (["a/r f10", "a/q f10", "b/p f10"], {}, "", "r1 p1 q1"),
    "who was served least comes first": (["a/r f60", "b/q f60"], {"a": 1}, "", "q1"),
    "what the turn gives counts": (["a/r f30 f30 f30", "b/q f10 f10 f10"], {}, "", "r1 q1 q2 q3 r2"),
    "barriers count a little": (["a/r s", "a/p f90", "b/q f90"], {}, "r1", "q1"),
    "the budget is kept": (["a/r f60 f60"], {}, "", "r1"),
    "a small one fits beside a large one": (["a/r f80", "a/p f30", "b/q f20"], {}, "", "r1 q1"),
    "larger than the budget gets a turn alone": (["a/r f500", "b/q f10"], {}, "", "r1"),
    "too large for the room waits for the next turn": (["a/r f10", "b/q f500"], {}, "", "r1"),
    "of a user's runs, the one that waited longest": (["a/r f90 f1", "a/q f5"], {}, "", "r1 q1 r2"),
}


@pytest.mark.parametrize(("queues", "served", "barriers", "training"), CASES.values(), ids=CASES)
def test_next_turn(queues, served, barriers, training):
    turn = next_turn([queue(text) for text in queues], lambda user: served.get(user, 0), token_budget=100)
    assert " ".join(operation.request_id for operation in turn.barriers) == barriers
    assert " ".join(operation.request_id for operation in turn.training) == training


@pytest.mark.parametrize(("first", "expected"), [("f10 f10", "r1"), ("s f10", "r1")], ids=["training", "barrier"])
def test_a_turn_alone_has_one_operation(first, expected):
    turn = next_turn([queue(f"a/r {first}"), queue("b/q f10")], lambda user: 0, 100, alone=True)
    assert [operation.request_id for operation in turn.operations] == [expected]


def test_tokens_are_shared_evenly_in_the_long_run():
    queues = [queue("a/r" + " f10" * 400), *(queue(f"b/q{i} " + " f40" * 20) for i in range(5))]
    served = {"a": 0.0, "b": 0.0}
    for _ in range(20):
        for operation in next_turn(queues, lambda user: served[user], 100).training:
            served[operation.user_id] += operation.tokens
            run = next(queue for queue in queues if operation in queue.operations)
            run.operations.remove(operation)
    assert abs(served["a"] - served["b"]) <= 40
