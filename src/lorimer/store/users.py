"""Users and their API keys.

A secret is shown once, at creation; the database stores its SHA-256 and first characters.
"""

import hashlib
import hmac
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, bindparam, exists, select, update

from lorimer.errors import NotFound
from lorimer.store.tables import api_keys, insert, users
from lorimer.store.values import new_id, record, record_or_none, storable, utc_now

KEY_PREFIX = "tml-"
_ALPHABET = string.ascii_letters + string.digits
_SHOWN = 8


@dataclass(frozen=True)
class User:
    user_id: str
    name: str
    email: str
    created_at: datetime
    max_stored_bytes: int | None = None
    """Limit on the bytes of checkpoints and rollouts; None means the server's setting, 0 no limit."""
    requests_per_second: float | None = None
    """None means the server's setting, 0 no limit."""


@dataclass(frozen=True)
class ApiKey:
    key_id: int
    user_id: str
    name: str
    note: str
    prefix: str
    """The first characters of the secret, by which its owner recognizes it."""
    created_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None


_KEY_COLUMNS = [api_keys.c[name] for name in ApiKey.__dataclass_fields__]
_CANDIDATES = (
    select(*_KEY_COLUMNS, api_keys.c.secret_sha256)
    .where(api_keys.c.prefix == bindparam("shown"), api_keys.c.revoked_at.is_(None))
    .order_by(api_keys.c.key_id)
)


def ensure_user(c: Connection, name: str, email: str = "") -> User:
    """Return the user called ``name``, created if missing. An existing user keeps their email address."""
    values = {"user_id": new_id(), "name": storable(name), "email": storable(email), "created_at": utc_now()}
    c.execute(insert(c, users).values(values).on_conflict_do_nothing())
    return record(User, c.execute(select(users).where(users.c.name == values["name"])).one())


def get_user(c: Connection, user_id: str) -> User | None:
    return record_or_none(User, c.execute(select(users).where(users.c.user_id == user_id)).one_or_none())


def list_users(c: Connection) -> dict[str, User]:
    """Return all users by id."""
    return {user.user_id: user for user in (record(User, row) for row in c.execute(select(users)))}


def set_quotas(c: Connection, name: str, values: Mapping[str, float | None]) -> User:
    """Set a user's own quotas. Quotas not named in ``values`` stay unchanged."""
    chosen = users.c.name == storable(name)
    if c.execute(select(users.c.user_id).where(chosen)).one_or_none() is None:
        raise NotFound(f"there is no user {name!r}; `lorimer key list` has them")
    if values:
        c.execute(update(users).where(chosen).values(**values))
    return record(User, c.execute(select(users).where(chosen)).one())


def create_key(c: Connection, user_name: str, name: str, note: str = "") -> tuple[ApiKey, str]:
    """Create a key for ``user_name``, creating the user if needed. Return it with its secret, which is not stored."""
    secret = KEY_PREFIX + "".join(secrets.choice(_ALPHABET) for _ in range(40))
    values = {
        "user_id": ensure_user(c, user_name).user_id,
        "name": storable(name),
        "note": storable(note),
        "prefix": secret[:_SHOWN],
        "secret_sha256": _digest(secret),
        "created_at": utc_now(),
    }
    row = c.execute(insert(c, api_keys).values(values).returning(*_KEY_COLUMNS)).one()
    return record(ApiKey, row), secret


def find_key(c: Connection, secret: str) -> tuple[ApiKey, User] | None:
    """The key with this secret and its user; None if it is unknown or revoked. Compares in constant time."""
    digest, found = _digest(secret), None
    for *fields, stored in c.execute(_CANDIDATES, {"shown": storable(secret[:_SHOWN])}).all():
        if hmac.compare_digest(digest, stored):
            found = ApiKey(*fields)
    if found is None:
        return None
    user = get_user(c, found.user_id)
    assert user is not None, "a key belongs to a user"
    return found, user


def list_keys(c: Connection, user_id: str | None = None) -> list[ApiKey]:
    """Return all keys, or those of one user, including revoked ones, oldest first."""
    query = select(*_KEY_COLUMNS).order_by(api_keys.c.key_id)
    if user_id is not None:
        query = query.where(api_keys.c.user_id == user_id)
    return [record(ApiKey, row) for row in c.execute(query)]


def revoke_key(c: Connection, key_id: int) -> bool:
    """Revoke a key. Return False if it does not exist or was already revoked."""
    wanted = (api_keys.c.key_id == key_id) & api_keys.c.revoked_at.is_(None)
    return c.execute(update(api_keys).where(wanted).values(revoked_at=utc_now())).rowcount == 1


def touch_keys(c: Connection, used: dict[int, datetime]) -> None:
    """Persist when keys were last used, buffered by the caller and written in bulk.

    A later use that another API replica has written stays.
    """
    if used:
        is_older = api_keys.c.last_used_at.is_(None) | (api_keys.c.last_used_at < bindparam("at"))
        statement = update(api_keys).where(api_keys.c.key_id == bindparam("key"), is_older)
        in_order = sorted(used.items())  # replicas that write the same keys must not wait for each other
        c.execute(statement.values(last_used_at=bindparam("at")), [{"key": key, "at": at} for key, at in in_order])


def has_keys(c: Connection) -> bool:
    """Return whether any key is usable."""
    return bool(c.execute(select(exists().where(api_keys.c.revoked_at.is_(None)))).scalar_one())


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
