"""Rollouts and samples of runs: rows that are filtered and sorted, the text that is searched, and the turns as blobs.

A rollout that is logged again replaces the earlier one and keeps its id. What a later part of the run begins with
supersedes what earlier parts logged from that step on. When a run has too many, its newest steps stay whole and older
ones are thinned evenly. `rollout_search` finds them.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

import orjson
from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, update

from lorimer.errors import TooLarge
from lorimer.store import blobs
from lorimer.store.tables import rollout_texts, rollouts, runs, tracked_runs
from lorimer.store.values import storable, utc_now
from lorimer.types.compression import compress_zstd, decompress
from lorimer.types.rollouts import Rollout, RolloutTurn

PREVIEW_CHARS = 200
_CONTENT = ("turns", "reward_parts", "errors", "seconds", "logs")
_ROWS_TOGETHER = 500
"""In one statement: SQLite limits the number of parameters."""


@dataclass(frozen=True)
class EncodedRollout:
    """A rollout as it is stored: the columns of its row, its text, and its content."""

    kind: str
    split: str
    step: int
    group_name: str
    number: int
    reward: float | None
    advantage: float | None
    num_tokens: int | None
    num_turns: int
    stop_reason: str | None
    has_errors: bool
    tags: str
    """Each between two line ends."""
    prompt_key: str
    prompt: str
    answer: str
    content_bytes: int
    text: str
    """What is searched, folded."""
    data: bytes
    """The turns and all that is only read, as compressed JSON."""

    @property
    def key(self) -> tuple[int, str, str, str, int]:
        return self.step, self.kind, self.split, self.group_name, self.number

    @property
    def stored_bytes(self) -> int:
        return len(self.data) + len(self.text)

    def values(self) -> dict[str, Any]:
        """Return the values of the row's columns."""
        values = asdict(self) | {"stored_bytes": self.stored_bytes}
        del values["text"], values["data"]
        return values


@dataclass(frozen=True)
class Limits:
    """How much is kept of one run."""

    max_rollouts: int
    max_bytes: int


@dataclass(frozen=True)
class StoredRollout:
    """The row of a rollout."""

    rollout_id: int
    model_id: str
    kind: str
    split: str
    step: int
    group_name: str
    number: int
    reward: float | None
    advantage: float | None
    num_tokens: int | None
    num_turns: int
    stop_reason: str | None
    has_errors: bool
    tags: str
    prompt_key: str
    prompt: str
    answer: str
    content_bytes: int
    created_at: datetime


# ── encoding ──────────────────────────────────────────────────────────────────────────────────────────


def encode(rollout: Rollout) -> EncodedRollout:
    """Return a rollout as it is stored. Needs no database: large requests are encoded in another process."""
    content = orjson.dumps(rollout.model_dump(include=set(_CONTENT), exclude_defaults=True))
    first = next((i for i, turn in enumerate(rollout.turns) if turn.is_sampled), len(rollout.turns))
    asked = rollout.turns[:first]
    sampled = [turn for turn in rollout.turns[first:] if turn.is_sampled]
    counts = [len(turn.tokens) for turn in sampled if turn.tokens is not None]
    return EncodedRollout(
        kind=rollout.kind,
        split=storable(rollout.split),
        step=rollout.step,
        group_name=storable(rollout.group),
        number=rollout.number,
        reward=rollout.reward,
        advantage=rollout.advantage,
        num_tokens=sum(counts) if counts else None,
        num_turns=len(rollout.turns),
        stop_reason=None if rollout.stop_reason is None else storable(rollout.stop_reason),
        has_errors=bool(rollout.errors) or any(call.error for turn in rollout.turns for call in turn.tool_calls),
        tags=storable("".join(f"\n{tag}\n" for tag in rollout.tags)),
        prompt_key=_prompt_key(asked),
        prompt=_one_line(asked[-1].content[-4 * PREVIEW_CHARS :])[-PREVIEW_CHARS:] if asked else "",
        answer=_one_line(sampled[-1].content[: 4 * PREVIEW_CHARS])[:PREVIEW_CHARS] if sampled else "",
        content_bytes=len(content),
        text=storable("\n".join(_searched(rollout)).casefold()),
        data=compress_zstd(content),
    )


