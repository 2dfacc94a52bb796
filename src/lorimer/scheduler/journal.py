"""All transactions of the scheduler. Each commits everything that one event changes, or nothing.

A transaction is data with a method ``apply(connection)``, which runs on the store's writer thread, or on a reader
thread if it only reads. A lost connection retries it, so it must change nothing but the database. Transactions that end
an operation return its outcome; if it had already ended, that is the earlier outcome.
"""

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
from sqlalchemy import Connection

from lorimer.engine import messages
from lorimer.errors import CheckpointError, InvalidInput, TooLarge
from lorimer.scheduler.payloads import CreateLoss, CreateModel, Load, Save, SaveEphemeral, decode_payload
from lorimer.scheduler.runs import MISSING, Flight, Journal, Operation, Outcome, needs_payload
from lorimer.scheduler.translate import wire_sample_response, wire_training_output
from lorimer.store import (
    audit,
    blobs,
    checkpoints,
    custom_loss,
    futures,
    metrics,
    moves,
    quotas,
    runs,
    samplers,
    sessions,
    tracking,
    usage,
    weights,
)
from lorimer.store.futures import FutureRow, FutureState
from lorimer.store.manifests import read_files
from lorimer.store.runs import Run, RunValues
from lorimer.store.sessions import Session
from lorimer.store.usage import UsageItem, UsageKind
from lorimer.store.weights import Weights
from lorimer.types import CheckpointType, SampleRequest
from lorimer.types.encoding import encode_forward_backward_output, encode_sample_response
from lorimer.types.paths import checkpoint_path
from lorimer.types.runs import RunIdentity

SAVE_KINDS: dict[CheckpointType, str] = {
    "training": "save_weights",
    "sampler": "save_weights_for_sampler",
    "external": "save_weights_external",
}
REPEATABLE = ("forward", "forward_backward", "optim_step")
"""Kinds whose retry has exactly the same payload."""


class Transaction:
    """Base class of all transactions."""

    only_reads: ClassVar[bool] = False

    def apply(self, c: Connection) -> Any:
        """Read or change the database."""
        raise NotImplementedError


# ── accepting ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Accept(Transaction):
    """Insert the row of an operation, or find it: a retry gets the first submit's future."""

    operation: Operation
    has_passed: bool = False
    """The run is already beyond this seq_id. If its row has expired, raise `InvalidInput`."""
    max_stored_bytes: int = 0
    """The default storage quota of a user without their own; a save beyond it is refused."""
    moves_run: bool = False
    """The run is assigned to the operation's replica."""

    def apply(self, c: Connection) -> tuple[FutureRow, bool]:
        operation = self.operation
        if self.moves_run and operation.place is not None:
            moves.place(c, operation.lane, operation.place)
        row, is_new = _insert(c, operation, operation.seq_id)
        name = f"operation {operation.seq_id} of {operation.lane}"
        if is_new and self.has_passed:
            raise InvalidInput(f"{name} was answered long ago; use a new seq_id")
        if is_new and operation.kind in SAVE_KINDS.values():
            self._check_save(c)
        if not is_new and row.kind != operation.kind and row.state not in ("rejected", "abandoned"):
            raise InvalidInput(f"{name} is a {row.kind}, not a {operation.kind}")
        if not is_new and row.kind in REPEATABLE and row.payload_sha256 != _digest(operation):
            raise InvalidInput(f"{name} was already submitted with other content")
        return row, is_new

    def _check_save(self, c: Connection) -> None:
        operation, payload = self.operation, decode_payload(self.operation.payload)
        if isinstance(payload, Save):
            place = operation.user_id, operation.lane, payload.checkpoint_kind, payload.name, payload.overwrite
            quotas.check_save(c, *place, self.max_stored_bytes)


@dataclass(frozen=True, eq=False)
class AcceptRun(Transaction):
    """Insert the row of a run and of the operation that creates it."""

    operation: Operation
    session: Session
    values: RunValues
    max_runs: int
    identity: RunIdentity | None = None
    loaded_from: str | None = None

    def apply(self, c: Connection) -> tuple[Run, FutureRow, bool]:
        operation, session = self.operation, self.session
        runs.check_room(c, session.session_id, operation.seq_id, self.max_runs)
        place: dict[str, Any] = {"session_id": session.session_id, "model_seq_id": operation.seq_id}
        place |= {"user_id": operation.user_id, "project_id": session.project_id, "replica": operation.place}
        run = runs.create_run(c, **place, **asdict(self.values))
        if run.run_id is None and not run.is_unloaded:
            run = tracking.track(c, run, self.identity or RunIdentity(), self.loaded_from)
        return run, *Accept(operation).apply(c)


