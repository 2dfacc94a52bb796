"""A scheduler whose directories are objects: nothing depends on local copies, and a store that fails only delays."""

import asyncio
import contextlib
import secrets
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import pytest

from lorimer.errors import CheckpointError, StorageError
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.retention import ObjectSweeper
from lorimer.scheduler.translate import encoded_training
from lorimer.store import checkpoints, leases, weights
from lorimer.store.retention import known_names
from lorimer.types.encoding import decode_sample_response
from tests.scheduler.runs import STEPS, assert_equal_weights, submit
from tests.scheduler.service import Service, training_request
from tests.store.buckets import FaultProxy, moto, open_at, seaweedfs


@pytest.fixture(scope="module", params=["moto", "seaweedfs"])
def server(request, tmp_path_factory):
    run = {"moto": moto, "seaweedfs": seaweedfs}[request.param]
    with run(tmp_path_factory.mktemp(request.param)) as url:
        yield url


@pytest.fixture
def proxy(server):
    proxy = FaultProxy(server)
    yield proxy
    proxy.close()


@pytest.fixture
def prefix() -> str:
    return secrets.token_hex(8)


@contextlib.asynccontextmanager
async def service(path, proxy, prefix, *, scratch=None, **limits) -> AsyncIterator[Service]:
    objects = await open_at(proxy.url, prefix, request_seconds=5.0)
    opened = await Service.open(path, SchedulerLimits(**limits), objects, **scratch or {})
    try:
        yield opened
    finally:
        proxy.inject("", 0)
        await opened.close()


def empty(path) -> None:
    """Lose every local copy; the database stays."""
    for place in ("weights", "snapshots", "blobs"):
        shutil.rmtree(path / place)


async def stored(s: Service) -> set[str]:
    places = ("weights/", "snapshots/", "blobs/")
    objects = s.scheduler.scratch.objects
    return {name.partition("/")[2] for place in places async for name in objects.names(place, timedelta(0))}


async def until(condition, what: str, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)


async def checkpoint_of(s: Service, run, name: str):
    checkpoint = await s.store.read(checkpoints.find, run.model_id, "training", name)
    return await s.store.read(weights.get_weights, checkpoint.weights_id)


async def test_a_killed_server_goes_on_without_any_local_copy(tmp_path, proxy, prefix):
    """Training, saving, loading and sampling: every directory is fetched again, and weights are equal."""
    path = tmp_path / "data"
    async with service(path, proxy, prefix, snapshot_seconds=0.0) as s:
        user, session = await s.session()
        runs = [await s.create(user, session, number) for number in range(2)]
        for run in runs:
            for seq_id in range(1, 3 * STEPS + 1):
                await s.done(await submit(s, user, run, seq_id))
        first = await s.save(user, runs[0], 3 * STEPS + 1, "first")
        assert_equal_weights(first, await s.save(user, runs[1], 3 * STEPS + 1, "first"))
        await s.done(await s.scheduler.save_ephemeral(user, runs[0], 3 * STEPS + 2, 7))
        sampler = await s.sampler(session, 7)
        drawn = tokens_of(await s.done(await s.sample(user, sampler, 1, seed=3, max_tokens=8)))
        await submit(s, user, runs[1], 3 * STEPS + 2)  # in flight when the server is killed
        await s.die()
        empty(path)
        objects = s.scheduler.scratch.objects
        s2 = await Service.open(path, SchedulerLimits(snapshot_seconds=0.0), objects)
        s.store, s.scheduler, s.directory = s2.store, s2.scheduler, s2.directory
        for number in (3 * STEPS + 3, 3 * STEPS + 4):
            await s.done(await submit(s, user, runs[0], number))
            await s.done(await submit(s, user, runs[1], number))
        assert tokens_of(await s.done(await s.sample(user, sampler, 2, seed=3, max_tokens=8))) == drawn
        saved = await checkpoint_of(s, runs[0], "first")
        await s.done(await load(s, user, runs[1], 3 * STEPS + 5, saved))
        again = await s.save(user, runs[1], 3 * STEPS + 6, "again")
        assert_equal_weights(again, s.directory.weights / saved.name)
        await until(lambda: _is_swept(s), "only objects that rows name")


