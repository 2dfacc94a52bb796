"""The column types of the tables, and the kinds of columns and indexes that most of them have."""

from datetime import UTC, datetime
from typing import Any

import orjson
from sqlalchemy import BigInteger, Column, DateTime, Dialect, Index, Integer, Text, TypeDecorator, text


class UtcDateTime(TypeDecorator[datetime]):
    """A timestamp: stored in UTC with microseconds, returned as an aware datetime."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        assert value.tzinfo is not None, "a time without a zone is not a moment"
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if dialect.name == "sqlite" else value.astimezone(UTC)


class Json(TypeDecorator[Any]):
    """A value stored as JSON text: the same bytes on both databases, which never interpret them."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else orjson.loads(value)


# SQLite autoincrements only a column declared INTEGER, which has 64 bits there.
NUMBER = BigInteger().with_variant(Integer, "sqlite")


def id_column(name: str) -> Column[str]:
    return Column(name, Text, primary_key=True)


def text_column(name: str, *, null: bool = False) -> Column[str]:
    return Column(name, Text, nullable=null)


def time_column(name: str, *, null: bool = False) -> Column[datetime]:
    return Column(name, UtcDateTime, nullable=null)


def partial_index(name: str, *columns: str, where: str) -> Index:
    """Create a partial index. Queries must repeat ``where`` without parameters to use it.

    A bare name is a boolean column, which SQLAlchemy compares with 1 on SQLite.
    """
    on_sqlite = f"{where} = 1" if where.isidentifier() else where
    return Index(name, *columns, sqlite_where=text(on_sqlite), postgresql_where=text(where))