@dataclass(frozen=True, eq=False)
class AcceptLoss(Transaction):
    operation: Operation
    max_losses: int

    def apply(self, c: Connection) -> tuple[FutureRow, bool]:
        row, is_new = Accept(self.operation).apply(c)
        if is_new and custom_loss.count_losses(c, self.operation.session_id) >= self.max_losses:
            raise TooLarge(f"the session has {self.max_losses} custom losses, which is the most that is accepted")
        return row, is_new


@dataclass(frozen=True, eq=False)
class AcceptUnload(Transaction):
    """Insert an unload together with its result: the run leaves the engine when idle, and nobody waits for that."""

    operation: Operation
    model_id: str

    def apply(self, c: Connection) -> Outcome:
        _insert(c, self.operation, None)
        return finish_plain(c, self.operation, {"type": "unload_model", "model_id": self.model_id})


@dataclass(frozen=True, eq=False)
class Consume(Transaction):
    """Consume the seq_id of a refused submit. Return False if it is already in use."""

    operation: Operation
    run: Run
    reason: str

    def apply(self, c: Connection) -> bool:
        _, is_new = futures.accept(
            c,
            user_id=self.operation.user_id,
            session_id=self.run.session_id,
            kind="rejected",
            lane=self.run.model_id,
            seq_id=self.operation.seq_id,
            payload=b"",
            tokens=0,
            state="rejected",
            error=self.reason,
            category="user",
        )
        return is_new


ACCEPTING = (Accept, AcceptRun, AcceptLoss, AcceptUnload, Consume)
"""Transactions that a caller waits for: while the storage fails, the caller gets an error instead of a retry."""


def _insert(c: Connection, operation: Operation, seq_id: int | None) -> tuple[FutureRow, bool]:
    return futures.accept(
        c,
        request_id=operation.request_id,
        user_id=operation.user_id,
        session_id=operation.session_id,
        kind=operation.kind,
        lane=operation.lane,
        seq_id=seq_id,
        payload=operation.payload,
        payload_sha256=operation.payload_sha256,
        tokens=operation.tokens,
        place=operation.place,
    )


def _digest(operation: Operation) -> str:
    return operation.payload_sha256 or hashlib.sha256(operation.payload).hexdigest()


# ── reading back ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class ReadJournal(Transaction):
    """Return the journal of a run, or None if the run is no longer stored."""

    model_id: str
    restore: int
    """The number of the restore attempt that reads it."""
    only_reads: ClassVar[bool] = True

    def apply(self, c: Connection) -> Journal | None:
        run = runs.get_run(c, self.model_id)
        if run is None:
            return None
        rows = futures.journal(c, self.model_id, max(run.resume_seq, 0))
        found = payloads(c, [row.request_id for row in rows if needs_payload(row)])
        graphs = [loss.payload for loss in custom_loss.losses_of_session(c, run.session_id)]
        return Journal(run, rows, found, _creation(c, run) if run.resume_name is None else None, graphs)


@dataclass(frozen=True, eq=False)
class FallBack(Transaction):
    """Drop the damaged newest snapshot of a run, and return the journal after the previous one."""

    model_id: str
    restore: int
    damaged: str

    def apply(self, c: Connection) -> Journal | None:
        runs.drop_newest(c, self.model_id, self.damaged)
        return ReadJournal(self.model_id, self.restore).apply(c)


@dataclass(frozen=True, eq=False)
class FindWeights(Transaction):
    weights_id: str
    only_reads: ClassVar[bool] = True

    def apply(self, c: Connection) -> Weights | None:
        return weights.get_weights(c, self.weights_id)


def payloads(c: Connection, request_ids: Iterable[str]) -> dict[str, bytes]:
    ids = list(request_ids)
    blobs.expect(c, ids, "payload")
    found = {request_id: futures.payload(c, request_id) for request_id in ids}
    return {request_id: payload for request_id, payload in found.items() if payload is not None}


def _creation(c: Connection, run: Run) -> bytes | None:
    made = futures.journal(c, f"{run.session_id}:models", run.model_seq_id - 1)
    return futures.payload(c, made[0].request_id) if made and made[0].seq_id == run.model_seq_id else None


def outcome_of(c: Connection, request_id: str) -> Outcome | None:
    """Return the outcome of a request, possibly pending; None if it has no row."""
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


def release(c: Connection, lane: str, request_ids: Sequence[str]) -> list[str]:
    """Drop results of this lane that the client has received. Return those dropped."""
    rows = [futures.get(c, request_id) for request_id in request_ids]
    released = [row.request_id for row in rows if row is not None and row.lane == lane]
    futures.release(c, released)
    return released


