"""Metrics of runs by step: measured by the engine or reported by clients.

The table is a log, read from a cursor. An engine entry is one operation: its step is computed on reading, as the
number of optimizer steps before it, so it is correct in whatever order results were committed. Steps count from 0, as
those of the cookbook's loops do. A client entry is one step: a metric that is reported again is removed from the older
entry, so the later value wins. Entries are deleted with their run. `metric_series` turns entries into series.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from sqlalchemy import ColumnElement, Connection, and_, delete, func, or_, select, update

from lorimer.errors import TooLarge
from lorimer.store import client_steps
from lorimer.store.client_steps import ClientSteps
from lorimer.store.metric_series import FIELDS, Entries, client_series, decode, encode, engine_series
from lorimer.store.tables import metric_names, metric_totals, metrics
from lorimer.types.thinning import POINTS_PER_BUCKET, Columns, join, thin

Source = Literal["engine", "client"]

FIRST_ROWS_READ = 250
MAX_ROWS_PER_READ = 4000
MAX_BYTES = 1024 * 1024
"""A read stops after the entry that reaches this size, about fifty thousand values."""
MAX_BYTES_TO_THIN = 4 * MAX_BYTES
"""The same limit if the result is thinned."""
MAX_THINNED_POINTS = 60_000
"""The limit for all series together, so that a run with very many metrics has fewer points in each."""
LAST_NUMBER = 2**63 - 1

_ADD = metrics.insert().inline()
_COLUMNS = [metrics.c[name] for name in FIELDS]


@dataclass(frozen=True)
class Report:
    """What a client measured in one step."""

    step: int
    at: float | None
    values: Mapping[str, float]
    optim_steps: int | None = None
    """The optimizer steps done by the end of the step; see `client_steps`."""


@dataclass(frozen=True)
class EncodedReport:
    """All that was measured in one step, as it is stored."""

    step: int
    at: float | None
    """None is the time of storing."""
    num_values: int
    data: bytes
    optim_steps: int | None = None


class Cursor(NamedTuple):
    """How far a reader has got, and how many steps it has seen, so that these need not be counted again."""

    entry_id: int = 0
    ended_by: int = 0
    """The last operation that ended an optimizer step."""
    num_steps: int = 0
    """The number of steps up to that operation."""


START = Cursor()


@dataclass(frozen=True)
class Choice:
    """Selects points by name and by a range of steps, and limits the number of points per series."""

    names: Collection[str] | None = None
    steps: tuple[int, int] | None = None
    max_points: int | None = None
    window: "Window | None" = None


@dataclass(frozen=True)
class Window:
    """What a training run contributes to the curves of a run with several parts, in the steps of that run."""

    optim_steps_before: int = 0
    """Added to the steps of the engine's metrics."""
    last_engine_step: int | None = None
    last_client_step: int | None = None
    """None if no later part supersedes a step."""

    @property
    def is_cut(self) -> bool:
        return self.last_engine_step is not None or self.last_client_step is not None


ALL = Choice()

Steps = tuple[int, int]


def _chosen_steps(choice: Choice, counted: ClientSteps | None) -> tuple[Steps, Steps] | None:
    """Return the steps of client and engine entries, the latter in the training run's own count; None if all."""
    window = choice.window or Window()
    if choice.steps is None and not window.is_cut:
        return None
    first, last = choice.steps or (0, LAST_NUMBER)
    last_client = last if window.last_client_step is None else min(last, window.last_client_step)
    if counted is not None:
        return (first, last_client), counted.optim_steps(first, last_client)
    last_engine = last if window.last_engine_step is None else min(last, window.last_engine_step)
    before = window.optim_steps_before
    return (first, last_client), (max(first - before, 0), last_engine - before)


@dataclass(frozen=True)
class Reading:
    series: dict[tuple[Source, str], Columns]
    cursor: Cursor
    has_more: bool
    num_entries: int


def add_operation(
    c: Connection,
    model_id: str,
    seq_id: int,
    values: Mapping[str, float],
    *,
    num_datums: int = 1,
    is_step: bool = False,
) -> None:
    """Add the metrics that the engine returned for an operation; ``is_step`` ends an optimizer step."""
    c.execute(_ADD, _row(model_id, "engine", seq_id, time.time(), encode(dict(values)), num_datums, is_step))


