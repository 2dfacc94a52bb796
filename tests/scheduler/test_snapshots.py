"""Snapshots torn and damaged between two servers: runs go on from the one before, after a longer replay.

All runs of this module live on one data directory, whose server is killed once.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from lorimer import types
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.store import futures
from lorimer.store.manifests import is_whole
from lorimer.store.runs import NO_SNAPSHOT, Run
from lorimer.store.sessions import Session
from lorimer.store.users import User
from tests.scheduler.runs import STEPS, assert_equal_weights, submit, undisturbed
from tests.scheduler.service import Service

pytestmark = pytest.mark.asyncio(loop_scope="module")

WEIGHTS, STATE, MANIFEST = "adapter_model.safetensors", "training_state.safetensors", "lorimer.json"


@dataclass(frozen=True)
class Restarted:
    service: Service
    user: User
    session: Session
    expected: Path
    """The weights of a run that nobody disturbed; two others have loaded them."""
    runs: dict[str, Run]
    """By what was done to it; as they were before."""


def tear(path: Path) -> None:
    """Leave the first half of a file, as after a power cut."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 0x10
    path.write_bytes(content)


async def train(service: Service, user: User, run: Run, first: int, last: int) -> None:
    for seq_id in range(first, last + 1):
        accepted = await submit(service, user, run, seq_id)
    await service.done(accepted)


async def two_snapshots(service: Service, user: User, session: Session, number: int) -> Run:
    """A run with snapshots after operations 3 and 6, and three operations after them."""
    run = await service.create(user, session, number)
    await train(service, user, run, 1, 3)
    assert (await service.park(user, run)).snapshot_seq == NO_SNAPSHOT
    await train(service, user, run, 4, 6)
    found = await service.park(user, run)
    assert (found.snapshot_seq, found.newest_seq) == (3, 6)
    await train(service, user, run, 7, 9)
    return found


async def damaged_behind(service: Service, user: User, session: Session, number: int) -> Run:
    """The first snapshot is damaged when the second takes its place."""
    run = await service.create(user, session, number)
    await train(service, user, run, 1, 3)
    first = str((await service.park(user, run)).newest_name)
    flip(service.directory.snapshots / first / WEIGHTS)
    await train(service, user, run, 4, 9)
    found = await service.park(user, run)
    assert (found.snapshot_seq, found.snapshot_name, found.newest_seq) == (NO_SNAPSHOT, None, 9)
    assert not (service.directory.snapshots / first).exists()
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def restarted(tmp_path_factory) -> AsyncIterator[Restarted]:
    path = tmp_path_factory.mktemp("snapshots") / "data"
    s = await Service.open(path)
    user, session = await s.session()
    expected = await undisturbed(s, user, session, 0)
    kinds = ["whole", "torn", "flipped", "torn manifest", "both"]
    runs = {kind: await two_snapshots(s, user, session, number) for number, kind in enumerate(kinds, start=1)}
    runs["none left"] = await damaged_behind(s, user, session, 10)
    weights = await s.weights(await s.run(f"{session.session_id}:train:0"), "end")
    loading = await s.create(user, session, 11, seed=9)
    await train(s, user, loading, 1, 2)
    await s.done(
        await s.scheduler.load_weights(
            user, loading, 3, path="tinker://r:train:0/weights/p", weights=weights, optimizer=True
        )
    )
    runs["loaded"] = await s.run(loading.model_id)
    request = types.LoadWeightsRequest(
        session_id=session.session_id, model_seq_id=12, path="tinker://r:train:0/weights/p", optimizer=True
    )
    made = await s.scheduler.create_from_weights(user, session, request, weights)
    await s.done(made)
    runs["made of weights"] = await s.run(made.model_id)
    await s.die()
    newest = {kind: s.directory.snapshots / str(run.newest_name) for kind, run in runs.items()}
    assert all(is_whole(directory) for directory in newest.values())
    tear(newest["torn"] / STATE)
    flip(newest["flipped"] / WEIGHTS)
    tear(newest["torn manifest"] / MANIFEST)
    for name in ("none left", "loaded", "made of weights"):
        tear(newest[name] / WEIGHTS)
    for directory in (newest["both"], s.directory.snapshots / str(runs["both"].snapshot_name)):
        flip(directory / STATE)
    assert [kind for kind, directory in newest.items() if is_whole(directory)] == ["whole"]
    s = await Service.open(path)
    yield Restarted(s, user, session, expected, runs)
    await s.close()


