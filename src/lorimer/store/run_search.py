"""Lists, filters, sorts and groups tracked runs in the database, so that a page costs the same however many there are.

A query is words, which all occur in a run's text, and conditions such as ``status=failed tag=math config.rank>8
min.test/nll<0.3``. The names on their left are those by which a list is sorted and grouped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Select,
    and_,
    case,
    exists,
    func,
    literal,
    not_,
    select,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction
from sqlalchemy.types import Double

from lorimer.errors import InvalidInput
from lorimer.store.conditions import Condition, as_number, compare, parse, required_number
from lorimer.store.tables import run_fields, run_metrics, run_tags, runs, sessions, tracked_runs
from lorimer.store.tracking import COLUMNS, TrackedRun

MAX_GROUPS = 1000
NUM_SAMPLED = 1000
"""Names of fields are collected from so many of the newest runs."""

_STATUSES = ("running", "finished", "failed", "interrupted")
_PLAIN = ("name", "status", "base_model", "session", "project", "created", "last_request", "duration", "steps", "tag")
_METRIC_PARTS = ("last", "min", "max")
ACCEPTED = f"{', '.join(_PLAIN)}, config.FIELD, last.METRIC, min.METRIC and max.METRIC"


class seconds_between(GenericFunction[float]):
    """The seconds from one time to another."""

    type = Double()
    inherit_cache = True


@compiles(seconds_between, "sqlite")
def _between_on_sqlite(element: Any, compiler: Any, **options: Any) -> str:
    first, last = (compiler.process(clause, **options) for clause in element.clauses)
    return f"((julianday({last}) - julianday({first})) * 86400.0)"


@compiles(seconds_between, "postgresql")
def _between_on_postgresql(element: Any, compiler: Any, **options: Any) -> str:
    first, last = (compiler.process(clause, **options) for clause in element.clauses)
    return f"CAST(EXTRACT(EPOCH FROM ({last} - {first})) AS double precision)"


@dataclass(frozen=True)
class Scope:
    """Whose runs, and when a session without a heartbeat counts as lost."""

    user_id: str
    silent_before: datetime
    is_archived: bool | None = False
    """None: archived runs and others."""
    query: str = ""


@dataclass(frozen=True)
class FoundRun:
    """A run with what its status follows from."""

    run: TrackedRun
    status: str
    error: str | None
    session_name: str | None
    last_request_at: datetime
    part_created_at: datetime
    part_first_step: int
    user_metadata: dict[str, str]
    values: dict[str, float | str | None]


# ── expressions ───────────────────────────────────────────────────────────────────────────────────────


def _status(silent_before: datetime) -> ColumnElement[str]:
    """Return what the client said, else what its session says."""
    reasons = case(
        (sessions.c.finish_reason == "success", "finished"),
        (sessions.c.finish_reason == "interrupted", "interrupted"),
        else_="failed",
    )
    return case(
        (tracked_runs.c.ended.is_not(None), tracked_runs.c.ended),
        (sessions.c.status == "client_finished", reasons),
        (sessions.c.status == "failed", "failed"),
        (sessions.c.status == "cancelled", "interrupted"),
        (runs.c.corrupted.is_not(None), "failed"),
        (sessions.c.last_seen_at < silent_before, "interrupted"),
        else_="running",
    )


def _plain(name: str, silent_before: datetime) -> ColumnElement[Any]:
    end = func.coalesce(tracked_runs.c.ended_at, runs.c.last_request_at)
    return {
        "name": tracked_runs.c.name,
        "status": _status(silent_before),
        "base_model": tracked_runs.c.base_model,
        "session": tracked_runs.c.session_id,
        "project": tracked_runs.c.project_id,
        "created": tracked_runs.c.created_at,
        "last_request": runs.c.last_request_at,
        "duration": tracked_runs.c.past_seconds + seconds_between(runs.c.created_at, end),
        "steps": func.coalesce(tracked_runs.c.steps_reported, tracked_runs.c.optim_steps),
    }[name]


def _split(name: str) -> tuple[str, str]:
    """Return the kind of a name (``config``, ``last``, ``min``, ``max`` or a plain one) and the rest of it."""
    kind, dot, rest = name.partition(".")
    if dot and rest and kind in ("config", *_METRIC_PARTS):
        return kind, rest
    if name in _PLAIN:
        return name, ""
    raise InvalidInput(f"there is no field {name[:80]!r}; accepted are {ACCEPTED}")


def _config(field: str, column: Literal["number", "text"]) -> ColumnElement[Any]:
    here = (run_fields.c.run_id == tracked_runs.c.run_id) & (run_fields.c.field == field)
    return select(run_fields.c[column]).where(here).scalar_subquery()


def _metric(kind: str, name: str) -> ColumnElement[Any]:
    here = (run_metrics.c.run_id == tracked_runs.c.run_id) & (run_metrics.c.name == name)
    return select(run_metrics.c[kind]).where(here).scalar_subquery()


# ── conditions ────────────────────────────────────────────────────────────────────────────────────────


def _where(scope: Scope) -> ColumnElement[bool]:
    terms = [tracked_runs.c.user_id == scope.user_id]
    if scope.is_archived is not None:
        terms.append(tracked_runs.c.is_archived == scope.is_archived)
    for term in parse(scope.query):
        if isinstance(term, Condition):
            terms.append(_condition(term, scope.silent_before))
        else:
            terms.append(tracked_runs.c.search.contains(term.casefold(), autoescape=True))
    return and_(*terms)


def _condition(term: Condition, silent_before: datetime) -> ColumnElement[bool]:
    name, sign, value = term.name, term.sign, term.value
    kind, rest = _split(name)
    if kind == "tag":
        return _has_tag(sign, value)
    if kind == "config":
        number = as_number(value)
        column = _config(rest, "text" if number is None else "number")
        return compare(column, sign, value if number is None else number, value == "")
    if kind in _METRIC_PARTS or kind in ("duration", "steps"):
        column = _metric(kind, rest) if rest else _plain(kind, silent_before)
        number = required_number(term)
        return compare(column, sign, number, value == "")
    if kind in ("created", "last_request"):
        return compare(_plain(kind, silent_before), sign, _as_moment(name, value), False)
    if kind == "status" and value not in _STATUSES:
        raise InvalidInput(f"status is compared with {value[:80]!r}; accepted are {', '.join(_STATUSES)}")
    return compare(_plain(kind, silent_before), sign, value, value == "")


def _has_tag(sign: str, value: str) -> ColumnElement[bool]:
    here = run_tags.c.run_id == tracked_runs.c.run_id
    if sign not in ("=", "!="):
        raise InvalidInput(f"tag is compared with {sign!r}; = and != are accepted")
    found = exists().where(here & (run_tags.c.tag == value)) if value else not_(exists().where(here))
    return found if sign == "=" else not_(found)


def _as_moment(name: str, text: str) -> Any:
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            return literal(moment, tracked_runs.c.created_at.type)
    except ValueError:
        pass
    raise InvalidInput(f"{name} is compared with {text[:80]!r}; a time such as '2026-01-31T00:00:00Z' is accepted")


# ── lists ─────────────────────────────────────────────────────────────────────────────────────────────

_TABLES: FromClause = tracked_runs.join(runs, runs.c.model_id == tracked_runs.c.model_id).join(
    sessions, sessions.c.session_id == tracked_runs.c.session_id
)
_EXTRA = (
    func.coalesce(tracked_runs.c.error, sessions.c.finish_detail, runs.c.corrupted).label("found_error"),
    sessions.c.display_name,
    runs.c.last_request_at,
    runs.c.created_at.label("part_created_at"),
    func.coalesce(runs.c.first_step, runs.c.optim_steps_before).label("part_first_step"),
    runs.c.user_metadata,
)


def list_runs(
    c: Connection, scope: Scope, *, sort: str, fields: Sequence[str], limit: int, offset: int
) -> tuple[list[FoundRun], int]:
    """Return a page of runs and their total number. ``sort`` is a name, descending after ``-``; missing ones are last.

    ``fields`` are names whose values each run gets.
    """
    where = _where(scope)
    total = c.execute(_counted(scope).where(where)).scalar_one()
    page = select(tracked_runs.c.run_id).select_from(_TABLES).where(where).order_by(*_order(sort, scope.silent_before))
    ids = list(c.execute(page.limit(limit).offset(offset)).scalars())
    found = {one.run.run_id: one for one in _load(c, ids, fields, scope.silent_before)}
    return [found[run_id] for run_id in ids], total


def find_run(c: Connection, run_id: str, silent_before: datetime) -> FoundRun | None:
    """Return a run by its own id."""
    return next(iter(_load(c, [run_id], (), silent_before)), None)


def _counted(scope: Scope) -> Select[Any]:
    tables = _TABLES if scope.query else tracked_runs  # counting all needs no join
    return select(func.count()).select_from(tables)


def _order(sort: str, silent_before: datetime) -> list[ColumnElement[Any]]:
    is_descending = sort.startswith("-")
    kind, rest = _split(sort.removeprefix("-"))
    if kind == "created":
        newest = (tracked_runs.c.created_at, tracked_runs.c.run_id)
        return [column.desc() if is_descending else column for column in newest]
    if kind == "tag":
        raise InvalidInput("runs have several tags; group by tag, or sort by another field")
    if kind == "config":
        keys = [_config(rest, "number"), _config(rest, "text")]
        leading = [keys[1].is_(None), keys[0].is_(None)]  # missing ones last, and numbers before texts
    else:
        keys = [_metric(kind, rest) if rest else _plain(kind, silent_before)]
        leading = [keys[0].is_(None)]
    ordered = [key.desc() if is_descending else key for key in keys]
    return [*leading, *ordered, tracked_runs.c.created_at.desc(), tracked_runs.c.run_id]


def _load(c: Connection, ids: Sequence[str], names: Sequence[str], silent_before: datetime) -> list[FoundRun]:
    chosen = [_value(name, silent_before).label(f"value_{i}") for i, name in enumerate(names)]
    query = select(*COLUMNS, *_EXTRA, _status(silent_before).label("status"), *chosen).select_from(_TABLES)
    rows: Sequence[Any] = c.execute(query.where(tracked_runs.c.run_id.in_(ids))).all() if ids else []
    return [_found(row, names) for row in rows]


def _value(name: str, silent_before: datetime) -> ColumnElement[Any]:
    kind, rest = _split(name)
    if kind == "config":
        return _config(rest, "text")
    if kind == "tag":
        raise InvalidInput("every run of a list has its tags; other fields are accepted here")
    return _metric(kind, rest) if rest else _plain(kind, silent_before)


def _found(row: Any, names: Sequence[str]) -> FoundRun:
    own = len(COLUMNS)
    values = {name: _shown(name, row[own + len(_EXTRA) + 1 + i]) for i, name in enumerate(names)}
    return FoundRun(
        run=TrackedRun(*row[:own]),
        status=row.status,
        error=row.found_error if row.status == "failed" or row.error else None,
        session_name=row.display_name,
        last_request_at=row.last_request_at,
        part_created_at=row.part_created_at,
        part_first_step=row.part_first_step,
        user_metadata=row.user_metadata,
        values=values,
    )


def _shown(name: str, value: Any) -> float | str | None:
    """Return a number where the text of a configuration is one."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, str) and name.startswith("config."):
        number = as_number(value)
        return value if number is None else number
    return value  # type: ignore[no-any-return]


