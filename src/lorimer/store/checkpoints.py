"""Checkpoints: the names under which users find saved weights, with their visibility and expiry.

Every function except `expired`, which the sweep uses, ignores expired checkpoints.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Row, Select, func, or_, select, update
from sqlalchemy import delete as delete_rows

from lorimer.errors import InvalidInput
from lorimer.store import client_steps, evaluations
from lorimer.store.tables import checkpoints, insert, runs, tracked_runs, weights
from lorimer.store.values import new_id, utc_now
from lorimer.store.weights import Weights

CheckpointKind = Literal["training", "sampler", "external"]


@dataclass(frozen=True)
class Checkpoint:
    checkpoint_key: str
    user_id: str
    model_id: str
    """The run's id in the ``tinker://`` path."""
    project_id: str | None
    kind: CheckpointKind
    name: str
    weights_id: str
    step: int | None
    """The optimizer steps that its run had done, earlier parts included; None if that is not known."""
    public: bool
    user_metadata: dict[str, str]
    created_at: datetime
    expires_at: datetime | None
    weights: Weights
    client_step: int | None = None
    """The steps that its run had done as its client counts them; only of `with_client_steps`."""

    @property
    def size_bytes(self) -> int:
        return self.weights.size_bytes


@dataclass(frozen=True)
class StorageUsage:
    """The checkpoints of one user in one project."""

    user_id: str
    project_id: str | None
    checkpoint_count: int
    size_bytes: int


_COLUMNS = list(checkpoints.c)
_NEWEST_FIRST = (checkpoints.c.created_at.desc(), checkpoints.c.checkpoint_key.desc())


def add_checkpoint(
    c: Connection,
    *,
    user_id: str,
    model_id: str,
    project_id: str | None,
    kind: CheckpointKind,
    name: str,
    weights_id: str,
    step: int | None = None,
    public: bool = False,
    user_metadata: dict[str, str] | None = None,
    expires_at: datetime | None = None,
    overwrite: bool = False,
) -> Checkpoint:
    """Create a checkpoint for weights. Refuse a name in use unless ``overwrite``; an expired name is free."""
    values = {
        "checkpoint_key": new_id(),
        "user_id": user_id,
        "model_id": model_id,
        "project_id": project_id,
        "kind": kind,
        "name": name,
        "weights_id": weights_id,
        "step": step,
        "public": public,
        "user_metadata": user_metadata or {},
        "created_at": utc_now(),
        "expires_at": expires_at,
    }
    if not overwrite and find(c, model_id, kind, name) is not None:
        raise InvalidInput(
            f"the run {model_id!r} already has a {kind} checkpoint named {name!r};"
            " choose another name, delete it or ask to overwrite it"
        )
    evaluations.delete_of_checkpoint(c, model_id, kind, name)
    place = [checkpoints.c.model_id, checkpoints.c.kind, checkpoints.c.name]
    c.execute(insert(c, checkpoints).values(values).on_conflict_do_update(index_elements=place, set_=values))
    return _record(c.execute(_joined().where(checkpoints.c.checkpoint_key == values["checkpoint_key"])).one())


def find(c: Connection, model_id: str, kind: CheckpointKind, name: str) -> Checkpoint | None:
    place = (checkpoints.c.model_id == model_id, checkpoints.c.kind == kind, checkpoints.c.name == name)
    row = c.execute(_joined().where(*place, _alive())).one_or_none()
    return None if row is None else _record(row)


def list_for_run(c: Connection, model_id: str) -> list[Checkpoint]:
    """Return the run's checkpoints, newest first."""
    query = _joined().where(checkpoints.c.model_id == model_id, _alive()).order_by(*_NEWEST_FIRST)
    return [_record(row) for row in c.execute(query)]


def list_for_user(c: Connection, user_id: str, limit: int, offset: int) -> tuple[list[Checkpoint], int]:
    """Return a page of the user's checkpoints, newest first, and their total number."""
    wanted = (checkpoints.c.user_id == user_id) & _alive()
    total = c.execute(select(func.count()).select_from(checkpoints).where(wanted)).scalar_one()
    page = _joined().where(wanted).order_by(*_NEWEST_FIRST).limit(limit).offset(offset)
    return [_record(row) for row in c.execute(page)], total


