"""The scheduler's transactions: each puts everything on record that one event brings with it, or nothing.

All run on the store's writer thread, those that only read on a reader. Those that end an operation give its outcome,
which is that of an earlier end if there was one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec
from sqlalchemy import Connection

from lorimer.engine import messages
from lorimer.errors import CheckpointError, InvalidInput
from lorimer.scheduler.commands import Sent
from lorimer.scheduler.manifests import read_files
from lorimer.scheduler.operation import Operation, Outcome
from lorimer.scheduler.payloads import CreateLoss, CreateModel, Load, Save, SaveEphemeral
from lorimer.scheduler.runs import MISSING, needs_payload
from lorimer.scheduler.translate import wire_training_output
from lorimer.store import audit, checkpoints, futures, losses, metrics, quotas, runs, samplers, sessions, usage, weights
from lorimer.store.futures import FutureRow, FutureState
from lorimer.store.runs import Run
from lorimer.store.samplers import SamplingSession
from lorimer.store.usage import UsageItem, UsageKind
from lorimer.store.weights import Weights
from lorimer.types.encoding import encode_forward_backward_output
from lorimer.types.paths import checkpoint_path


def payloads(c: Connection, request_ids: Iterable[str]) -> dict[str, bytes]:
    found = {request_id: futures.payload(c, request_id) for request_id in request_ids}
    return {request_id: payload for request_id, payload in found.items() if payload is not None}


@dataclass(frozen=True)
class Journal:
    """All there is of a run: its newest snapshot, named in its row, and what came after it."""

    run: Run
    rows: list[FutureRow]
    payloads: dict[str, bytes]
    """By request, of the operations that will be computed."""
    creation: bytes | None
    """What it was made of, where there is no snapshot yet."""


def journal(c: Connection, model_id: str) -> Journal | None:
    run = runs.get_run(c, model_id)
    if run is None:
        return None
    rows = futures.journal(c, model_id, max(run.resume_seq, 0))
    found = payloads(c, [row.request_id for row in rows if needs_payload(row)])
    return Journal(run, rows, found, _creation(c, run) if run.resume_name is None else None)


def _creation(c: Connection, run: Run) -> bytes | None:
    made = futures.journal(c, f"{run.session_id}:models", run.model_seq_id - 1)
    return futures.payload(c, made[0].request_id) if made and made[0].seq_id == run.model_seq_id else None


def fall_back(c: Connection, model_id: str, damaged: str) -> Journal | None:
    """A run begins with the snapshot before the damaged one from now on, or as it was made; this is what follows."""
    runs.drop_newest(c, model_id, damaged)
    return journal(c, model_id)


def recorded(c: Connection, request_id: str) -> Outcome | None:
    """How a request ended, or that it is pending; None if there is no record of it."""
    row = futures.get(c, request_id)
    if row is None:
        return None
    if row.state == "queued":
        return Outcome("pending", "paused_capacity", "the server is taking up what it had left")
    if row.state != "done":
        is_users = row.category == "user" or row.state in ("rejected", "abandoned", "cancelled")
        return Outcome("failed", error=row.error or row.state, category="user" if is_users else "server")
    try:
        result = futures.result(c, request_id)
    except CheckpointError as error:
        return Outcome("failed", error=f"the result was computed and cannot be read: {error}", category="server")
    if result is None:
        return Outcome("gone", error=f"the result of request {request_id!r} has expired")
    return Outcome("done", result=result, result_format=row.result_format or "json")


def fail(
    c: Connection, operation: Operation, error: str, category: Literal["user", "server"], state: FutureState
) -> Outcome:
    if futures.fail(c, operation.request_id, error=error, category=category, state=state):
        return Outcome("failed", error=error, category=category)
    return recorded(c, operation.request_id) or Outcome("failed", error=error, category=category)


def mark_corrupted(c: Connection, model_id: str, reason: str) -> None:
    runs.mark_corrupted(c, model_id, reason)


def abandon(
    c: Connection, run: Run, gaps: Iterable[tuple[int, int]], waiting: Iterable[Operation], reason: str
) -> list[Outcome]:
    """Numbers that never came count as gone by, also after a restart; operations that waited for them fail."""
    for first, last in gaps:
        futures.accept(
            c,
            user_id=run.user_id,
            session_id=run.session_id,
            kind=MISSING,
            lane=run.model_id,
            seq_id=last,
            payload=b"",
            tokens=last - first + 1,
            state="abandoned",
            error=reason,
        )
    return [fail(c, operation, reason, "user", "failed") for operation in waiting]


def release(c: Connection, lane: str, request_ids: Sequence[str]) -> list[str]:
    """Drop results that their client has, those of this lane; nobody frees the results of others."""
    rows = [futures.get(c, request_id) for request_id in request_ids]
    released = [row.request_id for row in rows if row is not None and row.lane == lane]
    futures.release(c, released)
    return released


def set_snapshot(
    c: Connection, model_id: str, seq_id: int, name: str, verified: str | None
) -> tuple[Run | None, list[str]]:
    """The run begins with this snapshot from now on; gives its row and the snapshots that are no longer needed.

    The newest so far, if it was ``verified``, stays to fall back on, and the journal begins there.
    """
    obsolete = [runs.confirm_snapshot(c, model_id, verified)] if verified is not None else []
    obsolete.append(runs.set_snapshot(c, model_id, seq_id, name))
    futures.drop_payloads(c, model_id, seq_id)
    return runs.get_run(c, model_id), [old for old in obsolete if old is not None]


def finish_creation(c: Connection, operation: Operation, run: Run, payload: CreateModel) -> Outcome:
    answer: dict[str, str | None] = {"type": "create_model", "model_id": run.model_id}
    if payload.answers_load:
        answer = {"type": "load_weights", "path": payload.path, "model_id": run.model_id}
    return _finish(c, operation, msgspec.json.encode(answer))


def finish_operation(
    c: Connection, operation: Operation, run: Run, sent: Sent, results: Sequence[messages.Result], max_stored_bytes: int
) -> Outcome:
    """Record what the engine answered to an operation of a run."""
    match results[-1]:
        case messages.TrainResult() as result:
            # Not the operation's own number, which is an estimate where images came without a count.
            tokens = sum(len(logprobs) for logprobs in result.logprobs)
            used = _used(operation, run.project_id, run.base_model, "training", tokens)
            encoded = encode_forward_backward_output(wire_training_output(result))
            outcome, is_new = _end(c, operation, encoded, "protobuf", [used])
            if is_new and operation.kind not in futures.STATELESS_KINDS:
                _measure(c, operation, result.metrics, num_datums=len(result.logprobs))
            return outcome
        case messages.StepResult(metrics=values):
            encoded = msgspec.json.encode({"type": "optim_step", "metrics": values})
            outcome, is_new = _end(c, operation, encoded)
            if is_new:
                _measure(c, operation, values, is_step=True)
            return outcome
    known = recorded(c, operation.request_id)
    if known is None or known.state != "pending":
        return known or _gone(operation)
    assert sent.directory is not None
    match sent.payload:
        case Save() as payload:
            return _finish_save(c, operation, run, payload, sent.directory, max_stored_bytes)
        case SaveEphemeral(sampling_session_seq_id=seq):
            return _finish_ephemeral(c, operation, run, seq, sent.directory)
        case Load(path=path):
            sent.snapshot = set_snapshot(c, run.model_id, operation.seq_id, sent.directory.name, sent.verified)
            answer = {"type": "load_weights", "path": path, "model_id": run.model_id}
            return _finish(c, operation, msgspec.json.encode(answer))
    raise AssertionError(f"{results!r} answers no operation")


def _finish_save(
    c: Connection, operation: Operation, run: Run, payload: Save, directory: Path, max_stored_bytes: int
) -> Outcome:
    kind = payload.checkpoint_kind
    saved = _add_weights(c, run, directory, has_optimizer=kind == "training")
    # Its size is known only now, and saves that were submitted together were checked one by one.
    replaced = (run.model_id, kind, payload.name) if payload.overwrite else None
    quotas.check_room(c, run.user_id, saved.size_bytes, max_stored_bytes, replaced)
    expires_at = None if payload.expires_at is None else datetime.fromtimestamp(payload.expires_at, UTC)
    checkpoints.add_checkpoint(
        c,
        user_id=run.user_id,
        model_id=run.model_id,
        project_id=run.project_id,
        kind=kind,
        name=payload.name,
        weights_id=saved.weights_id,
        user_metadata=payload.user_metadata,
        expires_at=expires_at,
        overwrite=payload.overwrite,
    )
    path = checkpoint_path(run.model_id, kind, payload.name)
    usage.record(c, [_used(operation, run.project_id, run.base_model, "checkpoint", 1)])
    audit.record(c, user_id=run.user_id, event="checkpoint_saved", model_id=run.model_id, tinker_path=path)
    answer: dict[str, object] = {"type": operation.kind, "path": path}
    if kind == "external":
        answer["size_bytes"] = saved.size_bytes
    return _finish(c, operation, msgspec.json.encode(answer))


def _finish_ephemeral(c: Connection, operation: Operation, run: Run, seq: int, directory: Path) -> Outcome:
    saved = _add_weights(c, run, directory, has_optimizer=False)
    sampler = samplers.create_sampler(
        c,
        session_id=run.session_id,
        user_id=run.user_id,
        seq=seq,
        base_model=run.base_model,
        model_path=None,
        weights_id=saved.weights_id,
        model_id=run.model_id,
    )
    if sampler.weights_id != saved.weights_id:
        raise InvalidInput(f"sampling_session_seq_id {seq} is taken by another sampler of the session; use a new one")
    answer = {"type": operation.kind, "sampling_session_id": sampler.sampling_session_id}
    return _finish(c, operation, msgspec.json.encode(answer))


def finish_loss(c: Connection, operation: Operation, payload: CreateLoss) -> Outcome:
    losses.add_loss(
        c,
        loss_id=payload.loss_id,
        session_id=operation.session_id,
        user_id=operation.user_id,
        name=payload.name,
        payload=operation.payload,
    )
    answer = {"type": "create_custom_loss", "loss_id": payload.loss_id}
    return _finish(c, operation, msgspec.json.encode(answer))


def finish_sample(
    c: Connection, operation: Operation, sampler: SamplingSession, encoded: bytes, counts: tuple[int, int, int]
) -> Outcome:
    """``counts``: prompt tokens computed, prompt tokens found in the cache, tokens sampled."""
    kinds: tuple[UsageKind, ...] = ("sampling_prefill", "sampling_prefill_cached", "sampling_sample")
    session = sessions.get_session(c, operation.session_id)
    used = [
        _used(operation, session.project_id if session else None, sampler.base_model, kind, count)
        for kind, count in zip(kinds, counts, strict=True)
        if count
    ]
    return _finish(c, operation, encoded, "protobuf", used)


def finish_plain(c: Connection, operation: Operation, answer: dict[str, str]) -> Outcome:
    return _finish(c, operation, msgspec.json.encode(answer))


def _finish(
    c: Connection,
    operation: Operation,
    result: bytes,
    result_format: Literal["json", "protobuf"] = "json",
    used: Sequence[UsageItem] = (),
) -> Outcome:
    """End an operation, with what it used; one that has ended already stays as it was."""
    return _end(c, operation, result, result_format, used)[0]


def _end(
    c: Connection,
    operation: Operation,
    result: bytes,
    result_format: Literal["json", "protobuf"] = "json",
    used: Sequence[UsageItem] = (),
) -> tuple[Outcome, bool]:
    """As `_finish`, with whether this was the end."""
    started_at = datetime.fromtimestamp(operation.started_at, UTC) if operation.started_at else None
    if futures.finish(c, operation.request_id, result=result, result_format=result_format, started_at=started_at):
        usage.record(c, used)
        return Outcome("done", result=result, result_format=result_format), True
    return recorded(c, operation.request_id) or _gone(operation), False


def _measure(
    c: Connection, operation: Operation, values: Mapping[str, float], *, num_datums: int = 1, is_step: bool = False
) -> None:
    metrics.add_operation(c, operation.lane, operation.seq_id, values, num_datums=num_datums, is_step=is_step)


def _gone(operation: Operation) -> Outcome:
    return Outcome("gone", error=f"request {operation.request_id!r} is not on record")


def _used(operation: Operation, project_id: str | None, base_model: str, kind: UsageKind, amount: int) -> UsageItem:
    return UsageItem(operation.user_id, operation.session_id, project_id, base_model, kind, amount, datetime.now(UTC))


# ── directories that the engine wrote ─────────────────────────────────────────────────────────────────


def _add_weights(c: Connection, run: Run, directory: Path, *, has_optimizer: bool) -> Weights:
    try:
        files = read_files(directory)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError("what was saved has vanished from the data directory") from error
    return weights.add_weights(
        c,
        name=directory.name,
        base_model=run.base_model,
        rank=run.rank,
        train_attn=run.train_attn,
        train_mlp=run.train_mlp,
        train_unembed=run.train_unembed,
        optimizer_type=run.optimizer_type,
        has_optimizer=has_optimizer,
        size_bytes=sum(file["size"] for file in files.values()),
        files=files,
    )
