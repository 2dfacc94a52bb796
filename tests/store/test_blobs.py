"""Bytes in rows and files: which go where, what is left behind by failures, torn files, and a disk that is full."""

import asyncio
import contextlib
import os
import subprocess
import threading

import pytest
from sqlalchemy import select

from lorimer.errors import CheckpointError, DiskFull, StorageError
from lorimer.store import DataDirectory, Store, blobs
from lorimer.store.retention import known_names
from lorimer.store.tables import blobs as table
from lorimer.store.tables import users
from lorimer.store.values import utc_now

LARGE = os.urandom(blobs.INLINE_BYTES + 1)


@pytest.fixture
def files(tmp_path):
    """The names of the blob files, sorted, each time it is called."""
    return lambda: sorted(os.listdir(tmp_path / "data" / "blobs"))


def owners(c):
    return set(c.execute(select(table.c.owner)).scalars())


@pytest.mark.parametrize(
    ("data", "num_files"),
    [(b"", 0), (b"small", 0), (bytes(blobs.INLINE_BYTES), 0), (LARGE, 1)],
    ids=["empty", "small", "largest in a row", "smallest in a file"],
)
def test_bytes_come_back_wherever_they_are(store, files, data, num_files):
    store.write_now(blobs.put, "a", "payload", data)
    assert len(files()) == num_files
    assert store.read_now(blobs.get, "a", "payload") == data
    assert store.read_now(blobs.get, "a", "result") is None
    assert store.write_now(blobs.drop, ["a"]) == 1
    assert store.read_now(blobs.get, "a", "payload") is None
    assert files() == []


def test_parts_are_dropped_by_name(store, files):
    store.write_now(blobs.put, "a", "payload", LARGE)
    store.write_now(blobs.put, "a", "result", LARGE)
    assert store.write_now(blobs.drop, ["a", "b"], "payload") == 1
    assert store.read_now(blobs.get, "a", "result") == LARGE
    assert len(files()) == 1


def test_files_are_private(store, files, tmp_path):
    store.write_now(blobs.put, "a", "payload", LARGE)
    assert (tmp_path / "data" / "blobs" / files()[0]).stat().st_mode & 0o777 == 0o600


def test_a_rolled_back_job_leaves_no_file_and_drops_none(store, files):
    store.write_now(blobs.put, "kept", "payload", LARGE)
    before = files()

    def put_drop_and_fail(c):
        blobs.put(c, "a", "payload", LARGE)
        blobs.drop(c, ["kept"])
        raise ValueError("no")

    with pytest.raises(ValueError):
        store.write_now(put_drop_and_fail)
    assert files() == before
    assert store.read_now(blobs.get, "kept", "payload") == LARGE


async def test_in_a_group_only_the_failing_job_loses_its_file(store, files):
    is_open, go_on = threading.Event(), threading.Event()

    def hold(c):
        is_open.set()
        go_on.wait(10)

    def put_and_fail(c):
        blobs.put(c, "bad", "payload", LARGE)
        raise ValueError("no")

    first = asyncio.create_task(store.write(hold))
    await asyncio.to_thread(is_open.wait, 10)
    work = [store.write(blobs.put, "a", "payload", LARGE), store.write(put_and_fail)]
    work += [store.write(blobs.put, "b", "payload", LARGE)]
    tasks = [asyncio.create_task(job) for job in work]
    await asyncio.sleep(0)
    go_on.set()
    outcomes = await asyncio.gather(first, *tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), type(None), ValueError, type(None)]
    assert await store.read(owners) == {"a", "b"}
    assert set(files()) == await store.read(known_names)


def tear(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [tear, flip, os.unlink], ids=["torn", "flipped", "lost"])
def test_a_damaged_file_is_an_error_that_names_its_owner(store, files, tmp_path, harm):
    store.write_now(blobs.put, "request-1", "payload", LARGE)
    store.write_now(blobs.put, "request-2", "payload", LARGE)
    path = (
        tmp_path
        / "data"
        / "blobs"
        / store.read_now(lambda c: c.execute(select(table.c.file).where(table.c.owner == "request-1")).scalar_one())
    )
    harm(path)
    with pytest.raises(CheckpointError, match=r"the stored bytes of 'request-1' are (damaged|lost)"):
        store.read_now(blobs.get, "request-1", "payload")
    assert store.read_now(blobs.get, "request-2", "payload") == LARGE


