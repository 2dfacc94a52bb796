"""Copies whole databases: SQLite into a file, and all rows between SQLite and PostgreSQL.

A copy is always a SQLite file, so a backup of either database can be restored into either. Autoincrement counters
continue where they were: the id of a removed key is never reused, and neither is a cursor's entry id.
"""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Table, create_engine, delete, func, insert, inspect, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from lorimer.errors import StorageError
from lorimer.store.connections import take_server_lock, translate, writer_engine
from lorimer.store.database import make_private_file
from lorimer.store.migrations import current_revision, migrate
from lorimer.store.tables import SCHEMA_VERSION, metadata

Report = Callable[[str, float | None], None]

_ROWS_TOGETHER = 200
"""A row can have 256 KiB inline, so a batch takes at most 50 MiB."""
_PAGES_TOGETHER = 4000


def copy_database(url: URL, file: Path, report: Report) -> dict[str, int]:
    """Copy one committed snapshot of the database into the SQLite file ``file``. Return the number of rows per table.

    Blocks neither writers nor readers.
    """
    try:
        make_private_file(sqlite_url(file))
        if url.drivername == "sqlite":
            _copy_sqlite(str(url.database), file, report)
        else:
            _export(url, file, report)
        return _check(file)
    except sqlite3.Error as error:
        raise translate(OperationalError("copy", None, error), file.parent) from error
    except Exception as error:
        raise translate(error, file.parent) from error


def sqlite_url(file: Path) -> URL:
    return URL.create("sqlite", database=str(file))


def _copy_sqlite(source: str, file: Path, report: Report) -> None:
    def progress(_: int, remaining: int, total: int) -> None:
        report("database", (total - remaining) / max(total, 1))

    with closing(sqlite3.connect(source, isolation_level=None)) as origin, closing(sqlite3.connect(file)) as copy:
        origin.execute("PRAGMA query_only = ON")
        # An open read transaction pins every step of the copy to the same commit, whatever is written meanwhile.
        origin.execute("BEGIN")
        _require_current(_revision(origin))
        origin.backup(copy, pages=_PAGES_TOGETHER, progress=progress)
        copy.execute("PRAGMA journal_mode = DELETE")


def _revision(connection: sqlite3.Connection) -> str | None:
    found = connection.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'alembic_version'").fetchone()[0]
    return connection.execute("SELECT version_num FROM alembic_version").fetchone()[0] if found else None


def _require_current(revision: str | None) -> None:
    if revision != SCHEMA_VERSION:
        raise StorageError(
            f"the database has the schema {revision!r}, this Lorimer has {SCHEMA_VERSION!r}; use the version of Lorimer"
            " that serves it, or start `lorimer serve` once to migrate it"
        )


def _export(url: URL, file: Path, report: Report) -> None:
    engine = create_engine(url, poolclass=NullPool, isolation_level="REPEATABLE READ")
    with engine.connect() as source:
        source.execute(text("SET TRANSACTION READ ONLY"))
        _require_current(current_revision(source))
        with writer_engine(sqlite_url(file), "process", {}).connect() as target:
            migrate(target)
            with target.begin():
                _copy_rows(source, target, report)
    with closing(sqlite3.connect(file)) as copy:
        copy.execute("PRAGMA journal_mode = DELETE")


def _check(file: Path) -> dict[str, int]:
    """Return the number of rows per table. Raise ``StorageError`` if the copy, and therefore its source, is damaged."""
    with closing(sqlite3.connect(file)) as copy:
        found = [row[0] for row in copy.execute("PRAGMA integrity_check")]
        found += [
            f"a row of {row[0]} names one of {row[2]} that is missing"
            for row in copy.execute("PRAGMA foreign_key_check")
        ]
        if found != ["ok"]:
            wrong = next(line for line in found if line != "ok")
            raise StorageError(f"the database is damaged ({wrong}); restore it from a backup")
        return {name: copy.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in metadata.tables}


