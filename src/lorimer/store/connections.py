"""Connects to SQLite and PostgreSQL and classifies their errors: lost connection, retryable, or failing disk."""

import sqlite3
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.pool import NullPool

from lorimer.errors import DiskFull, InUse, StorageError
from lorimer.store.directory import free_bytes
from lorimer.store.statements import run_sqlite

Durability = Literal["process", "power"]
"""What a committed write survives: a crash of the process, or also a power failure."""

_BUSY_MILLISECONDS = 10_000
_IDLE_MILLISECONDS = 10_000
_SERVER_LOCK = 0x4C6F72696D6572  # "Lorimer"
# The server is stopping, starting, in recovery or read-only, or ended a transaction: a conflict, or it stood still.
_PASSING_STATES = ("57P01", "57P02", "57P03", "57P05", "53300", "25006", "40001", "40P01", "25P03")
_PASSING_CLASSES = ("08",)


def database_url(url: str | None, directory: Path) -> URL:
    """Return the URL to connect to: the file in the data directory, or the named PostgreSQL database."""
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
    """Create the engine of the one writing connection. Its transactions take SQLite's write lock when they begin."""
    engine = _engine(url, options)
    if url.drivername == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite_writer(durability))
        event.listen(engine, "begin", lambda connection: run_sqlite(connection, "BEGIN IMMEDIATE"))
    else:
        event.listen(engine, "connect", _prepare_postgresql_writer(durability))
    return engine


def reader_engine(url: URL, options: dict[str, Any]) -> Engine:
    """Create the engine of the read-only connections. Each statement sees the newest committed state."""
    engine = _engine(url, options).execution_options(isolation_level="AUTOCOMMIT")
    if url.drivername == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite_reader)
    return engine


def take_server_lock(connection: Connection, *, is_shared: bool = False) -> None:
    """Take PostgreSQL's advisory lock of the servers of this database, for the lifetime of the connection.

    One server alone takes it exclusively; several API replicas and workers share it.
    """
    function = "pg_try_advisory_lock_shared" if is_shared else "pg_try_advisory_lock"
    if connection.scalar(text(f"SELECT {function}(:key)"), {"key": _SERVER_LOCK}):
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


def release_server_lock(connection: Connection, *, is_shared: bool = False) -> None:
    """Release the lock explicitly, because PostgreSQL may notice a closed connection only later."""
    function = "pg_advisory_unlock_shared" if is_shared else "pg_advisory_unlock"
    connection.execute(text(f"SELECT {function}(:key)"), {"key": _SERVER_LOCK})
    connection.commit()


def is_passing(error: BaseException) -> bool:
    """Return whether an error is transient: a retry on a new connection may succeed."""
    if not isinstance(error, DBAPIError) or isinstance(error.orig, sqlite3.Error):
        return False
    state = getattr(error.orig, "sqlstate", None)
    if state is None:
        return error.connection_invalidated or isinstance(error, OperationalError)
    return error.connection_invalidated or state in _PASSING_STATES or state.startswith(_PASSING_CLASSES)


def is_failing_database(error: BaseException) -> bool:
    """Return whether the database itself failed; False if a job sent an invalid statement."""
    # SQLite reports an invalid statement as an operational error too.
    is_wrong_statement = getattr(getattr(error, "orig", None), "sqlite_errorcode", 0) == sqlite3.SQLITE_ERROR
    return is_passing(error) or (isinstance(error, OperationalError) and not is_wrong_statement)


def is_disk_full(error: BaseException) -> bool:
    orig = error.orig if isinstance(error, DBAPIError) else None
    return (
        getattr(orig, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL or getattr(orig, "sqlstate", None) == "53100"
    )


def may_succeed_alone(error: BaseException) -> bool:
    """Return whether the jobs of a failed group may succeed one by one. I/O errors are never retried."""
    return is_disk_full(error) or (isinstance(error, DBAPIError) and not isinstance(error.orig, sqlite3.Error))


def disconnect(connection: Connection) -> None:
    """Close a connection in any state. An open transaction is rolled back."""
    try:
        connection.close()
    except (DBAPIError, sqlite3.Error):
        connection.invalidate()


def translate(error: BaseException, directory: Path) -> BaseException:
    """Map a database or file error to the error that callers see. A job's own error is returned unchanged."""
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
        connection.isolation_level = None  # autocommit: transactions begin explicitly, DDL included
        connection.execute(f"PRAGMA busy_timeout = {_BUSY_MILLISECONDS}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA wal_autocheckpoint = 4000")  # in pages; the fsync of a checkpoint delays one write
        connection.execute("PRAGMA journal_size_limit = 67108864")

    return prepare


def _prepare_sqlite_reader(connection: sqlite3.Connection, _: object) -> None:
    connection.execute(f"PRAGMA busy_timeout = {_BUSY_MILLISECONDS}")
    connection.execute("PRAGMA query_only = ON")


def _prepare_postgresql_writer(durability: Durability) -> Any:
    def prepare(connection: Any, _: object) -> None:
        # A process that is stopped in a transaction must not keep rows from the others.
        connection.execute(f"SET idle_in_transaction_session_timeout = {_IDLE_MILLISECONDS}")
        if durability == "power":
            connection.execute("SET synchronous_commit = on")
        connection.commit()

    return prepare
