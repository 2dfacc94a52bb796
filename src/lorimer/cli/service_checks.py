"""What ``lorimer doctor`` asks of a server to come: data directory, lock, database, objects, port and the hub."""

import contextlib
import os
import socket
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lorimer.cli.findings import Finding, failed, ok, warning
from lorimer.cli.output import size_text

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from lorimer.server.settings import Settings

MIN_FREE, LITTLE_FREE = 200 << 20, 5 << 30
SLOW_FSYNC_SECONDS = 0.05
WRITES = 5
CONNECT_SECONDS = 5
WAL_REPAIRED = ((3, 51, 3), (3, 53, 0))
"""SQLite up to 3.51.2, and the withdrawn 3.52.0, can corrupt a file that two connections write and checkpoint."""


def check_data_directory(settings: "Settings") -> list[Finding]:
    """Is it there and private, can it be written, how much is free, and how long does the disk take to be sure?"""
    path = settings.data.expanduser().absolute()
    place = next(each for each in (path, *path.parents) if each.exists())
    advice = "name another with --data or LORIMER_DATA"
    if not place.is_dir():
        return [failed("data directory", f"{str(place)!r} is not a directory", advice)]
    if place == path and path.stat().st_mode & 0o002:
        return [failed("data directory", f"every user can write to {str(path)!r}", f"chmod o-w {path}")]
    try:
        seconds = fsync_seconds(place)
    except OSError as error:
        return [failed("data directory", f"{str(place)!r} cannot be written: {error.strerror}", advice)]
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    where = str(path) if place == path else f"{path} (made by the first server)"
    text = f"{where}: {size_text(free)} free, fsync takes {seconds * 1000:.1f} ms"
    if free < MIN_FREE:
        return [failed("data directory", text, "make room: snapshots and checkpoints need it")]
    if free < LITTLE_FREE:
        return [warning("data directory", text, "make room: checkpoints of larger models fill it soon")]
    if seconds > SLOW_FSYNC_SECONDS:
        return [warning("data directory", text, "a local SSD is faster; avoid durability=power on this disk")]
    return [ok("data directory", text)]


def fsync_seconds(place: Path) -> float:
    """The median time until a small write is on the disk."""
    with tempfile.NamedTemporaryFile(dir=place, prefix=".lorimer-doctor-") as file:
        times = []
        for _ in range(WRITES):
            file.write(bytes(4096))
            start = time.perf_counter()
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def check_lock(settings: "Settings") -> list[Finding]:
    """Who has the data directory; the lock itself is not touched."""
    import psutil

    lock = settings.data.expanduser().absolute() / "lock"
    try:
        owner = lock.read_text("utf-8", "replace").strip()
    except FileNotFoundError:
        return [ok("lock", "no server has used the data directory yet")]
    words = owner.split()
    if len(words) < 4 or not words[1].isdecimal():
        return [ok("lock", "free")]
    if words[3] != socket.gethostname():
        text = f"{owner} has the data directory, or had it when it last ran"
        return [warning("lock", text, "directories shared by machines need a file system with working flock")]
    if psutil.pid_exists(int(words[1])):
        return [ok("lock", f"held by {owner}")]
    return [ok("lock", f"free; last held by {owner}, which has ended")]


def check_sqlite() -> list[Finding]:
    version = sqlite3.sqlite_version_info
    text = f"SQLite {sqlite3.sqlite_version}"
    is_repaired = version >= WAL_REPAIRED[1] or WAL_REPAIRED[0] <= version < (3, 52, 0)
    if is_repaired:
        return [ok("sqlite", text)]
    advice = (
        "Lorimer writes through one connection, which avoids it: never open lorimer.db with another program while a"
        " server runs; a Python with SQLite 3.51.3 or 3.53 has it repaired"
    )
    return [warning("sqlite", f"{text} has the WAL-reset fault, which can corrupt a file that two write", advice)]


def check_database(settings: "Settings") -> list[Finding]:
    """Can the database be opened and read? Nothing is written or migrated."""
    from sqlalchemy.exc import SQLAlchemyError

    from lorimer.server.settings import redacted_url

    file = settings.data.expanduser().absolute() / "lorimer.db"
    if not settings.database and not file.exists():
        return [ok("database", f"SQLite, to be made at {file}")]
    shown = redacted_url(settings.database) or str(file)
    try:
        revision = revision_of_url(settings.database) if settings.database else revision_of_file(file)
    except (SQLAlchemyError, sqlite3.Error, ImportError) as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        if "alembic_version" in reason:
            return [ok("database", f"{shown} answers and is empty")]
        advice = "start it, or correct its URL" if settings.database else "restore it from a backup"
        return [failed("database", f"{shown}: {reason}", advice)]
    return [ok("database", f"{shown} answers, schema {revision}")]


