"""Large blobs in an object store: put before and deleted after the transaction, and no thread of the database waits."""

import asyncio
import os
import secrets
import time

import pytest

from lorimer.errors import CheckpointError, StorageError
from lorimer.store import DataDirectory, Store, blobs, futures
from lorimer.store.retention import known_names
from lorimer.store.scratch import Scratch
from lorimer.store.users import ensure_user
from tests.store.buckets import FaultProxy, moto, open_at

LARGE = os.urandom(blobs.INLINE_BYTES + 1)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with moto(tmp_path_factory.mktemp("moto")) as url:
        yield url


@pytest.fixture
def proxy(server):
    proxy = FaultProxy(server)
    yield proxy
    proxy.close()


@pytest.fixture
async def scratch(proxy, tmp_path):
    return Scratch(await open_at(proxy.url, secrets.token_hex(8)), DataDirectory(tmp_path / "data"))


@pytest.fixture
def remote(scratch, database):
    store = Store.open(database, scratch.directory, retry_seconds=5, scratch=scratch)
    yield store
    store.close()
    scratch.remover.close()


async def stored(scratch) -> set[str]:
    from datetime import timedelta

    return {name.partition("/")[2] async for name in scratch.objects.names("blobs/", timedelta(0))}


async def eventually_stored(scratch, expected: set[str]) -> None:
    deadline = time.monotonic() + 10
    while (found := await stored(scratch)) != expected:
        assert time.monotonic() < deadline, (found, expected)
        await asyncio.sleep(0.05)


async def test_bytes_come_back_and_are_deleted(remote, scratch, tmp_path):
    await remote.write(blobs.put, "a", "payload", LARGE)
    await remote.write(blobs.put, "a", "result", b"small")
    assert await remote.read(blobs.get, "a", "payload") == LARGE
    assert await remote.read(blobs.get, "a", "result") == b"small"
    assert await stored(scratch) == await remote.read(known_names)
    assert len(await stored(scratch)) == 1
    assert os.listdir(tmp_path / "data" / "blobs") == []
    assert await remote.write(blobs.drop, ["a"]) == 2
    assert await remote.read(blobs.get, "a", "payload") is None
    await eventually_stored(scratch, set())


async def test_bytes_that_are_announced_need_one_run(remote):
    runs = []

    def put(c):
        runs.append(1)
        blobs.put(c, "a", "payload", LARGE)

    await remote.submit(put, LARGE)
    assert len(runs) == 1
    await remote.write(blobs.drop, ["a"])
    await remote.submit(put)
    assert len(runs) == 3


async def test_objects_of_a_failed_or_repeated_job_are_deleted(remote, scratch):
    def put_and_fail(c):
        blobs.put(c, "a", "payload", LARGE)
        raise ValueError("no")

    with pytest.raises(ValueError):
        await remote.submit(put_and_fail, LARGE)
    await eventually_stored(scratch, set())
    user = await remote.write(ensure_user, "ada")
    accept = {"user_id": user.user_id, "session_id": None, "kind": "k", "lane": "l", "seq_id": 1, "payload": LARGE}
    for is_first in (True, False):
        row, is_new = await remote.submit(lambda c: futures.accept(c, **accept), LARGE)
        assert is_new == is_first
    await eventually_stored(scratch, await remote.read(known_names))
    assert await remote.read(futures.payload, row.request_id) == LARGE


async def test_many_blobs_are_fetched_together(remote, proxy):
    for number in range(20):
        await remote.write(blobs.put, f"{number}", "payload", LARGE)
    proxy.delay_seconds = 0.1
    proxy.inject("slow")

    def read(c):
        blobs.expect(c, [f"{number}" for number in range(20)], "payload")
        return [blobs.get(c, f"{number}", "payload") for number in range(20)]

    assert await remote.read(read) == [LARGE] * 20


async def test_a_slow_store_does_not_hold_other_transactions(remote, proxy):
    await remote.write(blobs.put, "read", "payload", LARGE)
    proxy.delay_seconds = 2.0
    proxy.inject("slow")
    slow = [remote.submit(lambda c: blobs.put(c, "a", "payload", LARGE), LARGE)]
    slow += [remote.submit_read(lambda c: blobs.get(c, "read", "payload")) for _ in range(4)]
    await asyncio.sleep(0.2)
    began = time.monotonic()
    for number in range(20):
        await remote.write(blobs.put, f"small-{number}", "payload", b"small")
        await remote.read(blobs.get, f"small-{number}", "payload")
    assert time.monotonic() - began < 1.5
    assert not any(one.done() for one in slow)
    assert (await asyncio.gather(*slow))[1:] == [LARGE] * 4


async def test_a_store_that_is_gone_fails_large_writes_only(remote, proxy):
    await remote.write(blobs.put, "before", "payload", LARGE)
    proxy.inject("gone")
    await remote.write(blobs.put, "small", "payload", b"small")
    with pytest.raises(StorageError, match="the object store"):
        await remote.write(blobs.put, "a", "payload", LARGE)
    with pytest.raises(StorageError, match="the object store"):
        await remote.read(blobs.get, "before", "payload")
    proxy.inject("", 0)
    assert await remote.read(blobs.get, "before", "payload") == LARGE
    await remote.write(blobs.put, "a", "payload", LARGE)


@pytest.mark.parametrize("harm", ["flipped", "lost"])
async def test_a_damaged_object_names_its_owner(remote, scratch, harm):
    await remote.write(blobs.put, "request-1", "payload", LARGE)
    (name,) = await remote.read(known_names)
    if harm == "lost":
        await scratch.objects.delete([f"blobs/{name}"])
    else:
        await scratch.objects.put(f"blobs/{name}", b"x" + LARGE[1:], replace=True)
    with pytest.raises(CheckpointError, match=r"the stored bytes of 'request-1' are (damaged|lost)"):
        await remote.read(blobs.get, "request-1", "payload")


async def test_a_backup_defers_deletion(remote, scratch):
    await remote.write(blobs.put, "a", "payload", LARGE)
    names = await stored(scratch)
    scratch.directory.hold_files()
    await remote.write(blobs.drop, ["a"])
    await asyncio.sleep(0.7)
    assert await stored(scratch) == names
    scratch.directory.release_files()
    await eventually_stored(scratch, set())
