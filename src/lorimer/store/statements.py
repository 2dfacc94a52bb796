"""Statements of the hot path, which SQLite runs without SQLAlchemy's work for each call.

SQLAlchemy takes several times as long to prepare an insert as SQLite takes to make it. A ``Statement`` is compiled
once; afterwards its values go to the driver directly. PostgreSQL, where a round trip takes longest, has the usual path.
"""

import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, Delete, Dialect, Insert, Update
from sqlalchemy.exc import DBAPIError

Convert = Callable[[Any], Any] | None


class _Compiled:
    """The text of a statement for SQLite, and for each of its values: name, constant if it has no name, conversion."""

    def __init__(self, clause: Insert | Update | Delete, dialect: Dialect) -> None:
        compiled = clause.compile(dialect=dialect)
        self.sql = str(compiled)
        self.parameters: list[tuple[str, Any, bool, Convert]] = []
        for name in compiled.positiontup or ():
            bind = compiled.binds[name]
            convert = bind.type.dialect_impl(dialect).bind_processor(dialect)
            is_constant = not bind.required
            constant = convert(bind.value) if is_constant and convert is not None else bind.value
            self.parameters.append((bind.key, constant, is_constant, convert))

    def arrange(self, values: Mapping[str, Any]) -> list[Any]:
        return [
            constant if is_constant else values[name] if convert is None else convert(values[name])
            for name, constant, is_constant, convert in self.parameters
        ]


class Statement:
    """A statement that changes rows. ``build`` makes it for a dialect, once."""

    def __init__(self, build: Callable[[str], Insert | Update | Delete]) -> None:
        self._build = build
        self._clauses: dict[str, Insert | Update | Delete] = {}
        self._compiled: _Compiled | None = None

    def run(self, c: Connection, values: Mapping[str, Any]) -> int:
        """Run it with a value for each of its parameters, and return the number of changed rows."""
        name = c.dialect.name
        if (clause := self._clauses.get(name)) is None:
            clause = self._clauses[name] = self._build(name)
        if name != "sqlite":
            return c.execute(clause, values, execution_options={"preserve_rowcount": True}).rowcount
        if self._compiled is None:
            self._compiled = _Compiled(clause, c.dialect)
        return run_sqlite(c, self._compiled.sql, self._compiled.arrange(values))


def run_sqlite(c: Connection, sql: str, parameters: list[Any] | tuple[()] = ()) -> int:
    """Run SQL on the driver's connection and return the number of changed rows. Errors are SQLAlchemy's."""
    driver: Any = c.connection.driver_connection
    try:
        count: int = driver.execute(sql, parameters).rowcount
    except sqlite3.Error as error:
        raise DBAPIError.instance(sql, None, error, sqlite3.Error, dialect=c.dialect) from error
    return count