def revision_of_file(file: Path) -> object:
    with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=CONNECT_SECONDS)) as database:
        (revision,) = database.execute("SELECT version_num FROM alembic_version").fetchone()
    return revision


def revision_of_url(url: str) -> object:
    from sqlalchemy import text

    with connected(url) as connection:
        return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def check_clock(settings: "Settings") -> list[Finding]:
    """How far is the clock of this machine from that of the PostgreSQL database?"""
    from sqlalchemy import text as sql
    from sqlalchemy.exc import SQLAlchemyError

    from lorimer.server.roles import MAX_CLOCK_SECONDS, clock_seconds

    query = sql("SELECT extract(epoch FROM clock_timestamp())")
    try:
        with connected(settings.database) as connection:
            connection.execute(query)  # the first one also begins a transaction
            apart = clock_seconds(lambda: float(connection.execute(query).scalar_one()))
    except (SQLAlchemyError, ImportError):
        return []  # check_database says so
    if apart > MAX_CLOCK_SECONDS:
        text = f"this machine and the database are {apart:.1f} s apart; at most {MAX_CLOCK_SECONDS:g} s are accepted"
        advice = "synchronise them (NTP): `lorimer serve --role api` and `lorimer worker` refuse to start"
        return [failed("clock", text, advice)]
    return [ok("clock", f"within {max(apart, 0.1):.1f} s of the database's")]


def check_objects(settings: "Settings") -> list[Finding]:
    """Can the object store be written, read and listed, and does it let one of several creators of a name win?"""
    from lorimer.errors import StorageError
    from lorimer.server import roles

    try:
        roles.check_objects(settings.objects)
    except ImportError as error:
        advice = "pip install 'lorimer[s3]'"
        return [failed("object store", f"{settings.objects} needs a package that is not installed: {error}", advice)]
    except StorageError as error:
        advice = "correct `objects`, the AWS variables, or the rights of that user"
        return [failed("object store", str(error), advice)]
    return [ok("object store", f"{settings.objects} can be written, read and listed")]


@contextlib.contextmanager
def connected(url: str) -> Iterator["Connection"]:
    from sqlalchemy import create_engine, make_url

    where = make_url(url)
    if where.drivername.partition("+")[0] in ("postgresql", "postgres"):
        where = where.set(drivername="postgresql+psycopg")
    engine = create_engine(where, connect_args={"connect_timeout": CONNECT_SECONDS})
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def check_port(settings: "Settings") -> list[Finding]:
    address = f"{settings.host}:{settings.port}"
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            return [taken(settings, address, error)]
    return [ok("port", f"{address} is free")]


def taken(settings: "Settings", address: str, error: OSError) -> Finding:
    import httpx2

    host = "127.0.0.1" if settings.host in ("0.0.0.0", "localhost") else settings.host
    name = f"[{host}]" if ":" in host else host
    try:
        answer = httpx2.get(f"http://{name}:{settings.port}/api/v1/healthz", timeout=CONNECT_SECONDS, trust_env=False)
        if answer.status_code == 200 and answer.json().get("status") == "ok":
            return ok("port", f"{address} belongs to a server of this protocol")
    except (httpx2.HTTPError, ValueError):
        pass
    text = f"{address} cannot be listened on: {error.strerror}"
    return failed("port", text, "end the program that has it, or choose another with --port")


def check_hub() -> list[Finding]:
    from huggingface_hub import constants, is_offline_mode

    if is_offline_mode():
        return [ok("hub", "offline by HF_HUB_OFFLINE: aliases, directories and the hub cache are used")]
    import httpx2

    try:
        answer = httpx2.head(constants.ENDPOINT, timeout=CONNECT_SECONDS)
    except httpx2.HTTPError as error:
        text = f"{constants.ENDPOINT} cannot be reached: {error or type(error).__name__}"
        advice = "models come from directories, aliases and the hub cache; HF_HUB_OFFLINE=1 saves the waiting"
        return [warning("hub", text, advice)]
    token = "with a token" if os.environ.get("HF_TOKEN") else "without a token"
    return [ok("hub", f"{constants.ENDPOINT} answers {answer.status_code}; {token}")]
