"""The periodic sweep: deletes expired results, episodes, checkpoints, samplers, runs and weights, in memory too.

Also deletes what a crashed server left in an object store; what it left in the data directory goes at the next start.
"""

import logging
import secrets
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from lorimer.scheduler import payloads
from lorimer.scheduler.events import Expired
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.store import audit, checkpoints, episodes, futures, leases, runs, samplers, weights
from lorimer.store.retention import ORPHAN_AGE, known_names, sweep_objects
from lorimer.store.runs import Run
from lorimer.store.samplers import SamplingSession
from lorimer.store.weights import Weights
from lorimer.types.paths import checkpoint_path

if TYPE_CHECKING:
    from lorimer.scheduler.owner import Owner

log = logging.getLogger("lorimer.scheduler")

OBJECT_SWEEP_SECONDS = 3600.0


@dataclass(frozen=True)
class _Forgotten:
    samplers: list[SamplingSession]
    weights: list[Weights]
    runs: list[Run]


async def sweep(owner: "Owner") -> None:
    limits, now = owner.limits, datetime.now(UTC)
    while True:
        freed = await owner.store.write(
            futures.expire,
            now=now,
            fetched_before=now - timedelta(seconds=limits.result_seconds_after_fetch),
            finished_before=now - timedelta(seconds=limits.result_seconds),
            rows_before=now - timedelta(seconds=limits.history_seconds),
        )
        if not (freed.results or freed.payloads or freed.rows):
            break
    while await owner.store.write(
        episodes.expire,
        idle_before=now - timedelta(seconds=limits.episode_idle_seconds),
        finished_before=now - timedelta(seconds=limits.episode_seconds),
    ):
        pass
    gone = await owner.store.write(_forget, now, limits)
    for driver in owner.drivers.values():
        driver.post(Expired([run.model_id for run in gone.runs if run.base_model == driver.name]))
    names = [name for run in gone.runs for name in (run.snapshot_name, run.newest_name) if name is not None]
    await owner.scratch.remove("weights", [found.name for found in gone.weights])
    await owner.scratch.remove("snapshots", names)
    num_deleted = len(gone.weights) + len(names)
    if gone.samplers or num_deleted:
        log.info(
            "expired %d samplers and %d runs, deleted %d directories", len(gone.samplers), len(gone.runs), num_deleted
        )
    _forget_memory(owner, gone)


class ObjectSweeper:
    """Deletes orphans of an object store, once an hour, on one of the servers that share it."""

    def __init__(self, orphan_age: timedelta = ORPHAN_AGE) -> None:
        self._orphan_age = orphan_age
        self._holder = secrets.token_hex(16)
        self._next = 0.0

    async def sweep(self, owner: "Owner") -> None:
        scratch, store = owner.scratch, owner.store
        if scratch.is_local or time.monotonic() < self._next or owner.directory.is_held:
            return
        self._next = time.monotonic() + OBJECT_SWEEP_SECONDS
        # The lease outlives the sweep: it also says that this hour's is done.
        if await store.write(leases.take, "object-sweep", self._holder, OBJECT_SWEEP_SECONDS * 0.9):
            removed = await sweep_objects(scratch.objects, lambda: store.read(known_names), self._orphan_age)
            if removed:
                log.info("deleted %d objects that nothing names", len(removed))


def _forget_memory(owner: "Owner", gone: _Forgotten) -> None:
    asked_before = time.monotonic() - owner.limits.result_seconds
    owner.results.finished_samples.forget({sampler.sampling_session_id for sampler in gone.samplers}, asked_before)
    sessions = set()
    for driver in owner.drivers.values():
        sessions |= {run.row.session_id for run in driver.core.runs.values()}
    for loss_id in [loss_id for loss_id in owner.known_losses if loss_id.rpartition(":loss:")[0] not in sessions]:
        del owner.known_losses[loss_id]  # reloaded when a run of the session comes back


def _forget(c: Connection, now: datetime, limits: SchedulerLimits) -> _Forgotten:
    """Delete rows that have expired and return what they referred to.

    Rows are deleted before directories: a directory without a row is deleted at the next start, a row without a
    directory never exists. Samplers and runs with unfinished requests stay, and weights that one of these loads.
    """
    lanes = set(futures.unfinished_lanes(c))
    loads = [payloads.decode_payload(payload) for payload in futures.unfinished_loads(c)]
    read = {load.weights_name for load in loads if isinstance(load, payloads.Load | payloads.CreateModel)}
    for checkpoint in checkpoints.expired(c, now):
        checkpoints.delete(c, checkpoint.checkpoint_key)
        path = checkpoint_path(checkpoint.model_id, checkpoint.kind, checkpoint.name)
        audit.record(
            c, user_id=checkpoint.user_id, event="checkpoint_expired", model_id=checkpoint.model_id, tinker_path=path
        )
    samplers.touch_samplers(c, dict.fromkeys(lanes, now))
    idle_before = now - timedelta(seconds=limits.sampler_idle_seconds)
    old_before = now - timedelta(seconds=limits.ephemeral_seconds)
    old = samplers.idle_ephemeral(c, keep_per_run=0, unused_before=old_before)
    old += samplers.idle_ephemeral(c, keep_per_run=limits.ephemeral_samplers_per_run, unused_before=idle_before)
    idle = {sampler.sampling_session_id: sampler for sampler in old}
    samplers.delete_samplers(c, idle)
    unnamed = [found for found in weights.unreferenced(c, sampler_idle_before=idle_before) if found.name not in read]
    days = limits.run_seconds / 86_400
    expired = runs.expire_runs(
        c,
        unused_before=now - timedelta(seconds=limits.run_seconds),
        reason=f"the run was not used for {days:g} days and has expired; make a new one from a checkpoint",
        except_for=lanes,
    )
    removed = weights.delete_weights(c, [found.weights_id for found in unnamed])
    return _Forgotten(list(idle.values()), removed, expired)
