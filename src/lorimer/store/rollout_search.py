"""Finds the rollouts of a run: filtered, sorted and read page by page from a cursor, and counted by step and reward.

A query is words, which all occur in a rollout's text, and conditions such as ``step>=10 kind=rollout reward<0.5
stop=length``. A page costs the same wherever it is, and counting reads each row of the run once.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, and_, exists, func, not_, select, tuple_

from lorimer.errors import InvalidInput
from lorimer.store.conditions import Condition, compare, parse, required_number
from lorimer.store.rollouts import StoredRollout
from lorimer.store.tables import rollout_texts, rollouts
from lorimer.types.rollouts import RolloutStep

_COLUMNS = [rollouts.c[field.name] for field in fields(StoredRollout)]
_NUMBERS = {
    "step": rollouts.c.step,
    "reward": rollouts.c.reward,
    "advantage": rollouts.c.advantage,
    "length": rollouts.c.num_tokens,
    "turns": rollouts.c.num_turns,
    "number": rollouts.c.number,
    "id": rollouts.c.rollout_id,
}
_TEXTS = {
    "kind": rollouts.c.kind,
    "split": rollouts.c.split,
    "group": rollouts.c.group_name,
    "stop": rollouts.c.stop_reason,
    "prompt": rollouts.c.prompt_key,
}
ACCEPTED = ", ".join([*_NUMBERS, *_TEXTS, "error", "tag"])
SORTS = ("step", "reward", "length", "advantage")
_CURSOR = re.compile(r"([-+.e0-9]{0,32})_(\d{1,19})", re.ASCII)


@dataclass(frozen=True)
class Scope:
    run_id: str
    query: str = ""


@dataclass(frozen=True)
class Page:
    rows: list[StoredRollout]
    next_cursor: str | None
    """None if there are no more."""


# ── conditions ────────────────────────────────────────────────────────────────────────────────────────


def _where(scope: Scope) -> ColumnElement[bool]:
    terms = [rollouts.c.run_id == scope.run_id]
    words: list[ColumnElement[bool]] = []
    for term in parse(scope.query):
        if isinstance(term, Condition):
            terms.append(_condition(term))
        elif term:
            words.append(rollout_texts.c.text.contains(term.casefold(), autoescape=True))
    if words:
        terms.append(exists().where(rollout_texts.c.rollout_id == rollouts.c.rollout_id, *words))
    return and_(*terms)


def _condition(term: Condition) -> ColumnElement[bool]:
    if term.name in _NUMBERS:
        return compare(_NUMBERS[term.name], term.sign, required_number(term), term.value == "")
    if term.name not in (*_TEXTS, "error", "tag"):
        raise InvalidInput(f"there is no field {term.name[:80]!r}; accepted are {ACCEPTED}; quotes make it text")
    if term.sign not in ("=", "!="):
        raise InvalidInput(f"{term.name} is compared with {term.sign!r}; = and != are accepted")
    if term.name in _TEXTS:
        is_absent = term.value == "" and term.name == "stop"
        return compare(_TEXTS[term.name], term.sign, term.value, is_absent)
    if term.name == "tag":
        found = rollouts.c.tags.contains(f"\n{term.value}\n", autoescape=True) if term.value else rollouts.c.tags == ""
        return found if term.sign == "=" else not_(found)
    if term.value not in ("yes", "no"):
        raise InvalidInput(f"error is compared with {term.value[:80]!r}; yes and no are accepted")
    return rollouts.c.has_errors == ((term.value == "yes") == (term.sign == "="))


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────────


def find(c: Connection, scope: Scope, *, sort: str, limit: int, after: str | None) -> Page:
    """Return a page of rollouts. ``sort`` is a name, descending after ``-``; those without a value are last."""
    is_descending, column = sort.startswith("-"), _sorted_column(sort)
    value, last_id = _read_cursor(after)
    where = _where(scope)
    rows: list[StoredRollout] = []
    place: Sequence[Any] | None
    if after is None or value is not None:
        place = None if after is None else (value, last_id)
        rows = _read(c, where & column.is_not(None), (column, rollouts.c.rollout_id), is_descending, place, limit + 1)
        last_id = 0
    if column.nullable and len(rows) <= limit:
        place = (last_id,) if last_id else None
        room = limit + 1 - len(rows)
        rows += _read(c, where & column.is_(None), (rollouts.c.rollout_id,), is_descending, place, room)
    has_more = len(rows) > limit
    return Page(rows[:limit], cursor_after(rows[limit - 1], sort) if has_more and limit else None)


def cursor_after(row: StoredRollout, sort: str) -> str:
    """Return the cursor of the rollouts that follow one."""
    value = getattr(row, _sorted_column(sort).key)
    return f"{'' if value is None else repr(value)}_{row.rollout_id}"


def _sorted_column(sort: str) -> Any:
    name = sort.removeprefix("-")
    if name not in SORTS:
        raise InvalidInput(f"rollouts are not sorted by {sort[:80]!r}; accepted are {', '.join(SORTS)}, or -NAME")
    return _NUMBERS[name]


def _read_cursor(text: str | None) -> tuple[float | None, int]:
    found = _CURSOR.fullmatch(text or "_0")
    try:
        if found is not None and int(found[2]) < 2**63:
            return float(found[1]) if found[1] else None, int(found[2])
    except ValueError:
        pass
    raise InvalidInput(f"after is {(text or '')[:80]!r}; the cursor of an earlier answer is accepted")


def _read(
    c: Connection,
    where: ColumnElement[bool],
    keys: Sequence[ColumnElement[Any]],
    is_descending: bool,
    place: Sequence[Any] | None,
    limit: int,
) -> list[StoredRollout]:
    if place is not None:
        here = tuple_(*keys)
        where &= here < tuple_(*place) if is_descending else here > tuple_(*place)
    order = [key.desc() if is_descending else key for key in keys]
    return [StoredRollout(*row) for row in c.execute(select(*_COLUMNS).where(where).order_by(*order).limit(limit))]


def count(c: Connection, scope: Scope) -> int:
    return c.execute(select(func.count()).select_from(rollouts).where(_where(scope))).scalar_one()


def get(c: Connection, run_id: str, rollout_id: int) -> StoredRollout | None:
    wanted = (rollouts.c.rollout_id == rollout_id) & (rollouts.c.run_id == run_id)
    row = c.execute(select(*_COLUMNS).where(wanted)).one_or_none()
    return None if row is None else StoredRollout(*row)


# ── counts ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Counts:
    steps: list[RolloutStep]
    edges: list[float]
    counts: list[int]
    values: dict[str, list[str]]


def count_steps(c: Connection, scope: Scope, num_bins: int) -> Counts:
    """Count the rollouts that match by step and by reward, and collect the words that they can be filtered by."""
    r = rollouts.c
    sums = func.count(), func.sum(r.num_tokens), func.count(r.num_tokens)
    keys = (r.step, r.reward, r.kind, r.split, r.stop_reason)
    found = c.execute(
        select(r.step, r.reward, *sums, *keys[2:]).where(_where(scope)).group_by(*keys).order_by(r.step)
    ).all()
    by_step: dict[int, list[Any]] = defaultdict(list)
    for row in found:
        by_step[row[0]].append(row)
    rewards = [row[1] for rows in by_step.values() for row in rows if row[1] is not None]
    edges = bin_edges(rewards, num_bins)
    steps = [_step(step, rows, edges) for step, rows in by_step.items()]
    totals = [sum(column) for column in zip(*(one.counts for one in steps), strict=True)]
    return Counts(steps, edges.tolist(), totals, _values(found))


def bin_edges(rewards: Sequence[float], num_bins: int) -> NDArray[np.float64]:
    """Return ascending borders from the smallest to the largest reward; fewer where floats do not tell them apart."""
    if not rewards:
        return np.array([], np.float64)
    low, high = min(rewards), max(rewards)
    if low == high:
        return np.array([low, high], np.float64)
    shares = np.arange(num_bins + 1) / num_bins
    return np.unique(low * (1 - shares) + high * shares)  # the difference of two floats may not be one


def _step(step: int, rows: Sequence[Any], edges: NDArray[np.float64]) -> RolloutStep:
    graded = [(row[1], row[2]) for row in rows if row[1] is not None]
    rewards, numbers = (np.array(column, np.float64) for column in zip(*graded, strict=True)) if graded else ((), ())
    counts = np.zeros(max(len(edges) - 1, 0), np.int64)
    if graded:
        places = np.searchsorted(edges, rewards, side="right") - 1
        np.add.at(counts, np.clip(places, 0, len(counts) - 1), np.asarray(numbers, np.int64))
    with np.errstate(over="ignore"):
        mean = float(np.average(rewards, weights=numbers)) if graded else None
    num_tokens, num_counted = sum(int(row[3] or 0) for row in rows), sum(row[4] for row in rows)
    return RolloutStep(
        step=step,
        num_rollouts=sum(row[2] for row in rows),
        mean_reward=mean,
        min_reward=float(min(rewards)) if graded else None,
        max_reward=float(max(rewards)) if graded else None,
        mean_tokens=num_tokens / num_counted if num_counted else None,
        counts=counts.tolist(),
    )


def _values(rows: Sequence[Any]) -> dict[str, list[str]]:
    """Return the kinds, splits and stop reasons of counted rows, most frequent first."""
    found: dict[str, dict[str, int]] = {"kind": {}, "split": {}, "stop": {}}
    for row in rows:
        for name, word in zip(found, row[5:], strict=True):
            if word is not None:
                found[name][word] = found[name].get(word, 0) + row[2]
    return {name: sorted(counts, key=lambda word: (-counts[word], word)) for name, counts in found.items()}
