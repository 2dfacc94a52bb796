"""Who is served next."""

from hypothesis import given
from hypothesis import strategies as st

from lorimer.scheduler.shares import FairShare, SharedLimit

TOTAL = 1000


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 400), st.booleans()), max_size=60))
def test_nobody_takes_the_room_of_a_newcomer(steps):
    limit, held = SharedLimit(TOTAL), {}
    for user, amount, is_taken in steps:
        if is_taken and limit.has_room(user, amount):
            limit.take(user, amount)
            held.setdefault(user, []).append(amount)
        elif not is_taken and held.get(user):
            limit.give_back(user, held[user].pop())
        assert limit.held == sum(map(sum, held.values())) <= TOTAL
        assert all(limit.held_by(name) == sum(amounts) for name, amounts in held.items())
    assert set(limit._held) == {name for name, amounts in held.items() if amounts}


def test_small_requests_of_few_users_leave_an_equal_share_for_the_next():
    limit = SharedLimit(TOTAL)
    for number, user in enumerate("abc", 1):
        while limit.has_room(user):
            limit.take(user)
        assert TOTAL - limit.held >= TOTAL >> number
    assert limit.held_by("a") == TOTAL // 2
    assert limit.has_room("d")


def test_the_user_served_least_comes_first():
    fair = FairShare()
    for user in ("ada", "bob"):
        fair.enter(user)
        fair.offer(user)
    fair.charge("ada", 10)
    assert fair.least_served(["ada", "bob"]) == "bob"
    fair.charge("bob", 20)
    assert fair.least_served(["ada", "bob"]) == "ada"
    assert fair.least_served(["bob"]) == "bob"


def test_who_comes_after_a_pause_starts_level():
    fair = FairShare()
    fair.enter("ada")
    fair.offer("ada")
    for _ in range(10):
        assert fair.least_served(["ada"]) == "ada"
        fair.charge("ada", 100)
    fair.enter("bob")
    fair.offer("bob")
    assert fair.served("bob") == 900  # what ada had when she was served last
    fair.leave("bob")
    fair.enter("bob")
    assert fair.served("bob") == 900  # leaving and coming back gains nothing


def test_accounts_of_users_who_left_take_no_room():
    fair = FairShare()
    for number in range(1000):
        user = f"user {number}"
        fair.enter(user)
        fair.offer(user)
        assert fair.least_served([user]) == user
        fair.charge(user, 10)
        fair.charge(user, -10)
        fair.leave(user)
    assert len(fair._served) < 10 and len(fair._heap) < 100
