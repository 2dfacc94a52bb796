"""Events that the SDK reports about itself: the newest thousand per session.

The server redacts credentials before events get here.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, delete, select

from lorimer.store.tables import insert, telemetry
from lorimer.store.values import utc_now

KEPT_PER_SESSION = 1000


def add_events(c: Connection, session_id: str, user_id: str, events: Sequence[dict[str, Any]]) -> None:
    """Store the events, and delete the session's oldest beyond a thousand."""
    now = utc_now()
    kept = events[-KEPT_PER_SESSION:]
    if not kept:
        return
    rows = [{"session_id": session_id, "user_id": user_id, "at": now, "event": event} for event in kept]
    c.execute(insert(c, telemetry), rows)
    of_session = telemetry.c.session_id == session_id
    newest_first = select(telemetry.c.event_id).where(of_session).order_by(telemetry.c.event_id.desc())
    first_to_go = newest_first.offset(KEPT_PER_SESSION).limit(1).scalar_subquery()
    c.execute(delete(telemetry).where(of_session, telemetry.c.event_id <= first_to_go))


def events(c: Connection, session_id: str) -> list[dict[str, Any]]:
    """Return the session's events, oldest first."""
    query = select(telemetry.c.event).where(telemetry.c.session_id == session_id).order_by(telemetry.c.event_id)
    return list(c.execute(query).scalars())