async def _is_swept(s: Service) -> bool:
    return await stored(s) == await s.store.read(known_names)


async def load(s: Service, user, run, seq_id: int, saved):
    path = f"tinker://{run.model_id}/weights/first"
    return await s.scheduler.load_weights(user, run, seq_id, path=path, weights=saved, optimizer=True)


def tokens_of(result: bytes) -> list[int]:
    return decode_sample_response(result, ["s"]).sequences[0].tokens


async def test_a_damaged_snapshot_falls_back_and_a_damaged_checkpoint_is_named(tmp_path, proxy, prefix):
    path = tmp_path / "data"
    async with service(path, proxy, prefix) as s:
        user, session = await s.session()
        run = await s.create(user, session)
        for seq_id in range(1, 3):
            await s.done(await submit(s, user, run, seq_id))
        saved = await s.save(user, run, 3, "first")
        row = await s.park(user, run)
        await s.done(await submit(s, user, run, 4))
        row = await s.park(user, run)
        assert row.newest_name is not None and row.snapshot_name != row.newest_name
        objects = s.scheduler.scratch.objects
        for name in (f"snapshots/{row.newest_name}", f"weights/{saved.name}"):
            file = f"{name}/adapter_model.safetensors"
            data = await objects.get(file)
            await objects.put(file, data[:-1] + bytes([data[-1] ^ 1]), replace=True)
        await s.die()
        empty(path)
        s2 = await Service.open(path, SchedulerLimits(), objects)
        s.store, s.scheduler, s.directory = s2.store, s2.scheduler, s2.directory
        await s.done(await submit(s, user, run, 5))  # restored from the snapshot before
        assert (await s.run(run.model_id)).newest_name != row.newest_name
        found = await checkpoint_of(s, run, "first")
        with pytest.raises(CheckpointError, match=rf"'weights/{saved.name}/adapter_model.safetensors' is damaged"):
            await load(s, user, run, 6, found)
        await s.done(await submit(s, user, run, 6))


@pytest.mark.parametrize("server", ["moto"], indirect=True)
@pytest.mark.parametrize("fault", ["gone", "503"])
async def test_while_the_store_is_gone_passes_go_on_and_saves_wait(tmp_path, proxy, prefix, fault):
    async with service(tmp_path / "data", proxy, prefix) as s:
        user, session = await s.session()
        run = await s.create(user, session)
        await s.done(await submit(s, user, run, 1))
        proxy.inject(fault)
        save = await s.scheduler.save_weights(user, run, 2, kind="training", name="waits")
        for seq_id in range(3, 6):
            await s.done(await submit(s, user, run, seq_id))
        assert (await s.outcome(save, 0.1)).state == "pending"
        small = training_request(run, 6, tokens=200)
        large = encoded_training(replace(small, data=small.data * 100))
        with pytest.raises(StorageError, match="the object store"):
            await s.scheduler.train(user, run, large)
        proxy.inject("", 0)
        await s.done(save)
        assert await s.scheduler.scratch.objects.has_all(f"weights/{(await s.saved(run, 'waits')).name}")
        await s.done(await s.scheduler.train(user, run, large))


@pytest.mark.parametrize("server", ["moto"], indirect=True)
async def test_a_run_leaves_and_comes_back_although_the_store_is_gone_meanwhile(tmp_path, proxy, prefix):
    """Its snapshots are verified, uploaded and fetched when the store is back."""
    async with service(tmp_path / "data", proxy, prefix) as s:
        user, session = await s.session()
        run = await s.create(user, session)
        for seq_id in range(1, 4):
            await s.done(await submit(s, user, run, seq_id))
            if seq_id < 3:
                before = await s.park(user, run)
        proxy.inject("gone")
        await s.scheduler.unload(user, run)
        await asyncio.sleep(3.0)
        assert (await s.run(run.model_id)).newest_name == before.newest_name
        accepted = await submit(s, user, run, 4)
        proxy.inject("", 0)
        await s.done(accepted)
        after = await s.park(user, run)
        shutil.rmtree(s.directory.snapshots, ignore_errors=True)  # obsolete ones are being deleted
        s.directory.snapshots.mkdir(mode=0o700, exist_ok=True)
        s.scheduler.scratch._entries.clear()
        await s.done(await submit(s, user, run, 5))
        assert (await s.run(run.model_id)).newest_name == after.newest_name