@pytest.mark.parametrize("kind", ["whole", "torn", "flipped", "torn manifest", "none left"])
async def test_a_damaged_snapshot_makes_the_replay_longer(restarted, kind):
    s, run = restarted.service, restarted.runs[kind]
    begun_at = {"whole": 6, "none left": 0}.get(kind, 3)
    journal = [row.seq_id for row in await s.store.read(futures.journal, run.model_id, begun_at)]
    assert journal[:3] == [begun_at + 1, begun_at + 2, begun_at + 3]  # kept for this case
    await train(s, restarted.user, run, 10, 3 * STEPS)
    assert_equal_weights(await s.save(restarted.user, run, 3 * STEPS + 1, "end"), restarted.expected)
    found = await s.run(run.model_id)
    if kind != "whole":
        assert run.newest_name not in (found.snapshot_name, found.newest_name)
        assert not (s.directory.snapshots / str(run.newest_name)).exists()


async def test_a_full_run_falls_back_from_a_torn_shard(tmp_path):
    """Two take turns in one engine, so each is saved when the other one comes."""
    full, limits = types.FullConfig(train_embed=False, train_unembed=False), SchedulerLimits(max_full_runs=1)
    s = await Service.open(tmp_path / "data", limits)
    user, session = await s.session()
    expected = await undisturbed(s, user, session, 0, full=full)
    runs = [await s.create(user, session, number, full=full) for number in (1, 2)]
    for first in (1, 4, 7):
        for run in runs:
            await train(s, user, run, first, first + 2)
    runs = [await s.run(run.model_id) for run in runs]
    assert [(run.snapshot_seq, run.newest_seq) for run in runs] == [(6, 9), (3, 6)]
    await s.die()
    moments, weights = (s.directory.snapshots / str(run.newest_name) for run in runs)
    tear(moments / "training_state-exp_avg-mlp-00001.safetensors")
    (weights / "training_state-weight-attn-00001.safetensors").unlink()
    s = await Service.open(tmp_path / "data", limits)
    try:
        for run in runs:
            await train(s, user, run, 10, 3 * STEPS)
            assert_equal_weights(await s.save(user, run, 3 * STEPS + 1, "end"), expected)
            assert not (s.directory.snapshots / str(run.newest_name)).exists()
    finally:
        await s.close()


async def test_a_run_without_a_whole_snapshot_ends_with_the_name_of_the_file(restarted):
    s = restarted.service
    outcome = await s.outcome(await submit(s, restarted.user, restarted.runs["both"], 10))
    assert (outcome.state, outcome.category) == ("failed", "user")
    assert STATE in outcome.error and "damaged" in outcome.error
    assert str(s.directory.path) not in outcome.error


async def test_a_load_whose_snapshot_is_torn_is_done_again(restarted):
    s, user = restarted.service, restarted.user
    loaded, made = (restarted.runs[kind] for kind in ("loaded", "made of weights"))
    assert (loaded.newest_seq, made.newest_seq) == (3, 0)
    assert_equal_weights(await s.save(user, loaded, 4, "end"), restarted.expected)
    assert_equal_weights(await s.save(user, made, 1, "end"), restarted.expected)


async def test_a_run_never_has_more_than_two_snapshots(restarted):
    s, user = restarted.service, restarted.user
    run = await s.create(user, restarted.session, 20)
    rows, names = [], []
    for turn in range(4):
        await train(s, user, run, 3 * turn + 1, 3 * turn + 3)
        found = await s.park(user, run)
        kept = await s.store.read(futures.journal, run.model_id, -1)
        rows.append([row.seq_id for row in kept if await s.store.read(futures.payload, row.request_id) is not None])
        names.append(found.newest_name)
        assert (found.newest_seq, found.snapshot_seq) == (3 * turn + 3, 3 * turn if turn else NO_SNAPSHOT)
    assert rows == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    while [name for name in names if (s.directory.snapshots / name).exists()] != names[2:]:
        await asyncio.sleep(0.01)
