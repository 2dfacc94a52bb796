"""Tracked runs: what people call a run, with its name, notes, tags, configuration, outcome and parts.

A part is a training run (`runs`). Parts of one user with the same key belong to the same tracked run, whose id is that
of its first part. `run_search` lists them, `run_metrics` summarises their metrics.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import Connection, delete, func, select, update

from lorimer.errors import InvalidInput
from lorimer.store import audit, checkpoints, episodes, futures, rollouts
from lorimer.store import metrics as metric_log
from lorimer.store.run_names import readable_name
from lorimer.store.runs import Run
from lorimer.store.sessions import get_session
from lorimer.store.tables import (
    insert,
    metric_names,
    metric_states,
    metric_totals,
    metrics,
    run_fields,
    run_tags,
    runs,
    tracked_runs,
)
from lorimer.store.values import record, record_or_none, storable, utc_now
from lorimer.types.paths import checkpoint_path, parse_path
from lorimer.types.runs import EndStatus, RunIdentity, UpdateRunRequest

MAX_CHILDREN = 100
MAX_FIELDS = 1000
MAX_FIELD_CHARS = 500


@dataclass(frozen=True)
class TrackedRun:
    run_id: str
    user_id: str
    project_id: str | None
    number: int
    """Counts the user's runs."""
    run_key: str | None
    name: str
    notes: str
    tags: list[str]
    config: dict[str, Any]
    base_model: str
    session_id: str
    """Of the newest part."""
    model_id: str
    """The newest part."""
    num_parts: int
    parent_path: str | None
    parent_run_id: str | None
    num_steps: int | None
    steps_reported: int | None
    optim_steps: int | None
    """Over all parts, as of the last summary."""
    past_seconds: float
    """The duration of all parts but the newest."""
    ended: EndStatus | None
    """What the client said; None while it said nothing, and the session tells."""
    error: str | None
    ended_at: datetime | None
    is_archived: bool
    created_at: datetime


COLUMNS = [tracked_runs.c[field.name] for field in fields(TrackedRun)]
_FIRST_PART_FIRST = (runs.c.created_at, runs.c.model_id)


def get(c: Connection, run_id: str) -> TrackedRun | None:
    """Return the run of this id, or the run that has a part of this id."""
    query = select(*COLUMNS).join(runs, runs.c.run_id == tracked_runs.c.run_id).where(runs.c.model_id == run_id)
    return record_or_none(TrackedRun, c.execute(query).one_or_none())


def parts_of(c: Connection, run_id: str) -> list[Run]:
    """Return the training runs of a run, oldest first."""
    query = select(runs).where(runs.c.run_id == run_id).order_by(*_FIRST_PART_FIRST)
    return [record(Run, row) for row in c.execute(query)]


def children_of(c: Connection, run_id: str) -> list[tuple[str, str]]:
    """Return the ids and names of runs that started from a checkpoint of this one, newest first."""
    query = select(tracked_runs.c.run_id, tracked_runs.c.name).where(tracked_runs.c.parent_run_id == run_id)
    found = c.execute(query.order_by(tracked_runs.c.created_at.desc()).limit(MAX_CHILDREN))
    return [(row.run_id, row.name) for row in found]


# ── parts ─────────────────────────────────────────────────────────────────────────────────────────────


def track(c: Connection, part: Run, identity: RunIdentity, loaded_from: str | None) -> Run:
    """Make a new training run a part of the user's run with its key, or the first part of a new run. Return its row."""
    known = _find_by_key(c, part.user_id, identity.run_key)
    run_id = part.model_id if known is None else known.run_id
    parent_run_id, steps_before = _origin(c, part.user_id, loaded_from)
    is_resumed = known is not None and parent_run_id == run_id
    previous = None if known is None else parts_of(c, run_id)[-1]
    values: dict[str, Any] = {
        "run_id": run_id,
        "loaded_from": loaded_from,
        "optim_steps_before": steps_before if is_resumed else 0,
        "first_step": identity.first_step,
    }
    c.execute(update(runs).where(runs.c.model_id == part.model_id).values(values))
    if known is None or previous is None:
        _create(c, part, identity, loaded_from, parent_run_id)
    else:
        _add_part(c, known, previous, part, identity)
    return replace(part, **values)


