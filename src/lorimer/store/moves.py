"""Assigns runs to replicas, and records in the audit log when a run moves from one replica to another."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, select, update

from lorimer.store import audit
from lorimer.store.tables import audit as entries
from lorimer.store.tables import futures, runs

EVENT = "run_moved"


@dataclass(frozen=True)
class Move:
    at: datetime
    model_id: str
    from_replica: str
    to_replica: str


def place(c: Connection, model_id: str, replica: str) -> None:
    """Assign a run to a replica. An id that no run has is ignored."""
    query = select(runs.c.user_id, runs.c.replica).where(runs.c.model_id == model_id).with_for_update()
    found = c.execute(query).one_or_none()
    if found is not None and found.replica != replica:
        before = found.replica or _last_place(c, model_id)
        c.execute(update(runs).where(runs.c.model_id == model_id).values(replica=replica))
        _record(c, found.user_id, model_id, before, replica)


def place_free(c: Connection, model_id: str, replica: str) -> None:
    """Assign a run that no replica holds."""
    free = (runs.c.model_id == model_id) & runs.c.replica.is_(None)
    user_id = c.execute(select(runs.c.user_id).where(free)).scalar_one_or_none()
    if user_id is None:  # most runs have a replica: write nothing
        return
    if c.execute(update(runs).where(free).values(replica=replica)).rowcount:
        _record(c, user_id, model_id, _last_place(c, model_id), replica)


def recent(c: Connection, user_id: str, since: datetime, limit: int) -> list[Move]:
    """Return moves of the user's runs, newest first."""
    query = select(entries.c.at, entries.c.model_id, entries.c.details).where(
        entries.c.user_id == user_id, entries.c.at >= since, entries.c.event == EVENT
    )
    rows = c.execute(query.order_by(entries.c.at.desc(), entries.c.entry_id.desc()).limit(limit))
    return [Move(row.at, row.model_id, row.details["from"], row.details["to"]) for row in rows]


def _last_place(c: Connection, model_id: str) -> str | None:
    """Return the replica of a run's newest stored operation: a released run has no replica of its own."""
    placed = (futures.c.lane == model_id) & futures.c.place.is_not(None)
    return c.execute(select(futures.c.place).where(placed).order_by(futures.c.seq_id.desc()).limit(1)).scalar()


def _record(c: Connection, user_id: str, model_id: str, before: str | None, replica: str) -> None:
    if before not in (None, replica):
        details = {"from": before, "to": replica}
        audit.record(c, user_id=user_id, event=EVENT, model_id=model_id, details=details)