@pytest.mark.parametrize("server", ["moto"], indirect=True)
async def test_large_payloads_survive_a_kill(tmp_path, proxy, prefix):
    path = tmp_path / "data"
    async with service(path, proxy, prefix, max_open_bytes=1 << 30) as s:
        user, session = await s.session()
        run = await s.create(user, session)
        small = training_request(run, 1, tokens=200)
        request = replace(small, data=small.data * 100)
        proxy.seen.clear()
        accepted = [await s.scheduler.train(user, run, encoded_training(request)) for _ in range(2)]
        assert accepted[0] == accepted[1]
        assert sum(one.startswith("PUT") and "/blobs/" in one for one in proxy.seen) == 2
        await s.die()
        s2 = await Service.open(path, SchedulerLimits(), s.scheduler.scratch.objects)
        s.store, s.scheduler, s.directory = s2.store, s2.scheduler, s2.directory
        await s.done(accepted[0])
        await until(lambda: _is_swept(s), "the second copy deleted")


@pytest.mark.parametrize("server", ["moto"], indirect=True)
async def test_a_small_scratch_is_enough(tmp_path, proxy, prefix):
    limits = {"max_loaded_runs": 1, "max_loaded_samplers": 1, "residence_seconds": 0.0}
    small = {"max_bytes": 1, "min_idle_seconds": 0.0}
    async with service(tmp_path / "data", proxy, prefix, scratch=small, **limits) as s:
        user, session = await s.session()
        runs = [await s.create(user, session, number) for number in range(3)]
        for seq_id in range(1, 5):
            for run in runs:
                await s.done(await submit(s, user, run, seq_id))
        saved = [await s.save(user, run, 5, "end") for run in runs]
        names = [path.name for path in saved]
        for name in names[1:]:
            await s.scheduler.scratch.bring("weights", names[0])
            await s.scheduler.scratch.bring("weights", name)
            assert_equal_weights(await fetched(s, tmp_path, names[0]), await fetched(s, tmp_path, name))
        assert len(list(s.directory.weights.iterdir())) <= 2
        scratch = s.scheduler.scratch
        await scratch.objects.put_file(f"archives/{names[0]}/1.tar", saved[2] / "lorimer.json")
        await scratch.remove("weights", names[:1])
        while [name async for name in scratch.objects.names("archives/", timedelta(0))]:
            await asyncio.sleep(0.01)  # the archives of weights are deleted with them, in the background


async def fetched(s: Service, tmp_path, name: str):
    into = tmp_path / secrets.token_hex(4)
    await s.scheduler.scratch.objects.fetch(f"weights/{name}", into)
    return into


@pytest.mark.parametrize("server", ["moto"], indirect=True)
async def test_one_of_two_servers_sweeps(tmp_path, proxy, prefix):
    async with service(tmp_path / "data", proxy, prefix) as s:
        objects = s.scheduler.scratch.objects
        first, second = (ObjectSweeper(orphan_age=timedelta(0)) for _ in range(2))
        await objects.put("blobs/orphan", b"1")
        await first.sweep(s.scheduler)
        assert await stored(s) == set()
        await objects.put("blobs/orphan", b"1")
        await second.sweep(s.scheduler)
        assert await stored(s) == {"orphan"}  # the first has this hour's lease
        await s.store.write(leases.take, "object-sweep", first._holder, 0.0)
        await s.scheduler.sweep()
        assert await stored(s) == {"orphan"}  # which is too young