def with_client_steps(c: Connection, found: list[Checkpoint]) -> list[Checkpoint]:
    steps = client_steps.counted(c, [(one.model_id, one.step, one.created_at) for one in found])
    return [replace(one, client_step=step) for one, step in zip(found, steps, strict=True)]


def names_of_runs(c: Connection, user_id: str) -> dict[str, tuple[str, str]]:
    """Return the id and the name of the run of each training run with a checkpoint of the user."""
    found = (
        select(runs.c.model_id, tracked_runs.c.run_id, tracked_runs.c.name)
        .join(tracked_runs, tracked_runs.c.run_id == runs.c.run_id)
        .where(tracked_runs.c.user_id == user_id)
        .where(runs.c.model_id.in_(select(checkpoints.c.model_id).where(checkpoints.c.user_id == user_id)))
    )
    return {model_id: (run_id, name) for model_id, run_id, name in c.execute(found)}


def last_of_run(c: Connection, model_id: str, kind: CheckpointKind) -> Checkpoint | None:
    """Return the run's newest checkpoint of this kind."""
    wanted = (checkpoints.c.model_id == model_id) & (checkpoints.c.kind == kind) & _alive()
    row = c.execute(_joined().where(wanted).order_by(*_NEWEST_FIRST).limit(1)).one_or_none()
    return None if row is None else _record(row)


def delete(c: Connection, key: str) -> bool:
    """Delete a checkpoint. Return whether it existed. Its weights stay until `weights.unreferenced` finds them."""
    return c.execute(delete_rows(checkpoints).where(checkpoints.c.checkpoint_key == key)).rowcount == 1


def set_public(c: Connection, key: str, public: bool) -> bool:
    """Publish or unpublish. Return False if nothing changes."""
    return _change(c, key, checkpoints.c.public != public, public=public)


def set_ttl(c: Connection, key: str, expires_at: datetime | None) -> bool:
    """Set the expiry; None means never. Return False if the checkpoint no longer exists."""
    return _change(c, key, expires_at=expires_at)


def expired(c: Connection, now: datetime) -> list[Checkpoint]:
    """Return the checkpoints that have expired at ``now``."""
    query = _joined().where(checkpoints.c.expires_at <= now).order_by(checkpoints.c.expires_at)
    return [_record(row) for row in c.execute(query)]


def storage_usage(c: Connection, user_id: str | None = None, project_id: str | None = None) -> list[StorageUsage]:
    """Return the number and bytes of checkpoints by user and project, optionally of one user or one project."""
    group = (checkpoints.c.user_id, checkpoints.c.project_id)
    query = (
        select(*group, func.count(), func.sum(weights.c.size_bytes))
        .join(weights, weights.c.weights_id == checkpoints.c.weights_id)
        .where(_alive())
        .group_by(*group)
        .order_by(*group)
    )
    if user_id is not None:
        query = query.where(checkpoints.c.user_id == user_id)
    if project_id is not None:
        query = query.where(checkpoints.c.project_id == project_id)
    return [StorageUsage(owner, project, count, int(size)) for owner, project, count, size in c.execute(query)]


def _alive() -> ColumnElement[bool]:
    return or_(checkpoints.c.expires_at.is_(None), checkpoints.c.expires_at > utc_now())


def _joined() -> Select[Any]:
    return select(*_COLUMNS, *weights.c).join(weights, weights.c.weights_id == checkpoints.c.weights_id)


def _record(row: Row[Any]) -> Checkpoint:
    values: list[Any] = list(row)
    own, of_weights = values[: len(_COLUMNS)], values[len(_COLUMNS) :]
    return Checkpoint(*[*own, Weights(**dict(zip(weights.c.keys(), of_weights, strict=True)))])


def _change(c: Connection, key: str, *conditions: ColumnElement[bool], **values: Any) -> bool:
    chosen = update(checkpoints).where(checkpoints.c.checkpoint_key == key, _alive(), *conditions)
    return c.execute(chosen.values(**values)).rowcount == 1
