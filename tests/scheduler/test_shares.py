"""Who is served next."""

from lorimer.scheduler.shares import Shares


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
