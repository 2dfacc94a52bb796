"""Trainings that the server starts for users: what was asked for, how each stands, and the key that its process has.

Files of a training, its data and its output, are in a directory of ``server/trainings.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, delete, func, select, update

from lorimer.errors import TooLarge
from lorimer.store.tables import insert, tracked_runs, trainings
from lorimer.store.values import record, record_or_none, storable, utc_now

MAX_TRAININGS = 200
"""Of one user; each has a copy of its data."""


@dataclass(frozen=True)
class StoredTraining:
    training_id: str
    user_id: str
    kind: str
    base_model: str
    settings: dict[str, Any]
    is_dry_run: bool
    state: str
    key_id: int | None
    """The key of the process; none in open mode, and after it was revoked."""
    run_id: str | None
    run_name: str | None
    num_starts: int
    error: str | None
    result: dict[str, Any] | None
    created_at: datetime
    started_at: datetime
    finished_at: datetime | None


_WITH_RUN = trainings.outerjoin(tracked_runs, tracked_runs.c.run_id == trainings.c.run_id)
_COLUMNS = [
    tracked_runs.c.name.label(field.name) if field.name == "run_name" else trainings.c[field.name]
    for field in fields(StoredTraining)
]
_SELECT = select(*_COLUMNS).select_from(_WITH_RUN)
_IS_RUNNING = trainings.c.state == "running"


def add(c: Connection, values: Mapping[str, Any]) -> StoredTraining:
    """Store a training that is about to start. Refuse one more than a user may have."""
    count = c.execute(select(func.count()).where(trainings.c.user_id == values["user_id"])).scalar_one()
    if count >= MAX_TRAININGS:
        raise TooLarge(f"you have {count} trainings; at most {MAX_TRAININGS} are accepted: delete some")
    now = utc_now()
    row = dict(values) | {"state": "running", "num_starts": 1, "created_at": now, "started_at": now}
    c.execute(insert(c, trainings).values(row))
    return _get(c, row["training_id"])


def get(c: Connection, training_id: str) -> StoredTraining | None:
    query = _SELECT.where(trainings.c.training_id == training_id)
    return record_or_none(StoredTraining, c.execute(query).one_or_none())


def _get(c: Connection, training_id: str) -> StoredTraining:
    found = get(c, training_id)
    assert found is not None
    return found


def list_trainings(c: Connection, user_id: str, limit: int, offset: int) -> tuple[list[StoredTraining], int]:
    """Return a page of a user's trainings, newest first, and their total number."""
    own = trainings.c.user_id == user_id
    total = c.execute(select(func.count()).where(own)).scalar_one()
    newest = _SELECT.where(own).order_by(trainings.c.created_at.desc(), trainings.c.training_id.desc())
    return [record(StoredTraining, row) for row in c.execute(newest.limit(limit).offset(offset))], total


def list_running(c: Connection) -> list[StoredTraining]:
    """Return what a server left running; reads the whole table, once at its start."""
    return [record(StoredTraining, row) for row in c.execute(_SELECT.where(_IS_RUNNING))]


def restart(c: Connection, training_id: str) -> StoredTraining:
    """Record that a training is started again."""
    values = {"state": "running", "started_at": utc_now(), "finished_at": None, "error": None, "result": None}
    counted = values | {"num_starts": trainings.c.num_starts + 1}
    c.execute(update(trainings).where(trainings.c.training_id == training_id).values(counted))
    return _get(c, training_id)


def set_key(c: Connection, training_id: str, key_id: int) -> None:
    c.execute(update(trainings).where(trainings.c.training_id == training_id).values(key_id=key_id))


def set_run(c: Connection, training_id: str, run_id: str) -> None:
    c.execute(update(trainings).where(trainings.c.training_id == training_id).values(run_id=run_id))


def finish(
    c: Connection, training_id: str, state: str, error: str | None = None, result: dict[str, Any] | None = None
) -> None:
    """Record how a training ended, and that its key is revoked."""
    values = {"state": state, "error": None if error is None else storable(error), "result": result}
    ended = values | {"finished_at": utc_now(), "key_id": None}
    c.execute(update(trainings).where(trainings.c.training_id == training_id, _IS_RUNNING).values(ended))


def delete_training(c: Connection, training_id: str) -> None:
    c.execute(delete(trainings).where(trainings.c.training_id == training_id))
