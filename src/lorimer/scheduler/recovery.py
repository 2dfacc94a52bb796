"""What an earlier server left: removes its unfinished files, takes its unfinished requests up."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from pydantic import ValidationError
from sqlalchemy import Connection

from lorimer import types
from lorimer.errors import CheckpointError, EngineError
from lorimer.scheduler import payloads, records
from lorimer.scheduler.operation import Operation
from lorimer.scheduler.runs import operation_of
from lorimer.scheduler.sampling import SampleOperation
from lorimer.store import futures, retention, runs, samplers
from lorimer.store.futures import FutureRow
from lorimer.store.runs import Run
from lorimer.store.samplers import SamplingSession

if TYPE_CHECKING:
    from lorimer.scheduler.scheduler import Scheduler

log = logging.getLogger("lorimer.scheduler")

_TOGETHER = 500
"""Requests read at once, so that ten thousand are taken up within seconds."""
_WITHOUT_PAYLOAD = ("forward", "forward_backward", "optim_step")
"""Kinds that need their payload only when an engine takes their run."""


@dataclass(frozen=True)
class _Found:
    """Requests on record, with what they are about."""

    runs: dict[str, Run]
    samplers: dict[str, SamplingSession]
    payloads: dict[str, bytes]
    damaged: dict[str, CheckpointError]
    """By request: why its payload cannot be read."""


async def recover(scheduler: "Scheduler") -> None:
    """Called once, before any request is taken."""
    known = await scheduler.store.read(retention.known_names)
    removed = await asyncio.to_thread(scheduler.directory.sweep_orphans, known)
    rows = await scheduler.store.read(futures.unfinished)
    if rows or removed:
        log.info("taking up %d unfinished requests; removed %d unfinished files", len(rows), len(removed))
    for start in range(0, len(rows), _TOGETHER):
        some = rows[start : start + _TOGETHER]
        found = await scheduler.store.read(_find, some)
        for row in some:
            await _take_up(scheduler, row, found)
    for model in scheduler.models.values():
        model.pump()


def _find(c: Connection, rows: Sequence[FutureRow]) -> _Found:
    run_ids = {_run_id(row) for row in rows if row.kind != "sample"}
    sampler_ids = {row.lane for row in rows if row.kind == "sample"}
    found_runs = [runs.get_run(c, model_id) for model_id in run_ids]
    found_samplers = [samplers.get_sampler(c, sampler_id) for sampler_id in sampler_ids]
    payloads: dict[str, bytes] = {}
    damaged: dict[str, CheckpointError] = {}
    for row in rows:
        if row.kind not in _WITHOUT_PAYLOAD:
            try:
                payloads |= records.payloads(c, [row.request_id])
            except CheckpointError as error:
                damaged[row.request_id] = error
    return _Found(
        {run.model_id: run for run in found_runs if run is not None},
        {sampler.sampling_session_id: sampler for sampler in found_samplers if sampler is not None},
        payloads,
        damaged,
    )


def _is_creation(row: FutureRow) -> bool:
    return row.lane.endswith(":models")


def _run_id(row: FutureRow) -> str:
    return f"{row.session_id}:train:{row.seq_id}" if _is_creation(row) else row.lane


async def _take_up(scheduler: "Scheduler", row: FutureRow, found: _Found) -> None:
    if row.kind == "unload_model":
        answer = {"type": "unload_model", "model_id": row.lane.removesuffix(":unload")}
        await scheduler.recorder.finish(operation_of(row, ""), records.finish_plain, answer)
        return
    operation = operation_of(row, next(iter(scheduler.models)))
    operation.payload = found.payloads.get(row.request_id, b"")
    operation.is_accepted = True
    if (damage := found.damaged.get(row.request_id)) is not None:
        await scheduler.recorder.fail(operation, EngineError(f"the request cannot be read any more: {damage}"))
        return
    try:
        operation = _sample(operation, found) if row.kind == "sample" else _of_run(operation, row, found)
    except (LookupError, ValueError, msgspec.MsgspecError, ValidationError) as error:
        reason = f"it cannot be taken up after a restart of the server: {type(error).__name__}: {error}"
        await scheduler.recorder.fail(operation, EngineError(reason))
        return
    scheduler.open[row.request_id] = operation
    _hand_over(scheduler, operation, row, found)


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


def _sample(operation: Operation, found: _Found) -> SampleOperation:
    sampler = found.samplers.get(operation.lane)
    if sampler is None:
        raise LookupError(f"there is no sampling session {operation.lane!r} any more")
    payload = payloads.decode_payload(operation.payload)
    assert isinstance(payload, payloads.Sample)
    return SampleOperation(
        request_id=operation.request_id,
        user_id=operation.user_id,
        session_id=operation.session_id,
        base_model=sampler.base_model,
        lane=operation.lane,
        seq_id=operation.seq_id,
        kind=operation.kind,
        tokens=operation.tokens,
        request=types.SampleRequest.model_validate_json(payload.request),
        sampler=sampler,
        is_accepted=True,
    )


def _hand_over(scheduler: "Scheduler", operation: Operation, row: FutureRow, found: _Found) -> None:
    """Operations of a run only gather here; its journal is laid out when an engine takes it."""
    if operation.kind == "create_custom_loss":
        scheduler.check_loss(operation)
    elif (model := scheduler.models.get(operation.base_model)) is None:
        return  # it waits for a server that has the model
    elif isinstance(operation, SampleOperation):
        model.sampling.arrive(operation)
    elif _is_creation(row):
        model.training.add_run(found.runs[_run_id(row)]).creation = operation
    else:
        model.training.take_up(model.training.add_run(found.runs[row.lane]), operation)
