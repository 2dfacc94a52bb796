"""The store's threads: group commit, isolation of jobs, several loops, closing, and what a failing database says."""

import asyncio
import os
import sqlite3
import stat
import threading

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError

from lorimer.errors import NotFound, StorageError
from lorimer.store import Store
from lorimer.store.tables import users
from lorimer.store.users import ensure_user
from lorimer.store.values import utc_now


def names(c):
    return set(c.execute(select(users.c.name)).scalars())


def add(c, name, user_id=None):
    c.execute(users.insert().values(user_id=user_id or name, name=name, email="", created_at=utc_now()))
    return name


def add_then(c, name, error):
    add(c, name)
    raise error


async def test_a_write_is_read_back_and_survives_reopening(store, database, tmp_path):
    assert await store.write(add, "ada") == "ada"
    assert await store.read(names) == {"ada"}
    store.close()
    again = Store.open(database, tmp_path / "data")
    assert again.read_now(names) == {"ada"}
    again.close()


async def test_a_failing_job_reaches_only_its_caller(store):
    """All of these wait behind the first and are committed together."""
    is_open, go_on = threading.Event(), threading.Event()

    def hold(c):
        is_open.set()
        go_on.wait(10)

    first = asyncio.create_task(store.write(hold))
    await asyncio.to_thread(is_open.wait, 10)
    jobs = [
        store.write(add, "a"),
        store.write(add_then, "b", NotFound("no such thing")),
        store.write(add, "other", user_id="a"),
        store.write(add, "c"),
        store.write(lambda c: c.execute(text("SELECT * FROM nowhere"))),
        store.write(lambda c: 1 / 0),
        store.write(add, "d"),
    ]
    tasks = [asyncio.create_task(job) for job in jobs]
    await asyncio.sleep(0)
    go_on.set()
    await first
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [outcomes[number] for number in (0, 3, 6)] == ["a", "c", "d"]
    assert isinstance(outcomes[1], NotFound)
    assert isinstance(outcomes[2], IntegrityError)
    assert isinstance(outcomes[5], ZeroDivisionError)
    assert isinstance(outcomes[4], Exception)
    assert await store.read(names) == {"a", "c", "d"}


async def test_waiting_writes_share_one_commit(store):
    """2,000 writes take far fewer transactions than writes."""
    seen = set()

    def number(c):
        seen.add(id(c.get_transaction()))
        return len(seen)

    await asyncio.gather(*(store.write(number) for _ in range(2000)))
    assert len(seen) < 200


async def test_a_caller_who_gives_up_harms_nobody(store):
    task = asyncio.create_task(store.write(add, "ada"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await store.write(add, "bob") == "bob"
    assert await store.read(names) == {"ada", "bob"}


def test_several_event_loops_and_threads_use_one_store(store):
    def in_own_loop(prefix):
        async def main():
            await asyncio.gather(*(store.write(add, f"{prefix}{number}") for number in range(50)))
            return len(await store.read(names))

        counts.append(asyncio.run(main()))

    counts: list[int] = []
    threads = [threading.Thread(target=in_own_loop, args=(prefix,)) for prefix in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 3
    assert len(store.read_now(names)) == 150


def test_a_loop_that_closed_before_its_answer_is_forgotten(store):
    async def ask_and_leave():
        asyncio.get_running_loop().create_task(store.write(add, "ada"))
        await asyncio.sleep(0)

    asyncio.run(ask_and_leave())
    store.write_now(add, "bob")
    assert store.read_now(names) >= {"bob"}


def store_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("lorimer-store")]


async def test_closing_finishes_what_was_asked_for_and_refuses_more(store, database, tmp_path):
    await asyncio.gather(*(store.read(names) for _ in range(20)))
    before = store_threads()  # other tests' servers may have theirs
    tasks = [asyncio.create_task(store.write(add, f"user {number}")) for number in range(100)]
    await asyncio.sleep(0)
    await asyncio.to_thread(store.close)
    assert len(await asyncio.gather(*tasks)) == 100
    with pytest.raises(StorageError, match="the store is closed"):
        await store.write(add, "late")
    with pytest.raises(StorageError, match="the store is closed"):
        store.read_now(names)
    store.close()
    ended = sorted(thread.name for thread in before if not thread.is_alive())
    assert ended[-1] == "lorimer-store-writer"
    assert ended[0] == "lorimer-store-reader-0"
    assert len(before) - len(store_threads()) == len(ended)


def test_a_reader_cannot_write_to_sqlite(tmp_path):
    store = Store.open(None, tmp_path / "data")
    with pytest.raises(StorageError, match="readonly database"):
        store.read_now(add, "ada")
    assert store.read_now(names) == set()
    store.close()


@pytest.mark.parametrize(("durability", "level"), [("process", 1), ("power", 2)], ids=["process", "power"])
def test_sqlite_is_set_up_as_the_durability_asks(tmp_path, durability, level):
    store = Store.open(None, tmp_path / "data", durability=durability)
    pragma = {name: store.write_now(lambda c, n=name: c.scalar(text(f"PRAGMA {n}"))) for name in PRAGMAS}
    store.close()
    assert pragma == {"journal_mode": "wal", "synchronous": level, "foreign_keys": 1, "busy_timeout": 10_000}


PRAGMAS = ["journal_mode", "synchronous", "foreign_keys", "busy_timeout"]


def test_the_database_is_readable_by_its_owner_only(tmp_path):
    before = os.umask(0)
    try:
        store = Store.open(None, tmp_path / "data")
        store.write_now(ensure_user, "ada")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "data").iterdir() if path.is_file()]
    assert {path.name for path in files} >= {"lorimer.db", "lorimer.db-wal"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    store.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://root:hunter2@host/x", "'mysql://root:.*@host/x' is not a database Lorimer can use; postgresql://"),
        ("sqlite://", "is not a database Lorimer can use"),
        ("not a url", "the database URL cannot be read"),
        ("postgresql://lorimer@127.0.0.1:1/x", "the database cannot be used: .*refused"),
    ],
    ids=["another kind", "in memory", "no url", "nobody there"],
)
def test_a_database_that_cannot_be_used_is_refused_without_its_password(tmp_path, url, message):
    with pytest.raises(StorageError, match=message) as refusal:
        Store.open(url, tmp_path / "data")
    assert "hunter2" not in str(refusal.value)


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "lorimer.db").write_bytes(b"this is not a database at all" * 100)
    with pytest.raises(StorageError, match="the database is damaged"):
        Store.open(None, tmp_path / "data")


def test_a_locked_sqlite_file_is_an_error_of_storage(tmp_path, monkeypatch):
    monkeypatch.setattr("lorimer.store.connections._BUSY_MILLISECONDS", 50)
    store = Store.open(None, tmp_path / "data")
    other = sqlite3.connect(tmp_path / "data" / "lorimer.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageError, match="database is locked"):
        store.write_now(add, "ada")
    other.execute("ROLLBACK")
    other.close()
    assert store.write_now(add, "ada") == "ada"
    store.close()