def count_steps(c: Connection, model_id: str, before: int = LAST_NUMBER) -> int:
    """Return the number of optimizer steps that a training run has done before an operation."""
    ended = and_(_of(model_id, "engine"), metrics.c.is_step, metrics.c.number < before)
    return c.execute(select(func.count()).select_from(metrics).where(ended)).scalar_one()


def encode_reports(reports: Iterable[Report]) -> tuple[list[EncodedReport], list[str]]:
    """Merge the reports of each step, of which the later value wins, and return them with the names in them.

    Needs no database: for a large report this takes longest, and is done in another process.
    """
    by_step: dict[int, Report] = {}
    for item in reports:
        if known := by_step.get(item.step):
            counted = known.optim_steps if item.optim_steps is None else item.optim_steps
            item = Report(item.step, item.at, dict(known.values) | dict(item.values), counted)
        by_step[item.step] = item
    encoded = [
        EncodedReport(one.step, one.at, len(one.values), encode(dict(one.values)), one.optim_steps)
        for one in by_step.values()
        if one.values
    ]
    return encoded, sorted({name for one in by_step.values() for name in one.values})


def report(
    c: Connection,
    model_id: str,
    reports: Sequence[EncodedReport],
    names: Sequence[str],
    *,
    max_names: int,
    max_values: int,
) -> int:
    """Store reported values, replacing earlier ones of the same step and name.

    Return their number, or raise ``TooLarge``.
    """
    if not reports:
        return 0
    _add_names(c, model_id, set(names), max_names)
    num_taken = _remove_replaced(c, model_id, {item.step: item.data for item in reports})
    now = time.time()
    c.execute(
        _ADD,
        [
            _row(model_id, "client", item.step, now if item.at is None else item.at, item.data, item.num_values)
            | {"optim_steps": item.optim_steps}
            for item in reports
        ],
    )
    num_added = sum(item.num_values for item in reports)
    _count(c, model_id, num_added - num_taken, max_values)
    return num_added


def read(c: Connection, model_id: str, after: Cursor = START, limit: int = 10_000, choice: Choice = ALL) -> Reading:
    """Return what is new or rewritten since ``after``, from up to ``limit`` entries."""
    wanted = metrics.c.model_id == model_id
    counted = client_steps.read(c, model_id)
    if (steps := _chosen_steps(choice, counted)) is not None:
        wanted &= _of_steps(c, model_id, *steps)
    entries, has_more = _next_entries(c, wanted, after.entry_id, limit, choice)
    if has_more and choice.max_points is not None:
        entries = _to_end_of_step(entries)
    num_entries = len(entries.ids)
    cursor = after._replace(entry_id=int(entries.ids[-1])) if num_entries else after
    reported = client_series(entries.take(np.flatnonzero(entries.is_client)), choice.names)
    series: dict[tuple[Source, str], Columns] = {("client", name): found for name, found in reported.items()}
    new = entries.take(np.flatnonzero(~entries.is_client))
    measured: dict[str, Columns] = {}
    if counted is not None and num_entries:
        measured, cursor = _placed_series(c, model_id, new, after, cursor, choice, counted)
    elif len(new.ids):
        measured, cursor = _engine_series(c, model_id, new, after, cursor, choice)
    series |= {("engine", name): found for name, found in measured.items()}
    return Reading(_thinned(series, choice), cursor, has_more, num_entries)


def read_on(c: Connection, model_id: str, known: Reading, limit: int, choice: Choice) -> Reading:
    """Return ``known`` plus the entries after it, thinned together."""
    new = read(c, model_id, known.cursor, limit, choice)
    series = {
        key: join([found.series[key] for found in (known, new) if key in found.series])
        for key in known.series | new.series
    }
    return Reading(_thinned(series, choice), new.cursor, new.has_more, known.num_entries + new.num_entries)


