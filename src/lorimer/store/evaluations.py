"""Evaluations: the grades of a checkpoint or a base model on the items of a task, and the estimates from them.

An evaluation belongs to the user who stored it, and is deleted with its checkpoint. Grades are kept as one compressed
value, so that two evaluations can be compared item by item.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

import numpy as np
import orjson
import zstandard
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, Row, Select, and_, delete, func, or_, select

from lorimer.errors import NotFound, TooLarge
from lorimer.store import client_steps
from lorimer.store.tables import checkpoints, evaluations, insert, runs, tracked_runs
from lorimer.store.values import new_id, utc_now
from lorimer.types.compression import compress_zstd

MAX_EVALUATIONS = 20_000
"""Of one user."""


@dataclass(frozen=True)
class Evaluation:
    evaluation_id: str
    user_id: str
    checkpoint_key: str | None
    """None of a base model."""
    model: str
    base_model: str
    task: str
    metric: str
    harness: str
    settings: dict[str, Any]
    variant: str
    num_items: int
    num_samples: int
    estimates: dict[str, dict[str, Any]]
    """``mean`` and ``pass@k``, each with its interval."""
    created_at: datetime
    run_id: str | None
    run_name: str | None
    step: int | None
    """The steps that the run had done at the checkpoint, in the count of the client."""


@dataclass(frozen=True)
class Outcomes:
    items: list[str]
    grades: NDArray[np.float64]
    """A row for each item."""


@dataclass(frozen=True)
class Filter:
    """Selects the evaluations of one user."""

    user_id: str
    model: str | None = None
    task: str | None = None
    run_id: str | None = None
    """Those of the checkpoints of a run."""


_OWN = [evaluations.c[field.name] for field in fields(Evaluation) if field.name in evaluations.c]
_OF_RUN = [tracked_runs.c.run_id, tracked_runs.c.name.label("run_name"), checkpoints.c.step]
_PLACE = [checkpoints.c.model_id, checkpoints.c.created_at.label("saved_at")]
_NEWEST_FIRST = (evaluations.c.created_at.desc(), evaluations.c.evaluation_id.desc())


def add(
    c: Connection, values: Mapping[str, Any], outcomes: Outcomes, estimates: Mapping[str, Mapping[str, Any]]
) -> Evaluation:
    """Store an evaluation. Refuse one whose checkpoint is gone, and one more than a user may have."""
    key, user_id = values["checkpoint_key"], values["user_id"]
    if key is not None and not c.execute(select(checkpoints.c.step).where(checkpoints.c.checkpoint_key == key)).all():
        raise NotFound(f"the checkpoint {values['model']!r} was deleted meanwhile")
    count = c.execute(select(func.count()).where(evaluations.c.user_id == user_id)).scalar_one()
    if count >= MAX_EVALUATIONS:
        raise TooLarge(f"you have {count} evaluations; at most {MAX_EVALUATIONS} are accepted: delete some")
    row = dict(values) | {
        "evaluation_id": new_id(),
        "variant": variant_of(values["settings"], outcomes),
        "num_items": len(outcomes.items),
        "num_samples": outcomes.grades.shape[1],
        "estimates": estimates,
        "outcomes": encode(outcomes),
        "created_at": utc_now(),
    }
    c.execute(insert(c, evaluations).values(row))
    found = get(c, row["evaluation_id"])
    assert found is not None
    return found


def get(c: Connection, evaluation_id: str) -> Evaluation | None:
    row = c.execute(_joined().where(evaluations.c.evaluation_id == evaluation_id, _alive())).one_or_none()
    return None if row is None else _records(c, [row])[0]


def list_evaluations(c: Connection, chosen: Filter, limit: int, offset: int) -> tuple[list[Evaluation], int]:
    """Return a page of a user's evaluations, newest first, and their total number."""
    wanted = [evaluations.c.user_id == chosen.user_id, _alive()]
    for column, value in ((evaluations.c.model, chosen.model), (evaluations.c.task, chosen.task)):
        if value is not None:
            wanted.append(column == value)
    if chosen.run_id is not None:
        wanted.append(tracked_runs.c.run_id == chosen.run_id)
    matching = _joined().where(*wanted)
    total = c.execute(select(func.count()).select_from(matching.subquery())).scalar_one()
    page = matching.order_by(*_NEWEST_FIRST).limit(limit).offset(offset)
    return _records(c, c.execute(page).all()), total


