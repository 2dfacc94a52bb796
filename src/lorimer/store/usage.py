"""Hourly usage: tokens trained and sampled, and checkpoints saved, per user, session and project."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql, sqlite

from lorimer.store.statements import Statement
from lorimer.store.tables import insert_for, usage

UsageKind = Literal["training", "sampling_prefill", "sampling_prefill_cached", "sampling_sample", "checkpoint"]


@dataclass(frozen=True)
class UsageItem:
    user_id: str
    session_id: str | None
    project_id: str | None
    base_model: str
    kind: UsageKind
    amount: int
    """The number of tokens, or of checkpoints."""
    at: datetime


@dataclass(frozen=True)
class UsageBucket:
    """The total of one kind in one hour."""

    bucket_start: datetime
    user_id: str
    session_id: str | None
    project_id: str | None
    base_model: str
    kind: UsageKind
    amount: int

    @property
    def bucket_end(self) -> datetime:
        return self.bucket_start + timedelta(hours=1)


_KEY = ["bucket_start", "user_id", "session_id", "project_id", "base_model", "kind"]


def record(c: Connection, items: Sequence[UsageItem]) -> None:
    """Add the items to their hourly buckets."""
    totals: Counter[tuple[datetime, str, str, str, str, str]] = Counter()
    for item in items:
        hour = item.at.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
        totals[hour, item.user_id, item.session_id or "", item.project_id or "", item.base_model, item.kind] += (
            item.amount
        )
    for key, amount in totals.items():
        _ADD.run(c, dict(zip(_KEY, key, strict=True), amount=amount))


def _add(dialect: str) -> sqlite.Insert | postgresql.Insert:
    statement = insert_for(dialect, usage)
    added = {"amount": usage.c.amount + statement.excluded.amount}
    return statement.on_conflict_do_update(index_elements=_KEY, set_=added)


_ADD = Statement(_add)


def usage_events(c: Connection, *, user_id: str | None = None, start: datetime, end: datetime) -> list[UsageBucket]:
    """Return the hourly buckets from ``start`` to before ``end``, of all users or one, oldest first."""
    query = select(usage).where(usage.c.bucket_start >= start, usage.c.bucket_start < end)
    if user_id is not None:
        query = query.where(usage.c.user_id == user_id)
    rows = c.execute(query.order_by(*(usage.c[name] for name in _KEY)))
    return [
        UsageBucket(hour, user, session or None, project or None, model, kind, amount)
        for hour, user, session, project, model, kind, amount in rows
    ]
