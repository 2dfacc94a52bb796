"""The numbers of runs over their steps: what the engine answered to operations, and what clients report.

The table is a log, read on from a cursor. An entry of the engine is one operation: its step is worked out when it is
read, as one more than the optimiser steps before it, so that it is right in whatever order results came on record. An
entry of a client is one step: a name that is reported again is taken out of the older entry, so that the later value
counts and nothing grows by repetition. Entries go with their run.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, and_, delete, func, select, update

from lorimer.errors import TooLarge
from lorimer.store.tables import metric_names, metrics
from lorimer.types.metrics import reduce_metric

Source = Literal["engine", "client"]
Point = tuple[int, float, float]
"""Step, seconds since 1970, value."""

ROWS_AT_ONCE = 250
MOST_BYTES = 1024 * 1024
"""One reading ends after the entry with which it has so many: some fifty thousand values."""

_ADD = metrics.insert().inline()
_COLUMNS = [metrics.c[name] for name in ("entry_id", "source", "number", "is_step", "weight", "at", "data")]
_encode = msgspec.msgpack.Encoder().encode  # numbers that are not finite stay what they are
_decode = msgspec.msgpack.Decoder(dict[str, float]).decode


@dataclass(frozen=True)
class Report:
    """What a client measured in one step."""

    step: int
    at: float
    values: Mapping[str, float]


class Cursor(NamedTuple):
    """How far somebody has read, and how many steps they have seen, so that these are not counted again."""

    entry_id: int = 0
    ended_by: int = 0
    """The last operation that ended a step of the optimiser."""
    num_steps: int = 0
    """Up to that operation."""


START = Cursor()


@dataclass(frozen=True)
class Reading:
    series: dict[tuple[Source, str], list[Point]]
    """By source and name, in order of the steps."""
    cursor: Cursor
    has_more: bool


def add_operation(
    c: Connection, model_id: str, seq_id: int, values: Mapping[str, float], *, num_datums: int, is_step: bool
) -> None:
    """What the engine answered to an operation; ``is_step`` ends a step of the optimiser."""
    c.execute(_ADD, _row(model_id, "engine", seq_id, time.time(), values, num_datums, is_step))


def report(c: Connection, model_id: str, reports: Sequence[Report], *, most_names: int, most_values: int) -> int:
    """Keep what a client reports, in place of what it said before; the number of values, or ``TooLarge``."""
    by_step: dict[int, tuple[float, dict[str, float]]] = {}
    for item in reports:
        known = by_step.get(item.step, (0.0, {}))[1]
        by_step[item.step] = item.at, known | dict(item.values)
    by_step = {step: found for step, found in by_step.items() if found[1]}
    if not by_step:
        return 0
    _add_names(c, model_id, {name for _, values in by_step.values() for name in values}, most_names)
    _take_out(c, model_id, {step: values.keys() for step, (_, values) in by_step.items()})
    rows = [_row(model_id, "client", step, at, values, len(values)) for step, (at, values) in by_step.items()]
    c.execute(_ADD, rows)
    total = c.execute(select(func.sum(metrics.c.weight)).where(_of(model_id, "client"))).scalar_one()
    if total > most_values:
        raise TooLarge(
            f"the run would have {total} reported values; at most {most_values} is accepted (max_metric_values_per_run)"
        )
    return sum(row["weight"] for row in rows)


def read(c: Connection, model_id: str, after: Cursor = START, limit: int = 10_000) -> Reading:
    """What is new or was written again since ``after``: that of ``limit`` entries at most."""
    rows, has_more = _next_rows(c, model_id, after.entry_id, limit)
    points: dict[tuple[Source, str], dict[int, Point]] = defaultdict(dict)
    for row in rows:
        if row.source == "client":
            for name, value in _decode(row.data).items():
                points["client", name][row.number] = row.number, row.at, value
    cursor = after._replace(entry_id=rows[-1].entry_id) if rows else after
    if new := [row for row in rows if row.source == "engine"]:
        measured, cursor = _engine_points(c, model_id, new, after, cursor)
        for name, point in measured:
            points["engine", name][point[0]] = point
    series = {key: [found[step] for step in sorted(found)] for key, found in sorted(points.items())}
    return Reading(series, cursor, has_more)


def _next_rows(c: Connection, model_id: str, after: int, limit: int) -> tuple[list[Row[Any]], bool]:
    rows: list[Row[Any]] = []
    num_bytes, cursor = 0, after
    while True:
        wanted = and_(metrics.c.model_id == model_id, metrics.c.entry_id > cursor)
        query = select(*_COLUMNS).where(wanted).order_by(metrics.c.entry_id)
        found = c.execute(query.limit(ROWS_AT_ONCE)).all()
        for row in found:
            if len(rows) >= limit or num_bytes >= MOST_BYTES:
                return rows, True
            rows.append(row)
            num_bytes += len(row.data)
        if len(found) < ROWS_AT_ONCE:
            return rows, False
        cursor = found[-1].entry_id


def _engine_points(
    c: Connection, model_id: str, new: list[Row[Any]], after: Cursor, cursor: Cursor
) -> tuple[list[tuple[str, Point]], Cursor]:
    """The points that the new entries change, each of all operations of its step so far; where to go on."""
    first = min(row.number for row in new)
    seen = after if after.ended_by < first else START
    of_engine = and_(_of(model_id, "engine"), metrics.c.number > seen.ended_by)
    steps = select(func.count(), func.coalesce(func.max(metrics.c.number), seen.ended_by)).where(
        of_engine, metrics.c.is_step, metrics.c.number < first, metrics.c.entry_id <= cursor.entry_id
    )
    num_steps, ended_by = c.execute(steps).one()
    num_steps += seen.num_steps
    before = and_(of_engine, metrics.c.number > ended_by, metrics.c.entry_id <= after.entry_id)
    old = c.execute(select(*_COLUMNS).where(before)).all()
    # A step that came on record after later operations moves these to the steps behind it.
    first_end = min((row.number for row in new if row.is_step), default=None)
    moves = first_end is not None and any(row.number > first_end for row in old)
    steps_of: dict[int, list[tuple[Row[Any], dict[str, float]]]] = defaultdict(list)
    for row in sorted([*old, *new], key=lambda row: row.number):
        steps_of[num_steps + 1].append((row, _decode(row.data)))
        if row.is_step:
            num_steps, ended_by = num_steps + 1, row.number
    points = [
        (name, (step, parts[-1][0].at, _value(name, parts)))
        for step, parts in steps_of.items()
        for name in {name for row, values in parts if moves or row.entry_id > after.entry_id for name in values}
    ]
    return points, Cursor(cursor.entry_id, ended_by, num_steps)


def _value(name: str, parts: Sequence[tuple[Row[Any], dict[str, float]]]) -> float:
    found = [(values[name], row.weight) for row, values in parts if name in values]
    if len(found) == 1:
        return found[0][0]
    return reduce_metric(name, [value for value, _ in found], [weight for _, weight in found])


def _add_names(c: Connection, model_id: str, names: set[str], most: int) -> None:
    known = set(c.execute(select(metric_names.c.name).where(metric_names.c.model_id == model_id)).scalars())
    if len(known | names) > most:
        raise TooLarge(
            f"the run would have {len(known | names)} reported metrics; at most {most} is accepted "
            "(max_metric_names_per_run)"
        )
    if added := sorted(names - known):
        c.execute(metric_names.insert(), [{"model_id": model_id, "name": name} for name in added])


def _take_out(c: Connection, model_id: str, names_of: Mapping[int, Any]) -> None:
    """Drop what is about to be written again."""
    reported = and_(_of(model_id, "client"), metrics.c.number.in_(names_of))
    for row in c.execute(select(*_COLUMNS).where(reported)).all():
        values = _decode(row.data)
        rest = {name: value for name, value in values.items() if name not in names_of[row.number]}
        this = metrics.c.entry_id == row.entry_id
        if not rest:
            c.execute(delete(metrics).where(this))
        elif len(rest) < len(values):
            c.execute(update(metrics).where(this).values(data=_encode(rest), weight=len(rest)))


def _of(model_id: str, source: Source) -> ColumnElement[bool]:
    return and_(metrics.c.model_id == model_id, metrics.c.source == source)


def _row(
    model_id: str,
    source: Source,
    number: int,
    at: float,
    values: Mapping[str, float],
    weight: int,
    is_step: bool = False,
) -> dict[str, Any]:
    """``number`` is the operation's or the step's, ``weight`` how many datums or values there are."""
    return {
        "model_id": model_id,
        "source": source,
        "number": number,
        "is_step": is_step,
        "weight": weight,
        "at": at,
        "data": _encode(dict(values)),
    }