def _prompt_key(turns: Sequence[RolloutTurn]) -> str:
    text = orjson.dumps([[storable(turn.role), storable(turn.content)] for turn in turns])
    return hashlib.sha256(text).hexdigest()[:32]


def _one_line(text: str) -> str:
    return storable(" ".join(text.split()))


def _searched(rollout: Rollout) -> Iterable[str]:
    for turn in rollout.turns:
        yield turn.content
        for call in turn.tool_calls:
            yield f"{call.name} {call.arguments} {call.result or ''} {call.error or ''}"
        yield from (f"{name} {value}" for name, value in turn.logs.items())
    yield from rollout.errors
    yield from (f"{name} {value}" for name, value in rollout.logs.items())


def read_content(c: Connection, row: StoredRollout) -> dict[str, Any]:
    """Return what a rollout has besides its row."""
    data = blobs.get(c, _owner(row.rollout_id), "payload")
    if data is None:  # removed since its row was read
        return {"turns": []}
    content: dict[str, Any] = orjson.loads(decompress(data, "zstd", row.content_bytes))
    return content


def expect_contents(c: Connection, rows: Iterable[StoredRollout]) -> None:
    """Announce that the contents of these are read next."""
    blobs.expect(c, [_owner(row.rollout_id) for row in rows], "payload")


def _owner(rollout_id: int) -> str:
    return f"rollout:{rollout_id}"


def bytes_of_user(c: Connection, user_id: str) -> int:
    """Return what the rollouts of all runs of a user take."""
    of_user = select(tracked_runs.c.run_id).where(tracked_runs.c.user_id == user_id)
    found = c.execute(select(func.sum(rollouts.c.stored_bytes)).where(rollouts.c.run_id.in_(of_user))).scalar()
    return int(found or 0)


def bytes_by_user(c: Connection) -> dict[str, int]:
    """Return what the rollouts of each user take; users without any are left out."""
    joined = rollouts.join(tracked_runs, tracked_runs.c.run_id == rollouts.c.run_id)
    sums = select(tracked_runs.c.user_id, func.sum(rollouts.c.stored_bytes)).select_from(joined)
    return {user_id: int(size) for user_id, size in c.execute(sums.group_by(tracked_runs.c.user_id))}


# ── changes ───────────────────────────────────────────────────────────────────────────────────────────


def log(
    c: Connection, run_id: str, model_id: str, encoded: Sequence[EncodedRollout], limits: Limits
) -> tuple[int, int]:
    """Store what a part of a run logs, and thin the run's older steps if it has too much.

    Return how many are stored, and how many are superseded by a later part. Raise ``TooLarge`` if the newest step alone
    exceeds the limits.
    """
    c.execute(select(tracked_runs.c.run_id).where(tracked_runs.c.run_id == run_id).with_for_update())
    end = _first_superseded_step(c, run_id, model_id)
    kept = {one.key: one for one in encoded if end is None or one.step < end}
    known = _known_ids(c, run_id, {one.step for one in kept.values()})
    shared = {"run_id": run_id, "model_id": model_id, "created_at": utc_now()}
    old = {known[key]: one for key, one in kept.items() if key in known}
    new = [one for key, one in kept.items() if key not in known]
    _drop_contents(c, list(old))
    for rollout_id, one in old.items():
        c.execute(update(rollouts).where(rollouts.c.rollout_id == rollout_id).values(one.values() | shared))
    ids: list[int] = []
    if new:
        added = insert(rollouts).returning(rollouts.c.rollout_id, sort_by_parameter_order=True)
        ids = list(c.execute(added, [one.values() | shared for one in new]).scalars())
    stored = list(old.items()) + list(zip(ids, new, strict=True))
    if stored:
        c.execute(insert(rollout_texts), [{"rollout_id": rollout_id, "text": one.text} for rollout_id, one in stored])
    for rollout_id, one in stored:
        blobs.put(c, _owner(rollout_id), "payload", one.data)
    thin(c, run_id, limits)
    return len(stored), len(encoded) - sum(end is None or one.step < end for one in encoded)


def _first_superseded_step(c: Connection, run_id: str, model_id: str) -> int | None:
    """Return the first step of a run that parts after this one log."""
    part = select(runs.c.created_at).where(runs.c.model_id == model_id).scalar_subquery()
    is_later = (runs.c.created_at > part) | ((runs.c.created_at == part) & (runs.c.model_id > model_id))
    found: int | None = c.execute(
        select(func.min(runs.c.first_step)).where(runs.c.run_id == run_id, is_later)
    ).scalar_one()
    return found


