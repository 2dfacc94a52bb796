"""Hands unfinished requests to the cores: those of an earlier server, and those that another process accepted."""

import asyncio
import logging
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from pydantic import ValidationError
from sqlalchemy import Connection

from lorimer import types
from lorimer.errors import CheckpointError
from lorimer.scheduler import journal, payloads
from lorimer.scheduler.events import Arrived
from lorimer.scheduler.placement import is_full, is_plain, is_sampler
from lorimer.scheduler.runs import TRAINING, Operation, operation_of
from lorimer.scheduler.samples import Sample
from lorimer.store import custom_loss, futures, moves, retention, runs, samplers
from lorimer.store.futures import FutureRow
from lorimer.store.runs import Run
from lorimer.store.samplers import SamplingSession
from lorimer.store.weights import get_weights
from lorimer.types.encoding import read_loss

if TYPE_CHECKING:
    from lorimer.scheduler.driver import Driver
    from lorimer.scheduler.owner import Owner

log = logging.getLogger("lorimer.scheduler")

BATCH_SIZE = 500
"""Requests read per transaction, so that ten thousand are recovered within seconds."""
LAZY = ("forward", "forward_backward", "optim_step")
"""Kinds whose payload, after a restart, is read only when an engine loads their run."""


@dataclass(frozen=True)
class _Found:
    """The runs, sampling sessions and payloads of a batch of requests."""

    runs: dict[str, Run]
    samplers: dict[str, SamplingSession]
    payloads: dict[str, bytes]
    damaged: dict[str, CheckpointError]
    """By request_id: why its payload cannot be read."""
    losses: list[bytes]
    """Payloads of the custom losses that training operations among them use."""


async def take_up(
    owner: "Owner", driver: "Driver", request_ids: Collection[str] = (), *, reads_all: bool = False
) -> int:
    """Hand the unfinished requests of a replica, or of these only ``request_ids``, to its core. Return their number.

    With ``reads_all`` the payloads of training operations are read too; a core that restores the run needs none.
    """
    known = set(driver.core.open)  # before reading: a request may end meanwhile
    rows = await owner.store.read(futures.unfinished, driver.place, request_ids)
    rows = [row for row in rows if row.request_id not in known]
    for start in range(0, len(rows), BATCH_SIZE):
        batch = rows[start : start + BATCH_SIZE]
        found = await owner.store.read(_find, batch, () if reads_all else LAZY)
        for graph in found.losses:
            driver.learn_loss(graph)
        for row in batch:
            await _take_up(owner, driver, row, found)
    return len(rows)


def _find(c: Connection, rows: Sequence[FutureRow], without_payload: Collection[str]) -> _Found:
    run_ids = {run_id(row) for row in rows if row.kind != "sample"}
    sampler_ids = {row.lane for row in rows if row.kind == "sample"}
    found_runs = [runs.get_run(c, model_id) for model_id in run_ids]
    found_samplers = [samplers.get_sampler(c, sampler_id) for sampler_id in sampler_ids]
    readable: dict[str, bytes] = {}
    damaged: dict[str, CheckpointError] = {}
    with_losses: set[str] = set()
    for row in rows:
        if row.kind not in without_payload:
            try:
                readable |= journal.payloads(c, [row.request_id])
            except CheckpointError as error:
                damaged[row.request_id] = error
            if row.kind in TRAINING and row.session_id and uses_custom_loss(readable.get(row.request_id, b"")):
                with_losses.add(row.session_id)
    losses = [loss.payload for session_id in with_losses for loss in custom_loss.losses_of_session(c, session_id)]
    return _Found(
        {run.model_id: run for run in found_runs if run is not None},
        {sampler.sampling_session_id: sampler for sampler in found_samplers if sampler is not None},
        readable,
        damaged,
        losses,
    )


def uses_custom_loss(payload: bytes) -> bool:
    return bool(payload) and read_loss(payload)[0] == "custom"


def _is_creation(row: FutureRow) -> bool:
    return row.lane.endswith(":models")


def run_id(row: FutureRow) -> str:
    """Return the run that a request belongs to, or creates."""
    return f"{row.session_id}:train:{row.seq_id}" if _is_creation(row) else row.lane


async def _take_up(owner: "Owner", driver: "Driver", row: FutureRow, found: _Found) -> None:
    """Hand an unfinished request to its core. Operations of a run wait there until an engine loads the run."""
    payload = found.payloads.get(row.request_id, b"")
    operation = operation_of(row, driver.name, payload=payload)
    try:
        if row.request_id in found.damaged:
            raise found.damaged[row.request_id]
        operation = _sample(operation, found) if row.kind == "sample" else _of_run(operation, row, found)
        if operation.reads is not None and not _is_creation(row):
            owner.results.open[row.request_id] = operation  # so that the weights stay when they are here
            await owner.scratch.bring_patiently("weights", operation.reads)
    except (LookupError, ValueError, CheckpointError, msgspec.MsgspecError, ValidationError) as error:
        reason = f"it cannot be taken up after a restart of the server: {type(error).__name__}: {error}"
        outcome = await owner.store.submit(journal.Fail(operation, reason, "server").apply)
        owner.results.resolve(operation, outcome)
        return
    owner.results.open[row.request_id] = operation
    driver.post(Arrived(operation, found.runs.get(run_id(row)), _is_creation(row)))