# ── ending operations ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Fail(Transaction):
    operation: Operation
    error: str
    category: Literal["user", "server"]
    state: FutureState = "failed"

    def apply(self, c: Connection) -> Outcome:
        request_id = self.operation.request_id
        failed = Outcome("failed", error=self.error, category=self.category)
        if futures.fail(c, request_id, error=self.error, category=self.category, state=self.state):
            return failed
        return outcome_of(c, request_id) or failed


@dataclass(frozen=True, eq=False)
class Abandon(Transaction):
    """Give up seq_ids that never arrived, permanently, and fail the operations behind them."""

    run: Run
    gaps: Sequence[tuple[int, int]]
    operations: Sequence[Operation]
    reason: str

    def apply(self, c: Connection) -> list[Outcome]:
        for first, last in self.gaps:
            futures.accept(
                c,
                user_id=self.run.user_id,
                session_id=self.run.session_id,
                kind=MISSING,
                lane=self.run.model_id,
                seq_id=last,
                payload=b"",
                tokens=last - first + 1,
                state="abandoned",
                error=self.reason,
            )
        return [Fail(operation, self.reason, "user").apply(c) for operation in self.operations]


@dataclass(frozen=True, eq=False)
class SetSnapshot(Transaction):
    """Make a snapshot the one from which the run is restored. Return the run's row and the obsolete snapshots.

    If the previous newest one was ``verified``, it is kept as a fallback, and the journal starts there.
    """

    model_id: str
    seq_id: int
    name: str
    verified: str | None

    def apply(self, c: Connection) -> tuple[Run | None, list[str]]:
        obsolete = [runs.confirm_snapshot(c, self.model_id, self.verified)] if self.verified is not None else []
        obsolete.append(runs.set_snapshot(c, self.model_id, self.seq_id, self.name))
        futures.drop_payloads(c, self.model_id, self.seq_id)
        return runs.get_run(c, self.model_id), [old for old in obsolete if old is not None]


@dataclass(frozen=True, eq=False)
class MarkCorrupted(Transaction):
    model_id: str
    reason: str

    def apply(self, c: Connection) -> None:
        runs.mark_corrupted(c, self.model_id, self.reason)


@dataclass(frozen=True, eq=False)
class FinishCreation(Transaction):
    operation: Operation
    run: Run
    payload: CreateModel

    def apply(self, c: Connection) -> Outcome:
        answer: dict[str, str | None] = {"type": "create_model", "model_id": self.run.model_id}
        if self.payload.answers_load:
            answer |= {"type": "load_weights", "path": self.payload.path}
        return _finish(c, self.operation, msgspec.json.encode(answer))


@dataclass(frozen=True)
class Finished:
    outcome: Outcome
    snapshot: tuple[Run | None, list[str]] | None = None
    """For a load: the run's row with the snapshot that ended it, and the obsolete snapshots."""


@dataclass(frozen=True, eq=False)
class FinishOperation(Transaction):
    """Store the engine's reply to an operation of a run."""

    operation: Operation
    run: Run
    flight: Flight
    weights: Path
    """Where the engine wrote saved weights."""
    max_stored_bytes: int

    def apply(self, c: Connection) -> Finished:
        operation, run = self.operation, self.run
        match self.flight.replies[-1]:
            case messages.TrainResult() as result:
                return Finished(self._finish_training(c, result))
            case messages.StepResult(metrics=values):
                encoded = msgspec.json.encode({"type": "optim_step", "metrics": values})
                outcome, is_new = _end(c, operation, encoded)
                if is_new:
                    metrics.add_operation(c, operation.lane, operation.seq_id, values, is_step=True)
                return Finished(outcome)
        known = outcome_of(c, operation.request_id)
        if known is None or known.state != "pending":
            return Finished(known or _gone(operation))
        target = self.flight.target
        assert target is not None
        match self.flight.payload:
            case Save() as payload:
                return Finished(_finish_save(c, operation, run, payload, self.weights / target, self.max_stored_bytes))
            case SaveEphemeral(sampling_session_seq_id=seq):
                return Finished(_finish_ephemeral(c, operation, run, seq, self.weights / target))
            case Load(path=path):
                snapshot = SetSnapshot(run.model_id, operation.seq_id, target, self.flight.verified).apply(c)
                tracking.note_load(c, run.model_id, path)
                answer = {"type": "load_weights", "path": path, "model_id": run.model_id}
                return Finished(_finish(c, operation, msgspec.json.encode(answer)), snapshot)
        raise AssertionError(f"{self.flight.replies!r} answers no operation")

    def _finish_training(self, c: Connection, result: messages.TrainResult) -> Outcome:
        operation = self.operation
        # The reply's count, because the operation's own is an estimate for images without a count.
        tokens = sum(map(len, result.logprobs))
        used = _used(operation, self.run.project_id, self.run.base_model, "training", tokens)
        encoded = encode_forward_backward_output(wire_training_output(result))
        outcome, is_new = _end(c, operation, encoded, "protobuf", [used])
        if is_new and operation.kind not in futures.STATELESS_KINDS:
            place = operation.lane, operation.seq_id
            metrics.add_operation(c, *place, result.metrics, num_datums=len(result.logprobs))
        return outcome