def _known_ids(c: Connection, run_id: str, steps: set[int]) -> dict[tuple[int, str, str, str, int], int]:
    r = rollouts.c
    key = (r.step, r.kind, r.split, r.group_name, r.number)
    query = select(*key, r.rollout_id).where(r.run_id == run_id, r.step.in_(steps))
    return {(row[0], row[1], row[2], row[3], row[4]): row[5] for row in c.execute(query)}


def supersede(c: Connection, run_id: str, first_step: int) -> None:
    """Remove what earlier parts logged from the step on that a new part begins with."""
    _remove(c, (rollouts.c.run_id == run_id) & (rollouts.c.step >= first_step))


def remove_all(c: Connection, run_id: str) -> None:
    _remove(c, rollouts.c.run_id == run_id)


def thin(c: Connection, run_id: str, limits: Limits) -> None:
    """Keep the newest steps, which may fill half of the limits, and of older ones the first of every 2, 4, 8, ... ."""
    of_run = rollouts.c.run_id == run_id
    sizes = func.count(), func.sum(rollouts.c.stored_bytes)
    query = select(rollouts.c.step, *sizes).where(of_run).group_by(rollouts.c.step).order_by(rollouts.c.step)
    steps = [(row[0], row[1], int(row[2])) for row in c.execute(query)]
    dropped = steps_to_drop(steps, limits)
    for start in range(0, len(dropped), _ROWS_TOGETHER):
        _remove(c, of_run & rollouts.c.step.in_(dropped[start : start + _ROWS_TOGETHER]))


def steps_to_drop(steps: Sequence[tuple[int, int, int]], limits: Limits) -> list[int]:
    """Return the steps that go, of those with their numbers of rollouts and bytes, in order.

    The longer a run gets, the further apart are the older steps that stay. They have been thinned before, so the
    search begins with how far apart the oldest ones are: what has become old since is thinned alike.
    """

    def fits(some: Sequence[tuple[int, int, int]], share: int) -> bool:
        count, size = sum(number for _, number, _ in some), sum(size for _, _, size in some)
        return count * share <= limits.max_rollouts and size * share <= limits.max_bytes

    if fits(steps, 1):
        return []
    if not fits(steps[-1:], 1):
        step, count, size = steps[-1]
        raise TooLarge(
            f"step {step} would have {count} rollouts of {size} bytes; at most {limits.max_rollouts} of"
            f" {limits.max_bytes} bytes are kept of a run (max_rollouts_per_run, max_rollout_bytes_per_run)"
        )
    num_newest = 1
    while num_newest < len(steps) and fits(steps[-num_newest - 1 :], 2):
        num_newest += 1
    older, newest = list(steps[:-num_newest]), list(steps[-num_newest:])
    steps_apart = min((b[0] - a[0] for a, b in pairwise(older[: len(older) // 2 + 1])), default=1)
    size, first, kept = 1 << (steps_apart.bit_length() - 1), older[0][0], older
    while kept and not fits(kept + newest, 1):
        kept = list({(one[0] - first) // size: one for one in reversed(older)}.values())
        if size > older[-1][0] - first and not fits(kept + newest, 1):
            kept = []
        size *= 2
    stays = {step for step, _, _ in kept}
    return [step for step, _, _ in older if step not in stays]


def _remove(c: Connection, wanted: ColumnElement[bool]) -> None:
    ids = list(c.execute(select(rollouts.c.rollout_id).where(wanted)).scalars())
    _drop_contents(c, ids)
    for start in range(0, len(ids), _ROWS_TOGETHER):
        c.execute(delete(rollouts).where(rollouts.c.rollout_id.in_(ids[start : start + _ROWS_TOGETHER])))


def _drop_contents(c: Connection, ids: Sequence[int]) -> None:
    for start in range(0, len(ids), _ROWS_TOGETHER):
        some = ids[start : start + _ROWS_TOGETHER]
        c.execute(delete(rollout_texts).where(rollout_texts.c.rollout_id.in_(some)))
        blobs.drop(c, [_owner(rollout_id) for rollout_id in some])
