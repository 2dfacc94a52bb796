"""Answers remembered by the idempotency key the client sent, so that a retried request gets the first answer."""

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, delete, select

from lorimer.store.tables import idempotency, insert
from lorimer.store.values import storable, utc_now


def remember(c: Connection, user_id: str, key: str, value: Any) -> Any:
    """Keep ``value``, which JSON can express, and return what is kept: the first value remembered stays."""
    row = {"user_id": user_id, "key": storable(key), "value": value, "created_at": utc_now()}
    c.execute(insert(c, idempotency).values(row).on_conflict_do_nothing())
    return recall(c, user_id, key)


def recall(c: Connection, user_id: str, key: str) -> Any:
    """The value remembered for the user's key, or None."""
    wanted = (idempotency.c.user_id == user_id) & (idempotency.c.key == storable(key))
    return c.execute(select(idempotency.c.value).where(wanted)).scalar_one_or_none()


def forget(c: Connection, before: datetime) -> int:
    """Drop what was remembered before that moment and return how many there were."""
    return c.execute(delete(idempotency).where(idempotency.c.created_at < before)).rowcount
