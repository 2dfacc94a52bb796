"""The journal: each accepted operation, its payload while a replay may need it, and its result until it is fetched.

A row is committed before its request is answered, once per (lane, seq_id), and ends once: queued → done | failed |
rejected | abandoned | cancelled. A training run is a fold over its lane, so this invariant holds whatever is released
or expired:

    Above the run's snapshot_seq no row is deleted, and no payload of a queued or done operation is dropped,
    except that of a done ``forward``, which changes nothing. The same goes for the operation that created
    the run, until the run has a snapshot.

The scheduler decides when operations run; `blobs` stores the bytes.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Update,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    literal_column,
    or_,
    select,
    text,
    update,
)

from lorimer.store import blobs
from lorimer.store.statements import Statement
from lorimer.store.tables import blobs as contents
from lorimer.store.tables import futures, insert_for, runs
from lorimer.store.values import new_id, storable, utc_now

FutureState = Literal["queued", "done", "failed", "rejected", "abandoned", "cancelled"]
ResultFormat = Literal["json", "protobuf"]

STATELESS_KINDS = ("forward",)
"""Operations of a run that do not change its state."""


@dataclass(frozen=True)
class FutureRow:
    request_id: str
    user_id: str
    session_id: str | None
    kind: str
    lane: str
    """The scope of ``seq_id``: the run, the sampling session, or the session's models or losses."""
    seq_id: int | None
    state: FutureState
    error: str | None
    category: str | None
    received_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    fetched_at: datetime | None
    tokens: int
    result_format: ResultFormat | None
    result_size: int
    """Size in bytes; kept after the result is dropped."""
    payload_sha256: str
    """Distinguishes a retry from a different request with the same number."""
    place: str | None
    """The replica that computes it."""
    deaths: int = 0
    """How many engines died while they computed it."""


@dataclass(frozen=True)
class Expired:
    """What one call of `expire` freed."""

    results: int
    payloads: int
    rows: int


_IS_QUEUED = futures.c.state == literal_column("'queued'")  # a literal, so that partial indexes match
_COLUMNS = [futures.c[name] for name in FutureRow.__dataclass_fields__]
_GET = select(*_COLUMNS).where(futures.c.request_id == bindparam("id"))
_SAME_NUMBER = select(*_COLUMNS).where(futures.c.lane == bindparam("of_lane"), futures.c.seq_id == bindparam("seq"))
_QUEUED = and_(futures.c.request_id == bindparam("id"), futures.c.state == "queued")
_INSERT = Statement(lambda dialect: insert_for(dialect, futures).on_conflict_do_nothing())


def _finishing(dialect: str) -> Update:
    new = ("state", "started_at", "finished_at", "result_format", "result_size", "error", "category")
    finish = update(futures).where(_QUEUED).values({name: bindparam(f"new_{name}") for name in new})
    finish = finish.values(holds_bytes=True)
    # The id of the transaction that ended it: of two ends, the one that was visible first need not have the lower id,
    # but no id below that of the oldest open transaction is still to come.
    number: ColumnElement[int] = literal_column("CAST(CAST(pg_current_xact_id() AS text) AS bigint)")
    return finish.values(finished_no=number) if dialect == "postgresql" else finish


_FINISH = Statement(_finishing)
_OLDEST_OPEN = text("SELECT CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint)")
_FETCHED = update(futures).where(futures.c.request_id == bindparam("id")).values(fetched_at=bindparam("at"))


def accept(
    c: Connection,
    *,
    request_id: str | None = None,
    user_id: str,
    session_id: str | None,
    kind: str,
    lane: str,
    seq_id: int | None,
    payload: bytes,
    payload_sha256: str = "",
    tokens: int = 0,
    state: FutureState = "queued",
    error: str | None = None,
    category: str | None = None,
    place: str | None = None,
) -> tuple[FutureRow, bool]:
    """Insert the row of an operation; return it and whether it is new. The first row of a (lane, seq_id) wins."""
    now = utc_now()
    row = FutureRow(
        request_id=request_id or new_id(),
        user_id=user_id,
        session_id=session_id,
        kind=kind,
        lane=lane,
        seq_id=seq_id,
        state=state,
        error=None if error is None else storable(error),
        category=category,
        received_at=now,
        started_at=None,
        finished_at=None if state == "queued" else now,
        fetched_at=None,
        tokens=tokens,
        result_format=None,
        result_size=0,
        payload_sha256=payload_sha256 or hashlib.sha256(payload).hexdigest(),
        place=place,
    )
    if _INSERT.run(c, row.__dict__ | {"holds_bytes": bool(payload), "finished_no": None}) == 1:
        if payload:
            blobs.put(c, row.request_id, "payload", payload)
        return row, True
    known = None if seq_id is None else c.execute(_SAME_NUMBER, {"of_lane": lane, "seq": seq_id}).one_or_none()
    return _record(known or c.execute(_GET, {"id": row.request_id}).one()), False


