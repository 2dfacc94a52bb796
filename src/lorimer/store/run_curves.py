"""The curves of a run over all of its parts, and their summary: the last, smallest and largest value of each metric.

A later part supersedes what earlier parts measured from its first step on. Summaries are brought up to date in the
background (`summarise`) from a state per part, so that neither training nor lists of runs pay for them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection, delete, exists, func, select, update

from lorimer.store import metrics
from lorimer.store.metrics import START, Choice, Cursor, Reading, Window
from lorimer.store.runs import Run
from lorimer.store.tables import insert, metric_states, run_metrics, runs, tracked_runs
from lorimer.store.tables import metrics as metrics_table
from lorimer.store.tracking import parts_of
from lorimer.types.runs import MetricSummary
from lorimer.types.thinning import Columns

ENTRIES_PER_READ = 10_000


class JoinedCursor(NamedTuple):
    """How far a reader has got in the parts of a run."""

    num_parts: int = 0
    part: int = 0
    cursor: Cursor = START


@dataclass(frozen=True)
class JoinedReading:
    reading: Reading
    cursor: JoinedCursor
    is_restarted: bool


def windows(parts: Sequence[Run]) -> list[Window]:
    """Return what each part contributes: its steps up to where a later part begins."""
    found: list[Window] = []
    last_engine: int | None = None
    last_client: int | None = None
    for part in reversed(parts):
        found.append(Window(part.optim_steps_before, last_engine, last_client))
        last_engine = _smaller(last_engine, part.optim_steps_before - 1)
        last_client = _smaller(last_client, None if part.first_step is None else part.first_step - 1)
    return found[::-1]


def _smaller(a: int | None, b: int | None) -> int | None:
    return min((one for one in (a, b) if one is not None), default=None)


def read(c: Connection, run_id: str, after: JoinedCursor, limit: int, choice: Choice) -> JoinedReading:
    """Return what is new since ``after`` over all parts, from about ``limit`` entries.

    Starts from the first point if a part was added since then, because it supersedes points that were read.
    """
    return _read(c, parts_of(c, run_id), after, Reading({}, START, False, 0), limit, choice)


def read_on(c: Connection, run_id: str, known: JoinedReading, limit: int, choice: Choice) -> JoinedReading:
    """Return ``known`` plus the entries after it, thinned together."""
    parts = parts_of(c, run_id)
    if known.cursor.num_parts != len(parts):  # the next read with its cursor starts again
        return replace(known, reading=replace(known.reading, has_more=False))
    return _read(c, parts, known.cursor, known.reading, limit, choice)


def _read(
    c: Connection, parts: Sequence[Run], after: JoinedCursor, known: Reading, limit: int, choice: Choice
) -> JoinedReading:
    is_restarted = after.num_parts not in (0, len(parts))
    position = after if after.num_parts == len(parts) else JoinedCursor()
    index, cursor = min(position.part, len(parts) - 1), position.cursor
    shown, wanted = windows(parts), known.num_entries + limit
    while True:
        chosen = replace(choice, window=shown[index])
        room = wanted - known.num_entries
        known = metrics.read_on(c, parts[index].model_id, replace(known, cursor=cursor), room, chosen)
        is_last = index == len(parts) - 1
        if known.has_more or is_last:
            return JoinedReading(known, JoinedCursor(len(parts), index, known.cursor), is_restarted)
        index, cursor = index + 1, START
        if known.num_entries >= wanted:
            reached = JoinedCursor(len(parts), index, START)
            return JoinedReading(replace(known, has_more=True), reached, is_restarted)


# ── summaries ─────────────────────────────────────────────────────────────────────────────────────────


class Extremes(msgspec.Struct, array_like=True):
    """A metric of one part. The newest point is apart, because the rest of its step may still change it."""

    newest_step: int = -1
    newest: float | None = None
    last_step: int | None = None
    last: float | None = None
    min_step: int | None = None
    min: float | None = None
    max_step: int | None = None
    max: float | None = None

    def settle(self) -> None:
        """Take the newest point, which will not change any more, into account."""
        if self.newest is not None:
            self._take([self.newest_step], [self.newest])

    def add(self, columns: Columns) -> bool:
        """Add points in ascending order. Return False if one changes a point that was settled before."""
        # Lists: a report has many metrics of a few points each, for which calls of numpy take longer.
        steps, values = columns.steps.tolist(), columns.values.tolist()
        if not steps:
            return True
        if steps[0] < self.newest_step:
            return False
        if steps[0] > self.newest_step:
            self.settle()
        newest_step, newest = steps.pop(), values.pop()
        if not all(map(math.isfinite, values)):
            is_finite = list(map(math.isfinite, values))
            steps, values = list(compress(steps, is_finite)), list(compress(values, is_finite))
        self._take(steps, values)
        self.newest_step, self.newest = newest_step, newest if math.isfinite(newest) else None
        return True

    def _take(self, steps: list[int], values: list[float]) -> None:
        if not values:
            return
        self.last_step, self.last = steps[-1], values[-1]
        low, high = min(values), max(values)
        if self.min is None or low < self.min:
            self.min_step, self.min = steps[values.index(low)], low
        if self.max is None or high > self.max:
            self.max_step, self.max = steps[values.index(high)], high


class State(msgspec.Struct):
    """How far a part is summarised."""

    window: tuple[int, int | None, int | None]
    cursor: tuple[int, int, int]
    num_steps: int
    series: dict[str, Extremes]
    """By name. A metric of the client hides the engine's of the same name."""
    from_client: list[str]


_decode = msgspec.msgpack.Decoder(State).decode
_encode = msgspec.msgpack.Encoder().encode


