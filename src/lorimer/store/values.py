"""Helpers for building rows: random ids, timestamps, and text that both databases accept."""

import secrets
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import Row

T = TypeVar("T")


def new_id() -> str:
    """Return 128 random bits in hexadecimal."""
    return secrets.token_hex(16)


def utc_now() -> datetime:
    return datetime.now(UTC)


def storable(text: str) -> str:
    """Replace NUL and lone surrogates, which PostgreSQL or UTF-8 cannot store, by question marks."""
    return text.replace("\0", "?").encode("utf-8", "replace").decode()


def record(kind: type[T], row: Row[Any]) -> T:
    """Build the dataclass ``kind`` from a row with a column for each field."""
    return kind(**row._mapping)


def record_or_none(kind: type[T], row: Row[Any] | None) -> T | None:
    return None if row is None else kind(**row._mapping)