def _thinned(series: dict[tuple[Source, str], Columns], choice: Choice) -> dict[tuple[Source, str], Columns]:
    if choice.max_points is not None:
        share = max(MAX_THINNED_POINTS // max(len(series), 1), POINTS_PER_BUCKET)
        series = {key: thin(found, min(choice.max_points, share)) for key, found in series.items()}
    return dict(sorted(series.items()))


def _next_entries(
    c: Connection, wanted: ColumnElement[bool], after: int, limit: int, choice: Choice
) -> tuple[Entries, bool]:
    max_bytes = MAX_BYTES if choice.max_points is None else MAX_BYTES_TO_THIN
    columns: list[list[Any]] = [[] for _ in FIELDS]
    num_bytes, cursor, num_rows = 0, after, FIRST_ROWS_READ
    while True:
        query = select(*_COLUMNS).where(wanted, metrics.c.entry_id > cursor).order_by(metrics.c.entry_id)
        found = c.execute(query.limit(num_rows)).all()
        room = limit - len(columns[0])
        num_taken = 0
        for row in found:
            if num_taken >= room or num_bytes >= max_bytes:
                break
            num_taken += 1
            num_bytes += len(row[-1])
        for column, values in zip(columns, zip(*found[:num_taken], strict=True), strict=False):
            column.extend(values)
        if num_taken < len(found) or len(found) < num_rows:
            return Entries.of_columns(columns), num_taken < len(found)
        cursor, num_rows = found[-1].entry_id, min(2 * num_rows, MAX_ROWS_PER_READ)


def _to_end_of_step(entries: Entries) -> Entries:
    """Return the entries up to the last one that ends a step: thinning must not choose the value of half a step."""
    ends = np.flatnonzero(entries.is_step)
    return entries.take(np.arange(ends[-1] + 1)) if len(ends) else entries


def _of_steps(c: Connection, model_id: str, by_client: Steps, of_engine: Steps) -> ColumnElement[bool]:
    """Select the entries of these steps. Bounds on the entry ids avoid scanning the log from its start."""
    parts = [and_(_of(model_id, "client"), metrics.c.number.between(*by_client))]
    first, last = of_engine
    before, end = _end_of_step(c, model_id, first - 1), _end_of_step(c, model_id, last)
    if last >= 0 and (first <= 0 or before is not None):
        by_engine = and_(_of(model_id, "engine"), metrics.c.number > (before or 0))
        parts.append(by_engine if end is None else and_(by_engine, metrics.c.number <= end))
    edges = func.min(metrics.c.entry_id), func.max(metrics.c.entry_id)
    found = [edge for part in parts for edge in c.execute(select(*edges).where(part)).one() if edge is not None]
    return and_(or_(*parts), metrics.c.entry_id.between(min(found, default=0), max(found, default=0)))


def _end_of_step(c: Connection, model_id: str, step: int) -> int | None:
    """Return the operation that ended an optimizer step, if it is committed."""
    if step < 0:
        return None
    ends = select(metrics.c.number).where(_of(model_id, "engine"), metrics.c.is_step).order_by(metrics.c.number)
    return c.execute(ends.limit(1).offset(step)).scalar()


def _engine_series(
    c: Connection, model_id: str, new: Entries, after: Cursor, cursor: Cursor, choice: Choice
) -> tuple[dict[str, Columns], Cursor]:
    """Return the points that the new entries change, over all operations of their steps so far, and the next cursor."""
    first = int(new.numbers.min())
    seen = after if after.ended_by < first else START
    of_engine = and_(_of(model_id, "engine"), metrics.c.number > seen.ended_by)
    steps = select(func.count(), func.coalesce(func.max(metrics.c.number), seen.ended_by)).where(
        of_engine, metrics.c.is_step, metrics.c.number < first
    )
    own_steps = _chosen_steps(choice, None)
    if own_steps is None:  # later log entries are read later, and correct these points then
        steps = steps.where(metrics.c.entry_id <= cursor.entry_id)
    num_new_steps, ended_by = c.execute(steps).one()
    num_steps = seen.num_steps + num_new_steps
    before = and_(of_engine, metrics.c.number > ended_by, metrics.c.entry_id <= after.entry_id)
    old = Entries.of(c.execute(select(*_COLUMNS).where(before)).all())
    # A step committed after later operations moves those operations into later steps.
    first_end = new.numbers[new.is_step].min(initial=LAST_NUMBER)
    moves = bool((old.numbers > first_end).any())
    entries = old.then(new)
    entries = entries.take(np.argsort(entries.numbers))
    series = engine_series(entries, (entries.ids > after.entry_id) | moves, num_steps, choice.names)
    if own_steps is not None:
        low, high = own_steps[1]
        kept = {name: one.take((one.steps >= low) & (one.steps <= high)) for name, one in series.items()}
        series = {name: one for name, one in kept.items() if len(one.steps)}
    if choice.window is not None and choice.window.optim_steps_before:
        shift = choice.window.optim_steps_before
        series = {name: replace(one, steps=one.steps + shift) for name, one in series.items()}
    ends = entries.numbers[entries.is_step]
    return series, Cursor(cursor.entry_id, int(ends[-1]) if len(ends) else ended_by, num_steps + len(ends))


def _placed_series(
    c: Connection,
    model_id: str,
    new: Entries,
    after: Cursor,
    cursor: Cursor,
    choice: Choice,
    counted: ClientSteps,
) -> tuple[dict[str, Columns], Cursor]:
    """Return the points of the client's steps that new operations or reports may have changed, and the next cursor."""
    of_engine = and_(_of(model_id, "engine"), metrics.c.entry_id <= cursor.entry_id)
    newest = LAST_NUMBER
    if len(new.ids):
        first = int(new.numbers.min())
        seen = after if after.ended_by < first else START
        ended = and_(of_engine, metrics.c.is_step, metrics.c.number > seen.ended_by, metrics.c.number < first)
        newest = seen.num_steps + c.execute(select(func.count()).select_from(metrics).where(ended)).scalar_one()
    start = counted.first_unsettled(after.entry_id, newest)
    begun_after = _end_of_step(c, model_id, start - 1) or 0
    rows = select(*_COLUMNS).where(of_engine, metrics.c.number > begun_after).order_by(metrics.c.number)
    entries = Entries.of(c.execute(rows).all())
    if not len(entries.ids):
        return {}, cursor
    series = engine_series(entries, np.ones(len(entries.ids), np.bool_), start, choice.names, counted.place)
    if (steps := _chosen_steps(choice, counted)) is not None:
        low, high = steps[0]
        kept = {name: one.take((one.steps >= low) & (one.steps <= high)) for name, one in series.items()}
        series = {name: one for name, one in kept.items() if len(one.steps)}
    ends = entries.numbers[entries.is_step]
    return series, Cursor(cursor.entry_id, int(ends[-1]) if len(ends) else begun_after, start + len(ends))


def _add_names(c: Connection, model_id: str, names: set[str], maximum: int) -> None:
    known = set(c.execute(select(metric_names.c.name).where(metric_names.c.model_id == model_id)).scalars())
    if len(known | names) > maximum:
        raise TooLarge(
            f"the run would have {len(known | names)} reported metrics; at most {maximum} is accepted "
            "(max_metric_names_per_run)"
        )
    if added := sorted(names - known):
        c.execute(metric_names.insert(), [{"model_id": model_id, "name": name} for name in added])


def _count(c: Connection, model_id: str, number: int, maximum: int) -> None:
    """Update the run's number of values, which is stored because counting a long run is too slow."""
    of_run = metric_totals.c.model_id == model_id
    known = c.execute(select(metric_totals.c.num_values).where(of_run)).scalar()
    total = (known or 0) + number
    if total > maximum:
        raise TooLarge(
            f"the run would have {total} reported values; at most {maximum} is accepted (max_metric_values_per_run)"
        )
    if known is None:
        c.execute(metric_totals.insert(), {"model_id": model_id, "num_values": total})
    elif number:
        c.execute(update(metric_totals).where(of_run).values(num_values=total))


def _remove_replaced(c: Connection, model_id: str, data_of: Mapping[int, bytes]) -> int:
    """Remove the values that the new data of each step replaces. Return how many were removed."""
    num_taken = 0
    reported = and_(_of(model_id, "client"), metrics.c.number.in_(data_of))
    for row in c.execute(select(*_COLUMNS).where(reported)).all():
        new, rest = data_of[row.number], dict[str, float]()
        if row.data != new:  # a client that got no answer reports the same again
            again = decode(new).keys()
            rest = {name: value for name, value in decode(row.data).items() if name not in again}
        num_taken += row.weight - len(rest)
        this = metrics.c.entry_id == row.entry_id
        if not rest:
            c.execute(delete(metrics).where(this))
        elif len(rest) < row.weight:
            c.execute(update(metrics).where(this).values(data=encode(rest), weight=len(rest)))
    return num_taken


def _of(model_id: str, source: Source) -> ColumnElement[bool]:
    return and_(metrics.c.model_id == model_id, metrics.c.source == source)


def _row(
    model_id: str,
    source: Source,
    number: int,
    at: float,
    data: bytes,
    weight: int,
    is_step: bool = False,
) -> dict[str, Any]:
    """Build a row. ``number`` is the operation or the step, ``weight`` the number of datums or values."""
    return {
        "model_id": model_id,
        "source": source,
        "number": number,
        "is_step": is_step,
        "weight": weight,
        "at": at,
        "data": data,
        "optim_steps": None,
    }
