"""The audit log: who did what, one immutable entry per event."""

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Literal

from sqlalchemy import Connection, select

from lorimer.store.tables import audit, insert
from lorimer.store.values import record as to_record
from lorimer.store.values import utc_now

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


@dataclass(frozen=True)
class AuditEntry:
    at: datetime
    user_id: str | None
    event: str
    """``<resource>_<action>``, such as ``checkpoint_read``."""
    model_id: str | None
    tinker_path: str | None
    details: dict[str, Any]
    purpose: str | None


def record(
    c: Connection,
    *,
    user_id: str | None,
    event: str,
    model_id: str | None = None,
    tinker_path: str | None = None,
    details: dict[str, Any] | None = None,
    purpose: str | None = None,
) -> None:
    place = {"user_id": user_id, "model_id": model_id, "tinker_path": tinker_path}
    c.execute(insert(c, audit).values(place).values(at=utc_now(), event=event, details=details or {}, purpose=purpose))


def entries(
    c: Connection,
    *,
    user_id: str | None = None,
    event_type: EventType = "all",
    day: date | None = None,
    limit: int = 10_000,
) -> list[AuditEntry]:
    """Return entries, newest first, optionally of one user, one kind of resource, or one day (UTC)."""
    query = select(*(audit.c[name] for name in AuditEntry.__dataclass_fields__))
    if user_id is not None:
        query = query.where(audit.c.user_id == user_id)
    if event_type != "all":
        query = query.where(audit.c.event.startswith(event_type.removesuffix("s") + "_", autoescape=True))
    if day is not None:
        start = datetime.combine(day, time(), UTC)
        query = query.where(audit.c.at >= start, audit.c.at < start + timedelta(days=1))
    newest_first = (audit.c.at.desc(), audit.c.entry_id.desc())
    return [to_record(AuditEntry, row) for row in c.execute(query.order_by(*newest_first).limit(limit))]