def _finish_save(
    c: Connection, operation: Operation, run: Run, payload: Save, directory: Path, max_stored_bytes: int
) -> Outcome:
    kind = payload.checkpoint_kind
    saved = weights.add_directory(c, run, directory.name, read_files(directory), has_optimizer=kind == "training")
    # The size is known only now, and saves that were submitted concurrently were checked one by one.
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
        step=tracking.count_steps(c, run.model_id, before=operation.seq_id),
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
    saved = weights.add_directory(c, run, directory.name, read_files(directory), has_optimizer=False)
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


@dataclass(frozen=True, eq=False)
class FinishLoss(Transaction):
    operation: Operation
    payload: CreateLoss

    def apply(self, c: Connection) -> Outcome:
        operation, payload = self.operation, self.payload
        custom_loss.add_loss(
            c,
            loss_id=payload.loss_id,
            session_id=operation.session_id,
            user_id=operation.user_id,
            name=payload.name,
            payload=operation.payload,
        )
        answer = {"type": "create_custom_loss", "loss_id": payload.loss_id}
        return _finish(c, operation, msgspec.json.encode(answer))


@dataclass(frozen=True)
class SampleCounts:
    """Prompt tokens computed and found in the cache, and tokens sampled."""

    computed: int
    cached: int
    sampled: int

    def usage(self, user_id: str, session_id: str | None, project_id: str | None, base_model: str) -> "list[UsageItem]":
        kinds: tuple[UsageKind, ...] = ("sampling_prefill", "sampling_prefill_cached", "sampling_sample")
        counts, now = (self.computed, self.cached, self.sampled), datetime.now(UTC)
        return [
            UsageItem(user_id, session_id, project_id, base_model, kind, count, now)
            for kind, count in zip(kinds, counts, strict=True)
            if count
        ]


@dataclass(frozen=True, eq=False)
class FinishSample(Transaction):
    operation: Operation
    request: SampleRequest
    result: messages.SampleResult
    counts: SampleCounts

    def apply(self, c: Connection) -> Outcome:
        operation = self.operation
        session = sessions.get_session(c, operation.session_id)
        project_id = session.project_id if session else None
        response = wire_sample_response(self.result, self.request, operation.request_id)
        used = self.counts.usage(operation.user_id, operation.session_id, project_id, operation.base_model)
        return _finish(c, operation, encode_sample_response(response), "protobuf", used)


@dataclass(frozen=True, eq=False)
class RecordUsage(Transaction):
    """Record the usage of a direct sample, which has no row."""

    user_id: str
    base_model: str
    counts: SampleCounts

    def apply(self, c: Connection) -> None:
        usage.record(c, self.counts.usage(self.user_id, None, None, self.base_model))


def finish_plain(c: Connection, operation: Operation, answer: dict[str, str]) -> Outcome:
    return _finish(c, operation, msgspec.json.encode(answer))


def _finish(
    c: Connection,
    operation: Operation,
    result: bytes,
    result_format: Literal["json", "protobuf"] = "json",
    used: Sequence[UsageItem] = (),
) -> Outcome:
    """End an operation and record its usage. An operation that has already ended is unchanged."""
    return _end(c, operation, result, result_format, used)[0]


def _end(
    c: Connection,
    operation: Operation,
    result: bytes,
    result_format: Literal["json", "protobuf"] = "json",
    used: Sequence[UsageItem] = (),
) -> tuple[Outcome, bool]:
    """Like `_finish`, and return whether this call ended it."""
    started_at = None
    if operation.started:
        started_at = datetime.now(UTC) - timedelta(seconds=time.monotonic() - operation.started)
    if futures.finish(c, operation.request_id, result=result, result_format=result_format, started_at=started_at):
        usage.record(c, used)
        return Outcome("done", result=result, result_format=result_format), True
    return outcome_of(c, operation.request_id) or _gone(operation), False


def _gone(operation: Operation) -> Outcome:
    return Outcome("gone", error=f"request {operation.request_id!r} is not stored any more")


def _used(operation: Operation, project_id: str | None, base_model: str, kind: UsageKind, amount: int) -> UsageItem:
    return UsageItem(operation.user_id, operation.session_id, project_id, base_model, kind, amount, datetime.now(UTC))