def note_load(c: Connection, model_id: str, path: str) -> None:
    """Record the checkpoint that an untrained run loads as the one it starts with."""
    part = record(Run, c.execute(select(runs).where(runs.c.model_id == model_id)).one())
    if part.run_id is None or part.loaded_from is not None or metric_log.count_steps(c, model_id):
        return
    parent_run_id, steps_before = _origin(c, part.user_id, path)
    values = {"loaded_from": path, "optim_steps_before": steps_before if parent_run_id == part.run_id else 0}
    c.execute(update(runs).where(runs.c.model_id == model_id).values(values))
    if part.run_id == model_id:
        _set(c, model_id, {"parent_path": path, "parent_run_id": parent_run_id})


def count_steps(c: Connection, model_id: str, before: int) -> int:
    """Return the optimizer steps that a run has done before an operation of this part, earlier parts included."""
    earlier: int = c.execute(select(runs.c.optim_steps_before).where(runs.c.model_id == model_id)).scalar_one()
    return earlier + metric_log.count_steps(c, model_id, before)


def _find_by_key(c: Connection, user_id: str, run_key: str | None) -> TrackedRun | None:
    if run_key is None:
        return None
    query = select(*COLUMNS).where(tracked_runs.c.user_id == user_id, tracked_runs.c.run_key == run_key)
    return record_or_none(TrackedRun, c.execute(query.with_for_update()).one_or_none())


def run_with_key(c: Connection, user_id: str, run_key: str) -> str | None:
    """Return the id of the user's run with a key, if there is one."""
    query = select(tracked_runs.c.run_id).where(tracked_runs.c.user_id == user_id, tracked_runs.c.run_key == run_key)
    return c.execute(query).scalar_one_or_none()


def _origin(c: Connection, user_id: str, path: str | None) -> tuple[str | None, int]:
    """Return the user's run that saved a checkpoint, and the optimizer steps it had done."""
    if path is None:
        return None, 0
    parsed = parse_path(path)
    query = select(runs.c.run_id).where(runs.c.model_id == parsed.training_run_id, runs.c.user_id == user_id)
    found = checkpoints.find(c, parsed.training_run_id, parsed.checkpoint_type, parsed.name)
    return c.execute(query).scalar_one_or_none(), (found.step if found else None) or 0


def _create(
    c: Connection, part: Run, identity: RunIdentity, parent_path: str | None, parent_run_id: str | None
) -> None:
    last = select(func.max(tracked_runs.c.number)).where(tracked_runs.c.user_id == part.user_id)
    number = (c.execute(last).scalar() or 0) + 1
    values = {
        "run_id": part.model_id,
        "user_id": part.user_id,
        "project_id": part.project_id,
        "number": number,
        "run_key": identity.run_key,
        "name": storable(identity.name or readable_name(part.model_id, number)),
        "notes": storable(identity.notes or ""),
        "tags": [storable(tag) for tag in identity.tags or []],
        "config": identity.config or {},
        "search": "",
        "base_model": part.base_model,
        "session_id": part.session_id,
        "model_id": part.model_id,
        "num_parts": 1,
        "parent_path": parent_path,
        "parent_run_id": parent_run_id,
        "num_steps": identity.num_steps,
        "past_seconds": 0.0,
        "is_archived": False,
        "created_at": part.created_at,
    }
    c.execute(insert(c, tracked_runs).values(values))
    _index(c, part.model_id)


def _add_part(c: Connection, known: TrackedRun, previous: Run, part: Run, identity: RunIdentity) -> None:
    until = min(known.ended_at or previous.last_request_at, previous.last_request_at)
    values: dict[str, Any] = {
        "session_id": part.session_id,
        "model_id": part.model_id,
        "num_parts": known.num_parts + 1,
        "past_seconds": known.past_seconds + max((until - previous.created_at).total_seconds(), 0.0),
        "steps_reported": identity.first_step,
        "ended": None,
        "error": None,
        "ended_at": None,
        "is_archived": False,
    }
    given = {"config": identity.config, "num_steps": identity.num_steps}
    values |= {name: value for name, value in given.items() if value is not None}
    _set(c, known.run_id, values)
    _index(c, known.run_id)
    if identity.first_step is not None:
        rollouts.supersede(c, known.run_id, identity.first_step)


# ── changes ───────────────────────────────────────────────────────────────────────────────────────────