# ── groups and names ──────────────────────────────────────────────────────────────────────────────────


def group_runs(c: Connection, scope: Scope, name: str) -> list[tuple[str | None, int]]:
    """Return the values of a field with their number of runs, most frequent first."""
    kind, rest = _split(name)
    tables = _TABLES
    if kind == "tag":
        tables = tables.outerjoin(run_tags, run_tags.c.run_id == tracked_runs.c.run_id)
        value: ColumnElement[Any] = run_tags.c.tag
    elif kind == "config":
        here = (run_fields.c.run_id == tracked_runs.c.run_id) & (run_fields.c.field == rest)
        tables = tables.outerjoin(run_fields, here)
        value = run_fields.c.text
    elif kind in ("status", "base_model", "session", "project", "name"):
        value = _plain(kind, scope.silent_before)
    else:
        raise InvalidInput(
            f"runs are not grouped by {name[:80]!r}; accepted are tag, status, base_model, session, project, name and "
            "config.FIELD"
        )
    labelled = value.label("value")
    query = select(labelled, func.count()).select_from(tables).where(_where(scope)).group_by(labelled)
    found = c.execute(query.order_by(func.count().desc(), labelled).limit(MAX_GROUPS))
    return [(row[0], row[1]) for row in found]


def field_names(c: Connection, scope: Scope) -> tuple[list[str], list[str], list[str]]:
    """Return the names of configuration fields, metrics and tags of the newest runs that match."""
    newest = select(tracked_runs.c.run_id).select_from(_TABLES).where(_where(scope))
    sampled = newest.order_by(tracked_runs.c.created_at.desc()).limit(NUM_SAMPLED).subquery()

    def names(table: FromClause, column: ColumnElement[Any]) -> list[str]:
        query = select(column).distinct().join(sampled, sampled.c.run_id == table.c.run_id)
        return sorted(c.execute(query).scalars())

    return (
        names(run_fields, run_fields.c.field),
        names(run_metrics, run_metrics.c.name),
        names(run_tags, run_tags.c.tag),
    )
