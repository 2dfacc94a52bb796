"""Connections to SQLite and PostgreSQL, and what their errors mean: lost, to be tried again, or a failing disk."""

import sqlite3
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.pool import NullPool

from lorimer.errors import DiskFull, InUse, StorageError
from lorimer.store.directory import free_bytes

Durability = Literal["process", "power"]
"""What an acknowledged write survives: the death of the process, or also a power cut."""

_BUSY_MILLISECONDS = 10_000
_SERVER_LOCK = 0x4C6F72696D6572  # "Lorimer"
# The server is stopping, starting or in recovery, has become read-only, or undid a transaction for another's sake.
_PASSING_STATES = ("57P01", "57P02", "57P03", "57P05", "53300", "25006", "40001", "40P01")
_PASSING_CLASSES = ("08",)


def database_url(url: str | None, directory: Path) -> URL:
    """The URL to connect to: the file in the data directory, or the named PostgreSQL database."""
    if url is None:
        return URL.create("sqlite", database=str(directory / "lorimer.db"))
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise StorageError("the database URL cannot be read; postgresql://user@host/name is accepted") from None
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return parsed
    raise StorageError(
        f"{parsed.render_as_string(hide_password=True)!r} is not a database Lorimer can use;"
        " postgresql://user@host/name or sqlite:///file is accepted"
    )


def writer_engine(url: URL, durability: Durability, options: dict[str, Any]) -> Engine:
    """The engine of the one connection that writes. Its transactions hold SQLite's write lock from their begin."""
    engine = _engine(url, options)
    if url.drivername == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite_writer(durability))
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    elif durability == "power":
        event.listen(engine, "connect", _set_synchronous_commit)
    return engine


def reader_engine(url: URL, options: dict[str, Any]) -> Engine:
    """The engine of the connections that only read; each statement sees the newest committed state."""
    engine = _engine(url, options).execution_options(isolation_level="AUTOCOMMIT")
    if url.drivername == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite_reader)
    return engine


def take_server_lock(connection: Connection) -> None:
    """Hold PostgreSQL's lock on being the one server of this database for as long as the connection lives."""
    if connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": _SERVER_LOCK}):
        return
    owner = connection.execute(
        text(
            "SELECT a.pid, coalesce(host(a.client_addr), 'this machine'), a.backend_start FROM pg_locks l"
            " JOIN pg_stat_activity a ON a.pid = l.pid WHERE l.locktype = 'advisory' AND l.granted"
            " AND l.classid = :high AND l.objid = :low"
        ),
        {"high": _SERVER_LOCK >> 32, "low": _SERVER_LOCK & 0xFFFFFFFF},
    ).first()
    who = "another server" if owner is None else f"a server on {owner[1]} (backend {owner[0]}, since {owner[2]:%F %T})"
    raise InUse(f"the database is in use by {who}; stop it or name another database")


def release_server_lock(connection: Connection) -> None:
    """Give the lock back before the connection closes, which the server may notice only later."""
    connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _SERVER_LOCK})
    connection.commit()


def is_passing(error: BaseException) -> bool:
    """Whether the same work may succeed on a new connection."""
    if not isinstance(error, DBAPIError) or isinstance(error.orig, sqlite3.Error):
        return False
    state = getattr(error.orig, "sqlstate", None)
    if state is None:
        return error.connection_invalidated or isinstance(error, OperationalError)
    return error.connection_invalidated or state in _PASSING_STATES or state.startswith(_PASSING_CLASSES)


def is_failing_database(error: BaseException) -> bool:
    """Whether the database could not do its work; False for a job that asked it for something wrong."""
    # SQLite reports a wrong statement as an operational error too.
    is_wrong_statement = getattr(getattr(error, "orig", None), "sqlite_errorcode", 0) == sqlite3.SQLITE_ERROR
    return is_passing(error) or (isinstance(error, OperationalError) and not is_wrong_statement)


def is_disk_full(error: BaseException) -> bool:
    orig = error.orig if isinstance(error, DBAPIError) else None
    return (
        getattr(orig, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL or getattr(orig, "sqlstate", None) == "53100"
    )


def fits_alone(error: BaseException) -> bool:
    """Whether jobs of a group that failed so may succeed one by one; not after an I/O error, which is never retried."""
    return is_disk_full(error) or (isinstance(error, DBAPIError) and not isinstance(error.orig, sqlite3.Error))


def disconnect(connection: Connection) -> None:
    """Close a connection in whatever state it is; an open transaction is rolled back."""
    try:
        connection.close()
    except (DBAPIError, sqlite3.Error):
        connection.invalidate()


def translate(error: BaseException, directory: Path) -> BaseException:
    """The error a caller sees: a `StorageError` for a failing database, the error itself for a job's own fault."""
    if isinstance(error, OSError):
        return StorageError(f"the data directory cannot be used: {error.strerror or error}")
    if not isinstance(error, DBAPIError):
        return error
    if is_disk_full(error):
        return DiskFull(
            f"the disk is full: the database has no room to grow, {free_bytes(directory)} bytes are free"
            f" in {str(directory)!r}"
        )
    code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StorageError(f"the database is damaged ({error.orig}); restore it from a backup")
    if is_failing_database(error):
        return StorageError(f"the database cannot be used: {str(error.orig).strip()}")
    return error


def _engine(url: URL, options: dict[str, Any]) -> Engine:
    arguments: dict[str, Any] = {"connect_timeout": 10} if url.drivername != "sqlite" else {}
    return create_engine(url, poolclass=NullPool, execution_options=options, connect_args=arguments)


def _prepare_sqlite_writer(durability: Durability) -> Any:
    def prepare(connection: sqlite3.Connection, _: object) -> None:
        connection.isolation_level = None  # transactions begin where we say, DDL included
        connection.execute(f"PRAGMA busy_timeout = {_BUSY_MILLISECONDS}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA wal_autocheckpoint = 4000")  # pages: the checkpoint's fsync holds up one write
        connection.execute("PRAGMA journal_size_limit = 67108864")

    return prepare


def _prepare_sqlite_reader(connection: sqlite3.Connection, _: object) -> None:
    connection.execute(f"PRAGMA busy_timeout = {_BUSY_MILLISECONDS}")
    connection.execute("PRAGMA query_only = ON")


def _set_synchronous_commit(connection: Any, _: object) -> None:
    connection.execute("SET synchronous_commit = on")
    connection.commit()
