"""Remembers results by the client's idempotency key, so that a retried request gets the first result."""

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, delete, select

from lorimer.store.tables import idempotency, insert
from lorimer.store.values import storable, utc_now


def remember(c: Connection, user_id: str, key: str, value: Any) -> Any:
    """Store ``value``, which must be JSON, unless the key has one already. Return the stored value."""
    row = {"user_id": user_id, "key": storable(key), "value": value, "created_at": utc_now()}
    c.execute(insert(c, idempotency).values(row).on_conflict_do_nothing())
    return recall(c, user_id, key)


def recall(c: Connection, user_id: str, key: str) -> Any:
    """Return the value stored for the user's key, or None."""
    wanted = (idempotency.c.user_id == user_id) & (idempotency.c.key == storable(key))
    return c.execute(select(idempotency.c.value).where(wanted)).scalar_one_or_none()


def forget(c: Connection, before: datetime) -> int:
    """Delete the entries created before a time. Return how many were deleted."""
    return c.execute(delete(idempotency).where(idempotency.c.created_at < before)).rowcount