def test_a_file_dropped_while_it_is_read_is_simply_gone(store, monkeypatch):
    """Between the reader's look at the row and at the file, the writer drops both."""
    store.write_now(blobs.put, "a", "payload", LARGE)
    read = blobs.BlobFiles.read

    def drop_first(self, name, owner):
        monkeypatch.setattr(blobs.BlobFiles, "read", read)
        store.write_now(blobs.drop, ["a"])
        return read(self, name, owner)

    monkeypatch.setattr(blobs.BlobFiles, "read", drop_first)
    assert store.read_now(blobs.get, "a", "payload") is None


def test_the_sweep_at_start_keeps_what_rows_name(store, files, tmp_path):
    store.write_now(blobs.put, "a", "payload", LARGE)
    kept = files()
    directory = DataDirectory(tmp_path / "data")
    (directory.blobs / f"{'0' * 32}-5-00000000").write_bytes(b"orphan")
    (directory.blobs / f"{'1' * 32}-5-00000000.tmp-aaaa").write_bytes(b"half")
    assert len(directory.sweep_orphans(store.read_now(known_names))) == 2
    assert files() == kept


def test_power_durability_syncs_file_and_directory(tmp_path, monkeypatch):
    synced = []
    sync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: (synced.append(os.readlink(f"/proc/self/fd/{descriptor}")), sync(descriptor))
    )
    for durability, expected in (("process", 0), ("power", 2)):
        store = Store.open(None, tmp_path / durability, durability=durability)
        synced.clear()
        store.write_now(blobs.put, "a", "payload", LARGE)
        assert len([name for name in synced if "/blobs" in name]) == expected
        store.close()


# ── disks that fail ───────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def mounted(target, *options):
    target.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, str(target)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"mounting needs root: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(target)], check=True)


@pytest.fixture
def small_disk(tmp_path):
    with mounted(tmp_path / "data", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs"):
        yield tmp_path / "data"


def add_user(c, name):
    c.execute(users.insert().values(user_id=name, name=name, email="", created_at=utc_now()))


def test_a_blob_that_does_not_fit_says_so_and_leaves_nothing(small_disk):
    store = Store.open(None, small_disk)
    with pytest.raises(DiskFull, match=rf"the disk is full: {8 << 20} bytes are needed and \d+ bytes are free in '"):
        store.write_now(blobs.put, "a", "payload", bytes(8 << 20))
    assert os.listdir(small_disk / "blobs") == []
    store.write_now(blobs.put, "a", "payload", LARGE)
    assert store.read_now(blobs.get, "a", "payload") == LARGE
    store.close()


async def test_a_full_disk_fails_the_database_cleanly_and_goes_on_when_there_is_room(small_disk):
    store = Store.open(None, small_disk)
    await store.write(add_user, "before")
    ballast = small_disk / "ballast"
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    writes = [store.write(blobs.put, f"{number}", "payload", bytes(100_000)) for number in range(20)]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    failed = [outcome for outcome in outcomes if outcome is not None]
    assert failed
    assert all(isinstance(error, DiskFull) and "bytes are free in" in str(error) for error in failed)
    stored = await store.read(owners)
    assert len(stored) == len(outcomes) - len(failed)
    ballast.unlink()
    await store.write(blobs.put, "after", "payload", bytes(100_000))
    assert await store.read(owners) == stored | {"after"}
    assert (await store.read(lambda c: c.exec_driver_sql("PRAGMA integrity_check").scalar())) == "ok"
    store.close()
    again = Store.open(None, small_disk)
    assert again.read_now(owners) == stored | {"after"}
    again.close()


def test_an_unwritable_directory_is_named(tmp_path):
    DataDirectory(tmp_path / "data")
    store = Store.open(None, tmp_path / "data")
    store.write_now(blobs.put, "a", "payload", LARGE)
    store.close()
    with mounted(tmp_path / "data", "--bind", "-o", "ro", str(tmp_path / "data")):
        with pytest.raises(StorageError, match="cannot be opened: Read-only file system"):
            Store.open(None, tmp_path / "data")
        with pytest.raises(StorageError, match="cannot be opened: Read-only file system"):
            DataDirectory(tmp_path / "data").lock()


def test_a_blob_directory_that_went_away_fails_only_large_payloads(store, tmp_path):
    (tmp_path / "data" / "blobs").rmdir()
    (tmp_path / "data" / "blobs").write_text("a file in the way")
    with pytest.raises(StorageError, match="cannot be written: Not a directory"):
        store.write_now(blobs.put, "a", "payload", LARGE)
    store.write_now(blobs.put, "b", "payload", b"small")
    assert store.read_now(owners) == {"b"}