def change(c: Connection, run_id: str, request: UpdateRunRequest) -> None:
    """Change what the request gives, and leave the rest."""
    values = request.model_dump(exclude_none=True)
    for name in ("name", "notes"):
        if name in values:
            values[name] = storable(values[name])
    if "tags" in values:
        values["tags"] = [storable(tag) for tag in values["tags"]]
    if values:
        _set(c, run_id, values)
        _index(c, run_id)


def finish(c: Connection, run_id: str, status: EndStatus, error: str | None) -> None:
    """Record how the run ended. A later call replaces an earlier one."""
    text = None if error is None else storable(error)
    _set(c, run_id, {"ended": status, "error": text, "ended_at": utc_now()})


def report_progress(c: Connection, model_id: str, steps_done: int) -> None:
    """Record how many steps the client has done. Only the newest part counts."""
    newest = tracked_runs.c.model_id == model_id
    c.execute(update(tracked_runs).where(newest).values(steps_reported=steps_done))


def remove(c: Connection, run: TrackedRun) -> None:
    """Delete a run with its checkpoints, metrics, rollouts and episodes; the next sweep expires its training runs.

    Refuse a run with queued operations.
    """
    parts = [part.model_id for part in parts_of(c, run.run_id)]
    if busy := set(parts) & set(futures.unfinished_lanes(c)):
        raise InvalidInput(f"the run has unfinished operations ({sorted(busy)[0]}); wait until they are done")
    for model_id in parts:
        for checkpoint in checkpoints.list_for_run(c, model_id):
            checkpoints.delete(c, checkpoint.checkpoint_key)
            path = checkpoint_path(model_id, checkpoint.kind, checkpoint.name)
            audit.record(c, user_id=run.user_id, event="checkpoint_deleted", model_id=model_id, tinker_path=path)
    for table in (metrics, metric_names, metric_totals, metric_states):
        c.execute(delete(table).where(table.c.model_id.in_(parts)))
    rollouts.remove_all(c, run.run_id)
    episodes.remove_of_run(c, run.run_id)
    orphans = update(tracked_runs).where(tracked_runs.c.parent_run_id == run.run_id)
    c.execute(orphans.values(parent_run_id=None))
    c.execute(delete(tracked_runs).where(tracked_runs.c.run_id == run.run_id))
    c.execute(update(runs).where(runs.c.model_id.in_(parts)).values(run_id=None, deleted_at=utc_now()))
    details = {"run_id": run.run_id, "name": run.name}
    audit.record(c, user_id=run.user_id, event="run_deleted", model_id=run.run_id, details=details)


def _set(c: Connection, run_id: str, values: Mapping[str, Any]) -> None:
    c.execute(update(tracked_runs).where(tracked_runs.c.run_id == run_id).values(dict(values)))


def _index(c: Connection, run_id: str) -> None:
    """Write what the run is searched by: its text, its tags, and the fields of its configuration."""
    run = record(TrackedRun, c.execute(select(*COLUMNS).where(tracked_runs.c.run_id == run_id)).one())
    session = get_session(c, run.session_id)
    metadata = c.execute(select(runs.c.user_metadata).where(runs.c.model_id == run.model_id)).scalar_one()
    texts = [run.name, *(part.model_id for part in parts_of(c, run_id)), run.base_model, run.notes, *run.tags]
    texts += [session.display_name or "" if session else "", *(f"{name} {text}" for name, text in metadata.items())]
    _set(c, run_id, {"search": "\n".join(texts).casefold()})
    for table in (run_tags, run_fields):
        c.execute(delete(table).where(table.c.run_id == run_id))
    if run.tags:
        c.execute(run_tags.insert(), [{"run_id": run_id, "tag": tag} for tag in run.tags])
    flat = dict(list(flatten(run.config))[:MAX_FIELDS])
    rows = [
        {"run_id": run_id, "field": name, "number": _number(value), "text": _text(value)}
        for name, value in flat.items()
    ]
    if rows:
        c.execute(run_fields.insert(), rows)


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a configuration; those of a nested object are called ``outer.inner``."""
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield storable(f"{prefix}{name}"), value


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: object) -> str:
    """Return the value as it is compared and shown: a string itself, anything else as JSON."""
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return storable(text[:MAX_FIELD_CHARS])
