"""PostgreSQL going away: killed backends, a restarted server, a commit whose answer was lost, and a second server."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest
from sqlalchemy import Connection, select, text
from sqlalchemy.exc import OperationalError

from lorimer.errors import StorageError
from lorimer.store import Store, blobs
from lorimer.store.retention import known_names
from lorimer.store.tables import users
from lorimer.store.values import utc_now

LARGE = bytes(blobs.INLINE_BYTES + 1)


@pytest.fixture
def store(postgres_url, tmp_path):
    opened = Store.open(postgres_url, tmp_path / "data", retry_seconds=30)
    yield opened
    opened.close()


@pytest.fixture
def kill_backends(postgres, store):
    return lambda: postgres.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        f" WHERE pid <> pg_backend_pid() AND datname = '{store.url.database}'"
    )


def add(c, name):
    c.execute(users.insert().values(user_id=name, name=name, email="", created_at=utc_now()))
    return name


def names(c):
    return set(c.execute(select(users.c.name)).scalars())


def test_killed_backends_are_replaced(store, kill_backends):
    for number in range(3):
        assert store.write_now(add, f"user {number}")
        assert len(store.read_now(names)) == number + 1
        assert kill_backends()
    assert len(store.read_now(names)) == 3


async def test_a_transaction_killed_in_its_middle_is_run_again_once(store, kill_backends, tmp_path):
    runs = []

    def add_and_die(c):
        add(c, "ada")
        blobs.put(c, "ada", "payload", LARGE)
        runs.append(1)
        if len(runs) == 1:
            kill_backends()
        return c.execute(select(users.c.name)).scalar_one()

    others = [store.write(add, f"user {number}") for number in range(20)]
    assert await asyncio.gather(store.write(add_and_die), *others) == ["ada", *(f"user {n}" for n in range(20))]
    assert len(runs) >= 2
    assert len(await store.read(names)) == 21
    assert {path.name for path in (tmp_path / "data" / "blobs").iterdir()} == await store.read(known_names)


@pytest.mark.parametrize("how", ["fast", "immediate"])
async def test_a_restarted_server_is_waited_for(store, postgres, how):
    """Writes and reads that arrive while it is down complete when it is back; none is lost or doubled."""
    await store.write(add, "before")
    await asyncio.to_thread(postgres.stop, how)
    writes = [asyncio.create_task(store.write(add, f"user {number}")) for number in range(30)]
    read = asyncio.create_task(store.read(names))
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in [*writes, read])
    await asyncio.to_thread(postgres.start)
    assert await asyncio.gather(*writes) == [f"user {number}" for number in range(30)]
    assert "before" in await read
    assert len(await store.read(names)) == 31


@pytest.mark.parametrize("is_committed", [True, False], ids=["committed", "not committed"])
def test_a_commit_whose_answer_was_lost_is_looked_up(store, monkeypatch, tmp_path, is_committed):
    """The database knows whether it committed; the job is applied once either way."""
    commit, runs, lost = Connection.commit, [], []

    def lose_the_answer(self):
        if threading.current_thread().name == "lorimer-store-writer" and not lost:
            lost.append(1)
            if is_committed:
                commit(self)
            self.invalidate()
            raise OperationalError("COMMIT", {}, Exception("server closed the connection"), connection_invalidated=True)
        return commit(self)

    def add_large(c):
        runs.append(1)
        blobs.put(c, "ada", "payload", LARGE)
        return add(c, "ada")

    monkeypatch.setattr(Connection, "commit", lose_the_answer)
    assert store.write_now(add_large) == "ada"
    assert (len(lost), len(runs)) == (1, 1 if is_committed else 2)
    assert store.read_now(names) == {"ada"}
    assert store.read_now(blobs.get, "ada", "payload") == LARGE
    assert len(list((tmp_path / "data" / "blobs").iterdir())) == 1


def test_patience_ends_with_an_error_of_storage(postgres_url, postgres, tmp_path):
    store = Store.open(postgres_url, tmp_path / "data", retry_seconds=0.3)
    postgres.stop()
    try:
        with pytest.raises(StorageError, match="the database cannot be used: "):
            store.write_now(add, "ada")
        with pytest.raises(StorageError, match="the database cannot be used: "):
            store.read_now(names)
    finally:
        postgres.start()
    assert store.write_now(add, "bob") == "bob"
    store.close()


def test_jobs_that_wait_behind_others_give_up_with_them(postgres_url, postgres, tmp_path):
    """A database that stays away costs each caller its patience once, however many there are before it."""
    store = Store.open(postgres_url, tmp_path / "data", retry_seconds=2.0)
    postgres.stop()
    began, seconds = time.monotonic(), []

    async def ask(function, *args):
        with pytest.raises(StorageError, match="the database cannot be used: "):
            await function(*args)
        seconds.append(time.monotonic() - began)

    async def ask_all():
        writes = [ask(store.write, add, str(number)) for number in range(20)]
        await asyncio.gather(*writes, *(ask(store.read, names) for _ in range(20)))

    try:
        asyncio.run(ask_all())
    finally:
        postgres.start()
    assert len(seconds) == 40 and max(seconds) < 12, max(seconds)
    assert store.write_now(add, "bob") == "bob"
    store.close()


def test_a_second_server_is_refused_until_the_first_ends(store, postgres_url, tmp_path):
    store.lock()
    second = Store.open(postgres_url, tmp_path / "other")
    with pytest.raises(StorageError, match=r"the database is in use by a server on 127.0.0.1 \(backend \d+, since"):
        second.lock()
    store.close()
    second.lock()
    second.close()


def test_the_lock_is_held_again_after_a_lost_connection(store, kill_backends, postgres_url, tmp_path):
    store.lock()
    kill_backends()
    store.write_now(add, "ada")
    second = Store.open(postgres_url, tmp_path / "other")
    with pytest.raises(StorageError, match="the database is in use"):
        second.lock()
    second.close()


def test_a_server_that_lost_its_place_writes_no_more(postgres_url, postgres, tmp_path):
    """While its connection was down another took the lock; what it wants to write is refused."""
    first = Store.open(postgres_url, tmp_path / "data", retry_seconds=0.3)
    first.lock()
    postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{first.url.database}'")
    second = Store.open(postgres_url, tmp_path / "other")
    second.lock()
    with pytest.raises(StorageError, match="the database is in use by a server"):
        first.write_now(add, "late")
    assert second.read_now(names) == set()
    first.close()
    second.close()


def test_sqlite_leaves_the_lock_to_the_directory(tmp_path):
    store = Store.open(None, tmp_path / "data")
    store.lock()
    assert store.write_now(lambda c: c.scalar(text("SELECT 1"))) == 1
    store.close()


def test_the_place_of_a_killed_server_is_taken_over(postgres_url, tmp_path):
    hold = (
        "import sys, time; from lorimer.store import Store; store = Store.open(*sys.argv[1:]);"
        " store.lock(); print('locked', flush=True); time.sleep(60)"
    )
    line = [sys.executable, "-c", hold, postgres_url, str(tmp_path / "data")]
    store = Store.open(postgres_url, tmp_path / "other")
    with subprocess.Popen(line, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(StorageError, match="the database is in use"):
            store.lock()
        holder.kill()
    store.lock()
    store.close()
