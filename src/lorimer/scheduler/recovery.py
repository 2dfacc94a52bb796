"""Recovers from an earlier server: deletes its unfinished files and hands its unfinished requests to the cores."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from pydantic import ValidationError
from sqlalchemy import Connection

from lorimer import types
from lorimer.errors import CheckpointError
from lorimer.scheduler import journal, payloads
from lorimer.scheduler.events import Recovered
from lorimer.scheduler.runs import Operation, operation_of
from lorimer.scheduler.samples import Sample
from lorimer.store import futures, retention, runs, samplers
from lorimer.store.futures import FutureRow
from lorimer.store.runs import Run
from lorimer.store.samplers import SamplingSession

if TYPE_CHECKING:
    from lorimer.scheduler.scheduler import Scheduler

log = logging.getLogger("lorimer.scheduler")

BATCH_SIZE = 500
"""Requests read per transaction, so that ten thousand are recovered within seconds."""
WITHOUT_PAYLOAD = ("forward", "forward_backward", "optim_step")
"""Kinds whose payload is read only when an engine loads their run."""


@dataclass(frozen=True)
class _Found:
    """The runs, sampling sessions and payloads of a batch of requests."""

    runs: dict[str, Run]
    samplers: dict[str, SamplingSession]
    payloads: dict[str, bytes]
    damaged: dict[str, CheckpointError]
    """By request_id: why its payload cannot be read."""


async def recover(scheduler: "Scheduler") -> None:
    """Recover; called once, before any request is accepted."""
    known = await scheduler.store.read(retention.known_names)
    removed = await asyncio.to_thread(scheduler.directory.sweep_orphans, known)
    scheduler.scratch.adopt()
    num_rows = await take_up(scheduler, scheduler.models)
    if num_rows or removed:
        log.info("recovered %d unfinished requests; deleted %d unfinished files", num_rows, len(removed))


async def take_up(scheduler: "Scheduler", models: Collection[str]) -> int:
    """Hand the unfinished requests of these base models to their new cores. Return their number."""
    rows = await scheduler.store.read(futures.unfinished)
    for start in range(0, len(rows), BATCH_SIZE):
        batch = rows[start : start + BATCH_SIZE]
        found = await scheduler.store.read(_find, batch)
        for row in batch:
            await _take_up(scheduler, row, found, models)
    return len(rows)


def _find(c: Connection, rows: Sequence[FutureRow]) -> _Found:
    run_ids = {_run_id(row) for row in rows if row.kind != "sample"}
    sampler_ids = {row.lane for row in rows if row.kind == "sample"}
    found_runs = [runs.get_run(c, model_id) for model_id in run_ids]
    found_samplers = [samplers.get_sampler(c, sampler_id) for sampler_id in sampler_ids]
    readable: dict[str, bytes] = {}
    damaged: dict[str, CheckpointError] = {}
    for row in rows:
        if row.kind not in WITHOUT_PAYLOAD:
            try:
                readable |= journal.payloads(c, [row.request_id])
            except CheckpointError as error:
                damaged[row.request_id] = error
    return _Found(
        {run.model_id: run for run in found_runs if run is not None},
        {sampler.sampling_session_id: sampler for sampler in found_samplers if sampler is not None},
        readable,
        damaged,
    )


def _is_creation(row: FutureRow) -> bool:
    return row.lane.endswith(":models")


def _run_id(row: FutureRow) -> str:
    return f"{row.session_id}:train:{row.seq_id}" if _is_creation(row) else row.lane


async def _take_up(scheduler: "Scheduler", row: FutureRow, found: _Found, models: Collection[str]) -> None:
    """Hand an unfinished request to its core. Operations of a run wait there until an engine loads the run."""
    operation = operation_of(row, next(iter(scheduler.models)))
    operation.payload = found.payloads.get(row.request_id, b"")
    try:
        if row.request_id in found.damaged:
            raise found.damaged[row.request_id]
        operation = _sample(operation, found) if row.kind == "sample" else _of_run(operation, row, found)
        if operation.reads is not None and not _is_creation(row) and operation.base_model in models:
            scheduler.results.open[row.request_id] = operation  # so that the weights stay when they are here
            await scheduler.scratch.bring_patiently("weights", operation.reads)
    except (LookupError, ValueError, CheckpointError, msgspec.MsgspecError, ValidationError) as error:
        reason = f"it cannot be taken up after a restart of the server: {type(error).__name__}: {error}"
        outcome = await scheduler.store.submit(journal.Fail(operation, reason, "server").apply)
        scheduler.results.resolve(operation, outcome)
        return
    if operation.kind == "create_custom_loss":
        if any(row.request_id in driver.core.open for driver in scheduler.models.values()):
            return
        driver = scheduler.loss_checker()
    elif operation.base_model in models:
        driver = scheduler.models[operation.base_model]
    else:  # its core has it, or it waits for a server that serves the model
        scheduler.results.open.setdefault(row.request_id, operation)
        return
    scheduler.results.open[row.request_id] = operation
    driver.post(Recovered(operation, found.runs.get(_run_id(row)), _is_creation(row)))


def _of_run(operation: Operation, row: FutureRow, found: _Found) -> Operation:
    if operation.kind == "create_custom_loss":
        return operation
    if _run_id(row) not in found.runs:
        raise LookupError(f"there is no run {_run_id(row)!r} any more")
    operation.base_model = found.runs[_run_id(row)].base_model
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
    )
