"""Users and keys: what is stored of a secret, who is found by it, and revocation."""

import re
from datetime import timedelta

from sqlalchemy import select, text

from lorimer.store import users
from lorimer.store.tables import api_keys
from lorimer.store.values import utc_now


def test_a_user_is_made_once(store):
    first = store.write_now(users.ensure_user, "ada", "ada@example.org")
    assert store.write_now(users.ensure_user, "ada") == first
    assert store.read_now(users.get_user, first.user_id) == first
    assert store.read_now(users.get_user, "unknown") is None
    assert re.fullmatch("[0-9a-f]{32}", first.user_id)


def test_a_key_finds_its_user_and_nobody_else(store):
    key, secret = store.write_now(users.create_key, "ada", "laptop", "for tests")
    _, other_secret = store.write_now(users.create_key, "bob", "server")
    assert re.fullmatch("tml-[A-Za-z0-9]{32,}", secret)
    assert (key.name, key.note, key.prefix, key.revoked_at) == ("laptop", "for tests", secret[:8], None)
    found, user = store.read_now(users.find_key, secret)
    assert (found, user.name) == (key, "ada")
    assert store.read_now(users.find_key, other_secret)[1].name == "bob"
    for wrong in (secret[:-1], secret + "x", secret[:8], "", "tml-", "\0", "\ud800", other_secret[:8] + secret[8:]):
        assert store.read_now(users.find_key, wrong) is None


def test_keys_with_the_same_beginning_are_told_apart(store):
    made = [store.write_now(users.create_key, name, "key") for name in ("ada", "bob")]
    store.write_now(lambda c: c.execute(api_keys.update().values(prefix="tml-same")))
    for (key, secret), name in zip(made, ("ada", "bob"), strict=True):
        store.write_now(
            lambda c, k=key, s=secret: c.execute(
                api_keys.update()
                .where(api_keys.c.key_id == k.key_id)
                .values(secret_sha256=users._digest("tml-same" + s))
            )
        )
        assert store.read_now(users.find_key, "tml-same" + secret)[1].name == name


def test_the_secret_is_not_in_the_database(store):
    _, secret = store.write_now(users.create_key, "ada", "laptop")
    rows = store.read_now(lambda c: c.execute(select(api_keys)).all())
    assert secret[8:] not in str(rows)


def test_a_revoked_key_is_listed_and_finds_nobody(store):
    key, secret = store.write_now(users.create_key, "ada", "laptop")
    assert store.read_now(users.has_keys)
    assert store.write_now(users.revoke_key, key.key_id)
    assert not store.write_now(users.revoke_key, key.key_id)
    assert not store.write_now(users.revoke_key, 12345)
    assert store.read_now(users.find_key, secret) is None
    assert not store.read_now(users.has_keys)
    [listed] = store.read_now(users.list_keys)
    assert listed.revoked_at is not None


def test_keys_are_listed_by_user_with_their_last_use(store):
    key, _ = store.write_now(users.create_key, "ada", "one")
    store.write_now(users.create_key, "bob", "two")
    now = utc_now()
    store.write_now(users.touch_keys, {key.key_id: now})
    assert [found.name for found in store.read_now(users.list_keys)] == ["one", "two"]
    [mine] = store.read_now(users.list_keys, key.user_id)
    assert (mine.name, mine.last_used_at) == ("one", now)


def test_last_use_never_goes_back(store):
    """An API replica may write what it has buffered after another one wrote a later use."""
    first, _ = store.write_now(users.create_key, "ada", "one")
    second, _ = store.write_now(users.create_key, "ada", "two")
    later = utc_now()
    earlier = later - timedelta(seconds=40)
    store.write_now(users.touch_keys, {first.key_id: later})
    store.write_now(users.touch_keys, {second.key_id: earlier, first.key_id: earlier})
    assert [key.last_used_at for key in store.read_now(users.list_keys)] == [later, earlier]


def test_names_are_data_and_never_sql(store):
    name = "'; DROP TABLE users; --"
    assert store.write_now(users.ensure_user, name).name == name
    assert store.read_now(lambda c: c.scalar(text("SELECT count(*) FROM users"))) == 1
