"""Local copies of an object store: fetched once, verified, evicted when they are too many, and never while in use."""

import asyncio
import os
import shutil

import pytest

from lorimer.errors import CheckpointError, StorageError
from lorimer.store import DataDirectory, Store, leases
from lorimer.store.manifests import is_whole
from lorimer.store.objects import DirectoryObjects, open_objects
from lorimer.store.scratch import Scratch
from tests.store.test_objects import write_directory

SIZE = 1000


@pytest.fixture
async def scratch(tmp_path):
    directory = DataDirectory(tmp_path / "data")
    objects = await open_objects(f"file://{tmp_path}/shared", directory)
    return Scratch(objects, directory, max_bytes=3 * SIZE, min_idle_seconds=0.0)


async def save(scratch, name, kind="weights"):
    write_directory(scratch.path(kind, name), {"a.bin": os.urandom(SIZE)})
    await scratch.publish(kind, name)


def local(scratch):
    return sorted(path.name for path in scratch.directory.weights.iterdir())


async def test_the_least_recently_used_are_evicted_and_come_back(scratch):
    for name in "abc":
        await save(scratch, name)
    await scratch.bring("weights", "a")
    await save(scratch, "d")
    assert local(scratch) == ["a", "c", "d"]
    await scratch.bring("weights", "b")
    assert local(scratch) == ["a", "b", "d"]
    assert is_whole(scratch.path("weights", "b"))


async def test_what_is_read_pinned_recent_or_not_uploaded_stays(scratch):
    for name in "abc":
        await save(scratch, name)
    write_directory(scratch.path("weights", "not-uploaded"), {"a.bin": bytes(10 * SIZE)})
    scratch.reads = lambda: {"a"}
    with scratch.pinned("weights", "b"):
        await save(scratch, "d")
        assert local(scratch) == ["a", "b", "d", "not-uploaded"]
        scratch._min_idle_seconds = 60.0
        await save(scratch, "e")
    assert local(scratch) == ["a", "b", "d", "e", "not-uploaded"]


async def test_an_earlier_servers_copies_are_verified_before_use(scratch, tmp_path):
    for name in "abc":
        await save(scratch, name)
    (scratch.path("weights", "a") / "a.bin").write_bytes(bytes(SIZE))
    again = Scratch(scratch.objects, scratch.directory, max_bytes=3 * SIZE, min_idle_seconds=0.0)
    again.adopt()
    for name in "abc":
        await again.bring("weights", name)
        assert is_whole(again.path("weights", name))
    shutil.rmtree(again.directory.weights)
    again.directory.weights.mkdir()
    await Scratch(scratch.objects, scratch.directory).bring("weights", "a")
    assert local(scratch) == ["a"]


async def test_concurrent_users_fetch_once(scratch):
    await save(scratch, "a")
    shutil.rmtree(scratch.path("weights", "a"))
    again = Scratch(scratch.objects, scratch.directory)
    await asyncio.gather(*(again.bring("weights", "a") for _ in range(10)))
    assert local(scratch) == ["a"]
    with pytest.raises(CheckpointError, match=r"'weights/b/lorimer\.json' is missing"):
        await asyncio.gather(*(again.bring("weights", "b") for _ in range(3)))


async def test_removal_deletes_copy_and_object(scratch):
    await save(scratch, "a")
    (scratch.directory.weights / "a.tmp-1234").mkdir()
    await scratch.remove("weights", ["a"])
    scratch.remover.close()
    assert local(scratch) == []
    assert not await scratch.objects.has_all("weights/a")


async def test_patience_ends_when_it_is_given_up(scratch, monkeypatch):
    objects = scratch.objects
    shutil.rmtree(objects.url.removeprefix("file://"))
    (scratch.directory.path.parent / "shared").write_text("not a directory")
    with pytest.raises((StorageError, CheckpointError)):
        await scratch.bring_patiently("weights", "a", lambda: True)


async def test_in_the_data_directory_nothing_is_copied(tmp_path):
    directory = DataDirectory(tmp_path / "data")
    scratch = Scratch(DirectoryObjects(directory), directory, max_bytes=0, min_idle_seconds=0.0)
    await save(scratch, "a")
    await scratch.bring("weights", "a")
    await scratch.bring("weights", "not there")  # the engine says so
    assert local(scratch) == ["a"]
    await scratch.remove("weights", ["a"])
    assert local(scratch) == []


def test_a_lease_has_one_holder_by_the_clock_of_the_database(store: Store):
    assert store.write_now(leases.take, "sweep", "one", 100.0)
    assert store.write_now(leases.take, "sweep", "one", 0.0)
    assert store.write_now(leases.take, "sweep", "two", 100.0)
    assert not store.write_now(leases.take, "sweep", "one", 100.0)
    assert store.write_now(leases.take, "another", "one", 100.0)
