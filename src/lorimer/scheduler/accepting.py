"""The way in: what is checked before a request is on record, and the transactions that put it there."""

import hashlib
import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection

from lorimer import types
from lorimer.errors import InvalidInput, TooLarge, Unsupported
from lorimer.scheduler.operation import Operation
from lorimer.store import futures, losses, runs
from lorimer.store.futures import FutureRow
from lorimer.store.runs import Run
from lorimer.store.sessions import Session
from lorimer.store.weights import Weights

SAVE_KINDS: dict[types.CheckpointType, str] = {
    "training": "save_weights",
    "sampler": "save_weights_for_sampler",
    "external": "save_weights_external",
}
_REPEATABLE = ("forward", "forward_backward", "optim_step")
"""Kinds whose retry has the same payload, byte by byte."""
MAX_RANK = 512
"""The engine's own limit, known here so that a larger one is refused at once."""


@dataclass(frozen=True)
class RunValues:
    """What a run is made of."""

    base_model: str
    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    user_metadata: dict[str, str]
    optimizer_type: str


def check_seq_id(seq_id: int) -> int:
    if not 1 <= seq_id < 2**31:
        raise InvalidInput(f"seq_id is {seq_id}; 1 to 2**31 - 1 is accepted")
    return seq_id


def check_rank(rank: int) -> int:
    if not 1 <= rank <= MAX_RANK:
        raise InvalidInput(f"lora_config.rank is {rank}; 1 to {MAX_RANK} is accepted")
    return rank


def check_seed(seed: int | None) -> int:
    """The seed of a run's weights; it is chosen here, so that a replay begins with the same."""
    if seed is None:
        return secrets.randbits(62)
    if not 0 <= seed < 2**63:
        raise InvalidInput(f"lora_config.seed is {seed}; 0 to 2**63 - 1 is accepted")
    return seed


def metadata(values: dict[str, Any] | None) -> dict[str, str]:
    """As clients read it back: every value a string."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in (values or {}).items()}


def check_optimizer_state(weights: Weights, optimizer: bool) -> None:
    if optimizer and not weights.has_optimizer:
        raise InvalidInput("these weights were saved for sampling and hold no optimizer state; load them without it")


def check_fits(run: Run, weights: Weights) -> None:
    for name in ("base_model", "rank", "train_attn", "train_mlp", "train_unembed"):
        theirs, ours = getattr(weights, name), getattr(run, name)
        if theirs != ours:
            raise InvalidInput(f"the weights have {name} {theirs!r}, the run {ours!r}; make a new run from the weights")


def check_sample(request: types.SampleRequest) -> None:
    if request.record_stability_info:
        raise Unsupported("record_stability_info is not supported: 'stable_reinforce', which needs it, is not")
    for chunk in request.prompt.chunks:
        if chunk.type not in ("encoded_text", "image"):
            raise Unsupported(f"prompt has a chunk of type {chunk.type!r}; accepted are text and images")


# ── transactions ──────────────────────────────────────────────────────────────────────────────────────


def accept(
    c: Connection,
    operation: Operation,
    has_passed: bool = False,
    check: Callable[[Connection], None] | None = None,
) -> tuple[FutureRow, bool]:
    """Put an operation on record, or find it there: a retry gets the first one's future.

    With ``has_passed`` the number has gone by; without a record of it, which has expired, it is refused. ``check`` may
    refuse a new one.
    """
    row, is_new = futures.accept(
        c,
        request_id=operation.request_id,
        user_id=operation.user_id,
        session_id=operation.session_id,
        kind=operation.kind,
        lane=operation.lane,
        seq_id=operation.seq_id,
        payload=operation.payload,
        payload_sha256=operation.payload_sha256,
        tokens=operation.tokens,
    )
    if is_new and has_passed:
        raise InvalidInput(f"operation {operation.seq_id} of {operation.lane} was answered long ago; use a new seq_id")
    if is_new and check is not None:
        check(c)
    if not is_new and row.kind != operation.kind and row.state not in ("rejected", "abandoned"):
        raise InvalidInput(f"operation {operation.seq_id} of {operation.lane} is a {row.kind}, not a {operation.kind}")
    if not is_new and row.kind in _REPEATABLE and row.payload_sha256 != _digest(operation):
        raise InvalidInput(f"operation {operation.seq_id} of {operation.lane} was already submitted with other content")
    return row, is_new


def accept_unnumbered(c: Connection, operation: Operation) -> None:
    futures.accept(
        c,
        request_id=operation.request_id,
        user_id=operation.user_id,
        session_id=operation.session_id,
        kind=operation.kind,
        lane=operation.lane,
        seq_id=None,
        payload=b"",
        tokens=0,
    )


def accept_run(
    c: Connection, operation: Operation, session: Session, values: RunValues, most: int
) -> tuple[Run, FutureRow, bool]:
    runs.check_room(c, session.session_id, operation.seq_id, most)
    run = runs.create_run(
        c,
        session_id=session.session_id,
        user_id=operation.user_id,
        project_id=session.project_id,
        model_seq_id=operation.seq_id,
        **asdict(values),
    )
    return run, *accept(c, operation)


def accept_loss(c: Connection, operation: Operation, most: int) -> tuple[FutureRow, bool]:
    row, is_new = accept(c, operation)
    if is_new and losses.count_losses(c, operation.session_id) >= most:
        raise TooLarge(f"the session has {most} custom losses, which is the most that is accepted")
    return row, is_new


def reject(c: Connection, user_id: str, run: Run, seq_id: int, reason: str) -> bool:
    """Use a number up; False if it is in use already."""
    _, is_new = futures.accept(
        c,
        user_id=user_id,
        session_id=run.session_id,
        kind="rejected",
        lane=run.model_id,
        seq_id=seq_id,
        payload=b"",
        tokens=0,
        state="rejected",
        error=reason,
        category="user",
    )
    return is_new


def _digest(operation: Operation) -> str:
    return operation.payload_sha256 or hashlib.sha256(operation.payload).hexdigest()