def _of_run(operation: Operation, row: FutureRow, found: _Found) -> Operation:
    if operation.kind == "create_custom_loss":
        return operation
    if run_id(row) not in found.runs:
        raise LookupError(f"there is no run {run_id(row)!r} any more")
    if row.kind == "load_weights" or _is_creation(row):
        payload = payloads.decode_payload(operation.payload)
        assert isinstance(payload, payloads.Load | payloads.CreateModel)
        operation.reads = payload.weights_name
    return operation


def _sample(operation: Operation, found: _Found) -> Sample:
    sampler = found.samplers.get(operation.lane)
    if sampler is None:
        raise LookupError(f"there is no sampling session {operation.lane!r} any more")
    payload = payloads.decode_payload(operation.payload)
    assert isinstance(payload, payloads.Sample)
    return Sample(
        request_id=operation.request_id,
        user_id=operation.user_id,
        session_id=operation.session_id,
        base_model=sampler.base_model,
        lane=operation.lane,
        seq_id=operation.seq_id,
        kind=operation.kind,
        tokens=operation.tokens,
        request=types.SampleRequest.model_validate_json(payload.request),
        weights_id=sampler.weights_id,
        model_id=sampler.model_id,
        place=operation.place,
        deaths=operation.deaths,
    )


# ── replicas that are gone ────────────────────────────────────────────────────────────────────────────


def place_lost(c: Connection, live: Mapping[str, Sequence[str]], seed: int) -> dict[str, list[str]]:
    """Assign the queued requests of replicas that are gone to ``live`` ones, which are given by base model.

    A run and its requests stay together. Sampler replicas get nothing here: engines can compute everything. Return the
    moved request_ids by replica. Requests of a base model without a live engine stay where they are.
    """
    chance = random.Random(seed)
    known = {place for places in live.values() for place in places}
    live = {name: engines for name, places in live.items() if (engines := [p for p in places if not is_sampler(p)])}
    plain = {name: engines for name, places in live.items() if (engines := [p for p in places if is_plain(p)])}
    rows = [row for row in futures.unfinished(c) if row.place not in known]
    targets: dict[str, str | None] = {}
    moved: dict[str, list[str]] = {}
    for row in rows:
        unit = row.request_id if row.kind in ("sample", "create_custom_loss") else run_id(row)
        if unit not in targets:
            targets[unit] = _choose(c, row, live, plain, chance)
        if (place := targets[unit]) is not None:
            moved.setdefault(place, []).append(row.request_id)
    for unit, assigned in targets.items():  # first, because the rows still name the replica that is gone
        if assigned is not None:
            moves.place(c, unit, assigned)
    for place, request_ids in moved.items():
        futures.move(c, request_ids, place)
    runs.release_lost(c, known, set(plain))
    return moved


def _choose(
    c: Connection,
    row: FutureRow,
    live: Mapping[str, Sequence[str]],
    plain: Mapping[str, Sequence[str]],
    chance: random.Random,
) -> str | None:
    if row.kind == "create_custom_loss":
        return chance.choice(next(iter(plain.values()))) if plain else None
    found = samplers.get_sampler(c, row.lane) if row.kind == "sample" else runs.get_run(c, run_id(row))
    if found is None:
        places = [place for some in plain.values() for place in some]
    elif _is_full(c, found):
        places = [place for place in live.get(found.base_model, ()) if is_full(place)]
    else:
        places = list(plain.get(found.base_model, ()))
    if isinstance(found, Run) and found.replica in places:
        return found.replica
    return chance.choice(places) if places else None


def _is_full(c: Connection, found: Run | SamplingSession) -> bool:
    """Return whether this is a full run, or samples the weights of one."""
    if isinstance(found, Run):
        return found.method == "full"
    sampled = get_weights(c, found.weights_id) if found.weights_id is not None else None
    return sampled is not None and sampled.method == "full"


async def place_all(owner: "Owner") -> int:
    """Assign every queued request to a replica of this server, the only one. Return the number of moved requests."""
    live: dict[str, list[str]] = {}
    for driver in owner.drivers.values():
        live.setdefault(driver.name, []).append(driver.place)
    moved = await owner.store.write(place_lost, live, random.getrandbits(64))
    return sum(len(request_ids) for request_ids in moved.values())


async def keep_unserved(owner: "Owner") -> None:
    """Keep the requests of base models that this server does not serve pending, for their clients."""
    rows = await owner.store.read(futures.unfinished)
    rows = [row for row in rows if row.place not in owner.drivers]
    for start in range(0, len(rows), BATCH_SIZE):
        batch = rows[start : start + BATCH_SIZE]
        found = await owner.store.read(_find, batch, {row.kind for row in batch})
        for row in batch:
            named = found.samplers.get(row.lane) or found.runs.get(run_id(row))
            owner.results.open[row.request_id] = operation_of(row, named.base_model if named is not None else "")


async def delete_orphans(owner: "Owner") -> int:
    """Delete the files that an earlier server left unfinished; called before any request is accepted."""
    known = await owner.store.read(retention.known_names)
    return len(await asyncio.to_thread(owner.directory.sweep_orphans, known))