def get(c: Connection, request_id: str) -> FutureRow | None:
    row = c.execute(_GET, {"id": request_id}).one_or_none()
    return None if row is None else _record(row)


def payload(c: Connection, request_id: str) -> bytes | None:
    """Return the payload, or None if it was dropped."""
    return blobs.get(c, request_id, "payload")


def result(c: Connection, request_id: str) -> bytes | None:
    """Return the result, or None if there is none yet or it was dropped."""
    return blobs.get(c, request_id, "result")


def finish(
    c: Connection,
    request_id: str,
    *,
    result: bytes,
    result_format: ResultFormat,
    started_at: datetime | None = None,
) -> bool:
    """Mark an operation done and store its result. Return False if it had already ended."""
    if not _end(c, request_id, "done", started_at=started_at, result_format=result_format, result_size=len(result)):
        return False
    blobs.put(c, request_id, "result", result)
    return True


def fail(
    c: Connection,
    request_id: str,
    *,
    error: str,
    category: str,
    state: FutureState = "failed",
    started_at: datetime | None = None,
) -> bool:
    """End an operation with an error. Return False if it had already ended."""
    return _end(c, request_id, state, started_at=started_at, error=storable(error), category=category)


def unfinished(c: Connection, place: str | None = None, request_ids: Collection[str] = ()) -> list[FutureRow]:
    """Return queued operations by lane and number; those without a number last, in order of arrival.

    Return all of them, or those of the replica ``place``, or of these only ``request_ids``.
    """
    order = (futures.c.lane, futures.c.seq_id.asc().nulls_last(), futures.c.received_at)
    query = select(*_COLUMNS).where(_IS_QUEUED)
    if place is not None:
        query = query.where(futures.c.place == place)
    if request_ids:
        query = query.where(futures.c.request_id.in_(list(request_ids)))
    return [_record(row) for row in c.execute(query.order_by(*order))]


def unfinished_lanes(c: Connection) -> list[str]:
    """Return the lanes with queued operations."""
    return list(c.execute(select(futures.c.lane).where(_IS_QUEUED).distinct()).scalars())


def unfinished_loads(c: Connection) -> list[bytes]:
    """Return the payloads of queued operations that load saved weights."""
    loads = futures.c.kind.in_(("load_weights", "create_model"))
    ids = list(c.execute(select(futures.c.request_id).where(_IS_QUEUED, loads)).scalars())
    return [found for request_id in ids if (found := payload(c, request_id))]


def num_unfinished(c: Connection, lane: str) -> int:
    return c.execute(select(func.count()).where(_IS_QUEUED, futures.c.lane == lane)).scalar_one()


def has_unfinished(c: Connection, lane: str) -> bool:
    return c.execute(select(exists().where(_IS_QUEUED, futures.c.lane == lane))).scalar_one()


def has_others(c: Connection, places: Collection[str]) -> bool:
    """Return whether a queued operation is at none of these replicas."""
    is_elsewhere = or_(futures.c.place.is_(None), futures.c.place.not_in(list(places)))
    return c.execute(select(exists().where(_IS_QUEUED, is_elsewhere))).scalar_one()


def waiting_at(c: Connection, places: Collection[str]) -> dict[str, tuple[datetime, bool]]:
    """Return when the oldest queued request of each of these replicas arrived, and whether one creates a run."""
    creates = func.max(case((futures.c.lane.like("%:models"), 1), else_=0))
    query = select(futures.c.place, func.min(futures.c.received_at), creates)
    found = c.execute(query.where(_IS_QUEUED, futures.c.place.in_(list(places))).group_by(futures.c.place))
    return {place: (received_at, bool(is_creating)) for place, received_at, is_creating in found}


def move(c: Connection, request_ids: Collection[str], place: str) -> None:
    """Assign queued operations to another replica."""
    if request_ids:
        chosen = and_(futures.c.request_id.in_(list(request_ids)), _IS_QUEUED)
        c.execute(update(futures).where(chosen).values(place=place))


