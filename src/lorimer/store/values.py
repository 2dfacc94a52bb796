"""What every feature module makes its rows of: random ids, moments, and text the databases accept."""

import secrets
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import Row

T = TypeVar("T")


def new_id() -> str:
    """128 random bits, in hexadecimal."""
    return secrets.token_hex(16)


def utc_now() -> datetime:
    return datetime.now(UTC)


def storable(text: str) -> str:
    """``text`` without what PostgreSQL or UTF-8 cannot hold: NUL and lone surrogates become question marks."""
    return text.replace("\0", "?").encode("utf-8", "replace").decode()


def record(kind: type[T], row: Row[Any]) -> T:
    """The dataclass ``kind`` filled from a row that has a column for each field."""
    return kind(**row._mapping)


def record_or_none(kind: type[T], row: Row[Any] | None) -> T | None:
    return None if row is None else kind(**row._mapping)