def _newest_entry(c: Connection) -> int:
    return c.execute(select(func.max(metrics_table.c.entry_id))).scalar() or 0


def changed_runs(c: Connection, after: int) -> tuple[list[str], int]:
    """Return the runs with metrics newer than an entry, and the newest entry."""
    newest = _newest_entry(c)
    if newest <= after:
        return [], newest
    query = select(runs.c.run_id).distinct().join(metrics_table, metrics_table.c.model_id == runs.c.model_id)
    found = c.execute(query.where(metrics_table.c.entry_id > after, runs.c.run_id.is_not(None))).scalars()
    return list(found), newest


def unsummarised_runs(c: Connection) -> tuple[list[str], int]:
    """Return the runs whose summaries may lack metrics, with which a new process begins, and the newest entry.

    The newest entry of all summaries would not do: runs whose summaries take long lag behind the others. Resumed runs
    are always among them, because the last entries of an interrupted part are never read.
    """
    newest = _newest_entry(c)
    summarised = func.coalesce(metric_states.c.entry_id, 0)
    lacks = exists().where(metrics_table.c.model_id == runs.c.model_id, metrics_table.c.entry_id > summarised)
    query = select(runs.c.run_id).distinct().outerjoin(metric_states, metric_states.c.model_id == runs.c.model_id)
    return list(c.execute(query.where(runs.c.run_id.is_not(None), lacks)).scalars()), newest


@dataclass(frozen=True)
class States:
    """The states of a run's parts, oldest first."""

    parts: list[tuple[str, State]]
    is_changed: bool
    """Whether one differs from what is stored."""


def advance(c: Connection, run_id: str) -> States:
    """Return the states of a run's parts with everything that was measured since, for `store_summary`."""
    parts = parts_of(c, run_id)
    stored = select(metric_states.c.model_id, metric_states.c.data).where(
        metric_states.c.model_id.in_([part.model_id for part in parts])
    )
    known = {row.model_id: row.data for row in c.execute(stored)}
    found = [
        (part.model_id, _advance(c, part, window, known.get(part.model_id)))
        for part, window in zip(parts, windows(parts), strict=True)
    ]
    return States(found, any(_encode(state) != known.get(model_id) for model_id, state in found))


def _advance(c: Connection, part: Run, window: Window, data: bytes | None) -> State:
    key = (window.optim_steps_before, window.last_engine_step, window.last_client_step)
    state = None if data is None else _decode(data)
    if state is not None and state.window == key and _read_into(c, part.model_id, state, window):
        return state
    state = State(key, START, 0, {}, [])
    is_whole = _read_into(c, part.model_id, state, window)
    assert is_whole, "points of one reading are in order"
    return state


def _read_into(c: Connection, model_id: str, state: State, window: Window) -> bool:
    """Add what is new to a state. Return False if a settled point changed, so that it must be built again."""
    from_client = set(state.from_client)
    while True:
        found = metrics.read(c, model_id, Cursor(*state.cursor), ENTRIES_PER_READ, Choice(window=window))
        for (source, name), columns in found.series.items():  # sorted: the client's before the engine's
            if source == "client" and name not in from_client:
                from_client.add(name)
                state.from_client.append(name)
                state.series.pop(name, None)
            elif source == "engine" and name in from_client:
                continue
            if not state.series.setdefault(name, Extremes()).add(columns):
                return False
        state.cursor, state.num_steps = found.cursor, found.cursor.num_steps
        if not found.has_more:
            return True


def store_summary(c: Connection, run_id: str, states: Iterable[tuple[str, State]]) -> None:
    """Store the states of a run's parts, the summary of its metrics, and its number of optimizer steps."""
    listed = list(states)
    known = set(c.execute(select(runs.c.model_id).where(runs.c.run_id == run_id)).scalars())
    if not listed or known != {model_id for model_id, _ in listed}:
        return  # the run was deleted or got another part meanwhile
    for model_id, state in listed:
        values = {"model_id": model_id, "entry_id": state.cursor[0], "data": _encode(state)}
        new = insert(c, metric_states).values(values)
        c.execute(new.on_conflict_do_update(index_elements=[metric_states.c.model_id], set_=values))
    rows = [{"run_id": run_id, **dict(one)} for one in combined([state for _, state in listed])]
    c.execute(delete(run_metrics).where(run_metrics.c.run_id == run_id))
    if rows:
        c.execute(run_metrics.insert(), rows)
    last = listed[-1][1]
    this = tracked_runs.c.run_id == run_id
    c.execute(update(tracked_runs).where(this).values(optim_steps=last.window[0] + last.num_steps))


def combined(states: Sequence[State]) -> list[MetricSummary]:
    """Combine the states of all parts, oldest first."""
    found: dict[str, Extremes] = {}
    for state in states:
        for name, part in state.series.items():
            settled = msgspec.structs.replace(part)
            settled.settle()
            found[name] = settled if name not in found else _joined(found[name], settled)
    return [
        MetricSummary(
            name=name,
            **{field: getattr(one, field) for field in ("last", "last_step", "min", "min_step", "max", "max_step")},
        )
        for name, one in sorted(found.items())
    ]


def _joined(a: Extremes, b: Extremes) -> Extremes:
    """Combine an earlier and a later part."""
    last = b if b.last is not None else a
    low = b if a.min is None or (b.min is not None and b.min < a.min) else a
    high = b if a.max is None or (b.max is not None and b.max > a.max) else a
    return Extremes(-1, None, last.last_step, last.last, low.min_step, low.min, high.max_step, high.max)