def journal(c: Connection, lane: str, after_seq: int) -> list[FutureRow]:
    """Return the operations of a lane above a number, in order, whatever their state."""
    wanted = (futures.c.lane == lane) & (futures.c.seq_id > after_seq)
    return [_record(row) for row in c.execute(select(*_COLUMNS).where(wanted).order_by(futures.c.seq_id))]


def finished_after(
    c: Connection, lane: str, seq_ids: range, cursor: int, limit: int = 1000
) -> tuple[list[FutureRow], int]:
    """Return the operations of a lane that ended after ``cursor`` and were not fetched, and the next cursor.

    PostgreSQL only. One whose transaction is younger than another that is still open may be returned again, and so may
    those of a transaction that ended more than fit; none is left out.
    """
    oldest_open = c.execute(_OLDEST_OPEN).scalar_one()  # before the rows: all older transactions are visible to them
    chosen = and_(
        futures.c.lane == lane,
        futures.c.seq_id.between(seq_ids.start, seq_ids.stop - 1),
        futures.c.finished_no > cursor,
        futures.c.fetched_at.is_(None),
    )
    query = select(*_COLUMNS, futures.c.finished_no).where(chosen).order_by(futures.c.finished_no).limit(limit)
    rows = list(c.execute(query))
    last = rows[-1].finished_no - (len(rows) == limit) if rows else cursor
    return [_record(row[:-1]) for row in rows], max(cursor, min(last, oldest_open - 1))


def numbers_refused(c: Connection, numbers: Mapping[str, int]) -> dict[str, int]:
    """Return those of these (lane, seq_id) that were refused or given up, so that nothing will be computed for them."""
    found: dict[str, int] = {}
    for lane, seq_id in numbers.items():
        row = c.execute(_SAME_NUMBER, {"of_lane": lane, "seq": seq_id}).one_or_none()
        if row is not None and row.state in ("rejected", "abandoned"):
            found[lane] = seq_id
    return found


def count_unfinished(c: Connection) -> list[tuple[str, str, str, int, int]]:
    """Return the queued requests by user, kind and lane: their number and their tokens."""
    keys = (futures.c.user_id, futures.c.kind, futures.c.lane)
    query = select(*keys, func.count(), func.sum(futures.c.tokens)).where(_IS_QUEUED).group_by(*keys)
    return [(user, kind, lane, count, int(tokens)) for user, kind, lane, count, tokens in c.execute(query)]


def history(c: Connection, session_id: str, limit: int) -> list[FutureRow]:
    """Return the session's newest operations in order of arrival."""
    query = select(*_COLUMNS).where(futures.c.session_id == session_id).order_by(futures.c.received_at.desc())
    return [_record(row) for row in c.execute(query.limit(limit))][::-1]


def newest_of_lane(c: Connection, lane: str, before: int, limit: int) -> list[FutureRow]:
    """Return the operations of a lane below a number, newest first."""
    wanted = (futures.c.lane == lane) & (futures.c.seq_id < before)
    query = select(*_COLUMNS).where(wanted).order_by(futures.c.seq_id.desc()).limit(limit)
    return [_record(row) for row in c.execute(query)]


def deaths_of_lane(c: Connection, lane: str, limit: int) -> list[FutureRow]:
    """Return the newest operations of a lane during which an engine died, oldest first."""
    wanted = (futures.c.lane == lane) & (futures.c.deaths > literal_column("0"))
    query = select(*_COLUMNS).where(wanted).order_by(futures.c.seq_id.desc()).limit(limit)
    return [_record(row) for row in c.execute(query)][::-1]


def newest_errors(c: Connection, user_id: str, limit: int) -> list[FutureRow]:
    """Return the user's failed requests, newest first."""
    ended = (futures.c.user_id == user_id) & futures.c.error.is_not(None)
    query = select(*_COLUMNS).where(ended).order_by(futures.c.finished_at.desc()).limit(limit)
    return [_record(row) for row in c.execute(query)]


def session_errors(c: Connection, session_id: str, limit: int) -> list[FutureRow]:
    """Return the session's failed requests, newest first."""
    failed = (futures.c.session_id == session_id) & futures.c.error.is_not(None)
    query = select(*_COLUMNS).where(failed).order_by(futures.c.received_at.desc()).limit(limit)
    return [_record(row) for row in c.execute(query)]


def mark_fetched(c: Connection, fetched: dict[str, datetime]) -> None:
    """Record when clients received results. Callers buffer these and write them in bulk."""
    if fetched:
        c.execute(_FETCHED, [{"id": request_id, "at": at} for request_id, at in fetched.items()])