def _copy_rows(source: Connection, target: Connection, report: Report) -> None:
    counts = {table: source.scalar(select(func.count()).select_from(table)) or 0 for table in metadata.sorted_tables}
    total, done = max(sum(counts.values()), 1), 0
    for table in metadata.sorted_tables:
        rows = source.execution_options(yield_per=_ROWS_TOGETHER).execute(select(table))
        for some in rows.mappings().partitions():
            target.execute(insert(table), [dict(row) for row in some])
            done += len(some)
            report(f"database: {table.name}", done / total)
        if (column := _counted(table)) is not None:
            _set_last_number(target, table, column, _last_number(source, table, column))


def _counted(table: Table) -> str | None:
    """Return the autoincrement column of a table, if any."""
    column = table.autoincrement_column
    return None if column is None else column.name


def _last_number(c: Connection, table: Table, column: str) -> int:
    """Return the highest id ever allocated, as far as the database remembers."""
    highest = c.scalar(select(func.max(table.c[column]))) or 0
    if c.dialect.name == "postgresql":
        remembered = c.scalar(
            text(f"SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {_sequence(c, table, column)}")
        )
    else:
        remembered = c.scalar(text("SELECT seq FROM sqlite_sequence WHERE name = :name"), {"name": table.name})
    return max(highest, remembered or 0)


def _set_last_number(c: Connection, table: Table, column: str, number: int) -> None:
    if c.dialect.name == "postgresql":
        values: dict[str, Any] = {"name": _sequence(c, table, column), "last": max(number, 1), "is_used": number > 0}
        c.execute(text("SELECT setval(CAST(:name AS regclass), :last, :is_used)"), values)
    elif table.dialect_options["sqlite"]["autoincrement"]:
        c.execute(text("DELETE FROM sqlite_sequence WHERE name = :name"), {"name": table.name})
        c.execute(text("INSERT INTO sqlite_sequence VALUES (:name, :last)"), {"name": table.name, "last": number})


def _sequence(c: Connection, table: Table, column: str) -> str:
    found: str | None = c.scalar(
        text("SELECT pg_get_serial_sequence(:table, :column)"), {"table": table.name, "column": column}
    )
    assert found is not None, f"{table.name}.{column} is counted by nothing"
    return found


# ── back again ────────────────────────────────────────────────────────────────────────────────────────


def migrate_file(file: Path) -> None:
    """Migrate a restored SQLite file to the current schema."""
    try:
        with writer_engine(sqlite_url(file), "process", {}).connect() as connection:
            migrate(connection)
    except Exception as error:
        raise translate(error, file.parent) from error


def import_database(file: Path, url: URL, report: Report, *, replace: bool) -> None:
    """Replace the rows of the PostgreSQL database ``url`` by those of ``file``, in one transaction.

    Refuses a database that another server uses, and one with rows unless ``replace`` is set.
    """
    try:
        with writer_engine(url, "power", {}).connect() as target:
            take_server_lock(target)
            target.commit()
            migrate(target)
            with writer_engine(sqlite_url(file), "process", {}).connect() as source, target.begin():
                _empty(target, url, replace)
                _copy_rows(source, target, report)
    except Exception as error:
        raise translate(error, file.parent) from error


def has_rows(url: URL) -> bool:
    """Return whether a PostgreSQL database has any rows in Lorimer's tables."""
    try:
        with create_engine(url, poolclass=NullPool).connect() as c:
            present = set(inspect(c).get_table_names())
            return any(
                c.scalar(select(func.count()).select_from(t)) for t in metadata.sorted_tables if t.name in present
            )
    except Exception as error:
        raise translate(error, Path()) from error


def _empty(c: Connection, url: URL, replace: bool) -> None:
    for table in reversed(metadata.sorted_tables):
        if c.scalar(select(func.count()).select_from(table)):
            if not replace:
                raise StorageError(f"the database {url.render_as_string()!r} is not empty; --replace replaces its rows")
            c.execute(delete(table))
