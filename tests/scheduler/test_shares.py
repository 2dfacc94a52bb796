"""Who is served next."""

from hypothesis import given
from hypothesis import strategies as st

from lorimer.scheduler.shares import SharedLimit, Shares

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


def test_the_least_served_user_is_next():
    shares = Shares()
    for user in ("ada", "bob"):
        shares.enter(user)
    shares.charge("ada", 10)
    assert shares.least_served(["ada", "bob"]) == "bob"
    shares.charge("bob", 20)
    assert shares.least_served(["ada", "bob"]) == "ada"


def test_nobody_saves_up_turns_by_staying_away():
    shares = Shares()
    shares.enter("ada")
    shares.charge("ada", 1000)
    shares.enter("bob")
    assert shares.served("bob") == 1000
    shares.leave("bob")
    shares.charge("ada", 500)
    shares.enter("bob")
    assert shares.served("bob") == 1500


def test_nobody_is_punished_for_having_been_alone():
    shares = Shares()
    shares.enter("ada")
    shares.charge("ada", 1000)
    shares.leave("ada")
    shares.enter("bob")
    shares.enter("ada")
    assert shares.served("ada") == shares.served("bob")
    assert shares.num_open == {"ada": 1, "bob": 1}