def record_death(c: Connection, request_ids: Iterable[str]) -> None:
    """Count the death of an engine against the operations that it was computing."""
    chosen = and_(_IS_QUEUED, futures.c.request_id.in_(list(request_ids)))
    c.execute(update(futures).where(chosen).values(deaths=futures.c.deaths + 1))


def release(c: Connection, request_ids: Iterable[str]) -> None:
    """Drop results, and payloads that no replay needs; keep the rows. Queued operations are not touched."""
    chosen = and_(futures.c.request_id.in_(list(request_ids)), futures.c.state != "queued")
    _drop_bytes(c, list(c.execute(select(futures.c.request_id, _needed().label("is_needed")).where(chosen))))


def drop_payloads(c: Connection, lane: str, up_to_seq: int) -> int:
    """Drop the payloads of ended operations up to a number, except those a replay needs. Return how many."""
    chosen = and_(futures.c.lane == lane, futures.c.seq_id <= up_to_seq, futures.c.holds_bytes)
    ids = list(c.execute(select(futures.c.request_id).where(chosen, futures.c.state != "queued", ~_needed())).scalars())
    dropped = blobs.drop(c, ids, "payload")
    _mark_empty(c, ids)
    return dropped


def expire(
    c: Connection,
    *,
    now: datetime,
    fetched_before: datetime,
    finished_before: datetime,
    rows_before: datetime,
    limit: int = 500,
) -> Expired:
    """Free results that were fetched or have expired, and delete rows that ended before ``rows_before``.

    Looks at up to ``limit`` rows of each kind, so that the writer is not blocked. Call again until nothing is freed.
    """
    fetched = futures.c.fetched_at < min(fetched_before, now)
    waited = futures.c.finished_at < min(finished_before, now)
    results = payloads = 0
    for due in (fetched, waited):
        ended = select(futures.c.request_id, _needed().label("is_needed")).where(futures.c.holds_bytes, due)
        with_results = exists().where(contents.c.owner == futures.c.request_id, contents.c.part == "result")
        found = list(c.execute(ended.where(futures.c.state != "queued", or_(with_results, ~_needed())).limit(limit)))
        freed = _drop_bytes(c, found)
        results, payloads = results + freed[0], payloads + freed[1]
    old = and_(futures.c.finished_at < min(rows_before, now), futures.c.state != "queued", ~_above_snapshot())
    ids = list(c.execute(select(futures.c.request_id).where(old).limit(limit)).scalars())
    if ids:
        blobs.drop(c, ids)
        c.execute(delete(futures).where(futures.c.request_id.in_(ids)))
    return Expired(results, payloads, len(ids))


def _record(row: Row[Any] | tuple[Any, ...]) -> FutureRow:
    return FutureRow(*tuple(row))


def _end(c: Connection, request_id: str, state: FutureState, **values: Any) -> bool:
    blank = {"started_at": None, "result_format": None, "result_size": 0, "error": None, "category": None}
    new = blank | values | {"state": state, "finished_at": utc_now()}
    return _FINISH.run(c, {"id": request_id} | {f"new_{name}": value for name, value in new.items()}) == 1


def _above_snapshot() -> ColumnElement[bool]:
    """Select rows that a replay of their run would start before."""
    of_run = and_(runs.c.model_id == futures.c.lane, runs.c.snapshot_seq < futures.c.seq_id)
    creates = and_(
        futures.c.lane == runs.c.session_id + ":models",
        runs.c.session_id == futures.c.session_id,
        runs.c.model_seq_id == futures.c.seq_id,
        runs.c.snapshot_name.is_(None),
    )
    return or_(exists().where(of_run), exists().where(creates))


def _needed() -> ColumnElement[bool]:
    """Select rows whose payload must still run, or run again after a crash."""
    changed = and_(futures.c.state == "done", futures.c.kind.not_in(STATELESS_KINDS), _above_snapshot())
    return or_(futures.c.state == "queued", changed)


def _drop_bytes(c: Connection, rows: list[Row[Any]]) -> tuple[int, int]:
    """Drop the results of these (request_id, is_needed) rows, and the payloads of those not needed."""
    ids = [row.request_id for row in rows]
    free = [row.request_id for row in rows if not row.is_needed]
    counts = blobs.drop(c, ids, "result"), blobs.drop(c, free, "payload")
    _mark_empty(c, ids)
    return counts


def _mark_empty(c: Connection, ids: list[str]) -> None:
    if ids:
        empty = and_(futures.c.request_id.in_(ids), ~exists().where(contents.c.owner == futures.c.request_id))
        c.execute(update(futures).where(empty).values(holds_bytes=False))