def read_outcomes(c: Connection, evaluation_id: str) -> Outcomes | None:
    query = select(evaluations.c.outcomes).where(evaluations.c.evaluation_id == evaluation_id)
    data = c.execute(query).scalar_one_or_none()
    return None if data is None else decode(data)


def delete_evaluation(c: Connection, evaluation_id: str) -> bool:
    """Delete an evaluation. Return whether it existed."""
    return c.execute(delete(evaluations).where(evaluations.c.evaluation_id == evaluation_id)).rowcount == 1


def delete_of_checkpoint(c: Connection, model_id: str, kind: str, name: str) -> None:
    """Delete the evaluations of a checkpoint that is overwritten: they measured other weights."""
    place = and_(checkpoints.c.model_id == model_id, checkpoints.c.kind == kind, checkpoints.c.name == name)
    replaced = select(checkpoints.c.checkpoint_key).where(place).scalar_subquery()
    c.execute(delete(evaluations).where(evaluations.c.checkpoint_key == replaced))


def variant_of(settings: Mapping[str, Any], outcomes: Outcomes) -> str:
    """Return a digest of all that two results must share to be ranked: settings, items, number of samples."""
    key = [settings, sorted(outcomes.items), outcomes.grades.shape[1]]
    return hashlib.blake2b(orjson.dumps(key, option=orjson.OPT_SORT_KEYS), digest_size=6).hexdigest()


def encode(outcomes: Outcomes) -> bytes:
    return compress_zstd(orjson.dumps([outcomes.items, outcomes.grades.shape[1], outcomes.grades.ravel().tolist()]), 9)


def decode(data: bytes) -> Outcomes:
    items, num_samples, grades = orjson.loads(zstandard.ZstdDecompressor().decompress(data))
    return Outcomes(items, np.array(grades, np.float64).reshape(len(items), num_samples))


def shared(first: Outcomes, second: Outcomes) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the grades of the items that both have, in the same order."""
    places = {item: number for number, item in enumerate(second.items)}
    pairs: Sequence[tuple[int, int]] = [
        (number, places[item]) for number, item in enumerate(first.items) if item in places
    ]
    rows = np.array(pairs, np.int64).reshape(len(pairs), 2)
    return first.grades[rows[:, 0]], second.grades[rows[:, 1]]


def _alive() -> ColumnElement[bool]:
    """Leave out evaluations of checkpoints that have expired and are about to be deleted."""
    return or_(
        evaluations.c.checkpoint_key.is_(None),
        checkpoints.c.expires_at.is_(None),
        checkpoints.c.expires_at > utc_now(),
    )


def _joined() -> Select[Any]:
    """Join the step of the checkpoint, and the run if it is the user's own."""
    own_run = and_(tracked_runs.c.run_id == runs.c.run_id, tracked_runs.c.user_id == evaluations.c.user_id)
    return (
        select(*_OWN, *_OF_RUN, *_PLACE)
        .outerjoin(checkpoints, checkpoints.c.checkpoint_key == evaluations.c.checkpoint_key)
        .outerjoin(runs, runs.c.model_id == checkpoints.c.model_id)
        .outerjoin(tracked_runs, own_run)
    )


def _records(c: Connection, rows: Sequence[Row[Any]]) -> list[Evaluation]:
    steps = client_steps.counted(c, [(row.model_id, row.step, row.saved_at) for row in rows])
    names = [column.name for column in (*_OWN, *_OF_RUN)]
    return [
        Evaluation(**{name: row._mapping[name] for name in names} | {"step": step})
        for row, step in zip(rows, steps, strict=True)
    ]
