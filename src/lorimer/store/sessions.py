"""Sessions: one per client program, with its labels, last heartbeat and outcome."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import orjson
from sqlalchemy import ColumnElement, Connection, and_, bindparam, func, or_, select, tuple_, update

from lorimer.errors import NotFound
from lorimer.store.tables import checkpoints, insert, runs, samplers, sessions, weights
from lorimer.store.values import new_id, record, record_or_none, storable, utc_now
from lorimer.types.sessions import SessionSearchRequest

SessionStatus = Literal["active", "client_finished", "failed", "cancelled"]


@dataclass(frozen=True)
class Session:
    session_id: str
    user_id: str
    project_id: str | None
    display_name: str | None
    tags: list[str]
    user_metadata: dict[str, str]
    sdk_version: str | None
    created_at: datetime
    last_seen_at: datetime
    status: SessionStatus
    finish_reason: str | None
    finish_detail: str | None


@dataclass(frozen=True)
class SessionRow:
    """A session as a search returns it."""

    session: Session
    checkpoints_count: int
    checkpoint_storage_bytes: int
    training_runs_count: int


_COLUMNS = [sessions.c[name] for name in Session.__dataclass_fields__]
_GET = select(*_COLUMNS).where(sessions.c.session_id == bindparam("session_id"))
_TOUCH = (
    update(sessions)
    .where(sessions.c.session_id == bindparam("id"), sessions.c.last_seen_at < bindparam("at"))
    .values(last_seen_at=bindparam("at"))
)
_NEWEST_FIRST = (sessions.c.created_at.desc(), sessions.c.session_id.desc())


def create_session(
    c: Connection,
    *,
    user_id: str,
    tags: Sequence[str] = (),
    user_metadata: dict[str, str] | None = None,
    sdk_version: str | None = None,
    project_id: str | None = None,
    display_name: str | None = None,
) -> Session:
    now = utc_now()
    values = {
        "session_id": new_id(),
        "user_id": user_id,
        "project_id": project_id,
        "display_name": display_name,
        "display_name_folded": None if display_name is None else display_name.casefold(),
        "tags": list(tags),
        "user_metadata": user_metadata or {},
        "sdk_version": sdk_version,
        "created_at": now,
        "last_seen_at": now,
        "status": "active",
    }
    return record(Session, c.execute(insert(c, sessions).values(values).returning(*_COLUMNS)).one())


def get_session(c: Connection, session_id: str) -> Session | None:
    return record_or_none(Session, c.execute(_GET, {"session_id": session_id}).one_or_none())


def touch_session(c: Connection, session_ids: dict[str, datetime]) -> None:
    """Persist heartbeats, buffered by the caller and written in bulk. Older times are ignored."""
    if session_ids:
        c.execute(_TOUCH, [{"id": session_id, "at": at} for session_id, at in session_ids.items()])


def finish_session(
    c: Connection,
    session_id: str,
    reason: str,
    detail: str | None = None,
    status: SessionStatus = "client_finished",
) -> Session:
    """Finish the session and return its row. The first reason wins."""
    active = (sessions.c.session_id == session_id) & (sessions.c.status == "active")
    detail = None if detail is None else storable(detail)
    c.execute(update(sessions).where(active).values(status=status, finish_reason=reason, finish_detail=detail))
    return _existing(c, session_id)


def set_project(c: Connection, session_id: str, project_id: str | None) -> Session:
    """Move the session, its runs and their checkpoints to another project."""
    c.execute(update(sessions).where(sessions.c.session_id == session_id).values(project_id=project_id))
    c.execute(update(runs).where(runs.c.session_id == session_id).values(project_id=project_id))
    members = select(runs.c.model_id).where(runs.c.session_id == session_id)
    c.execute(update(checkpoints).where(checkpoints.c.model_id.in_(members)).values(project_id=project_id))
    return _existing(c, session_id)


def list_sessions(c: Connection, user_id: str, limit: int, offset: int) -> list[str]:
    """Return a page of the user's session ids, newest first."""
    query = select(sessions.c.session_id).where(sessions.c.user_id == user_id).order_by(*_NEWEST_FIRST)
    return list(c.execute(query.limit(limit).offset(offset)).scalars())


def session_members(c: Connection, session_id: str) -> tuple[list[str], list[str]]:
    """Return the ids of the session's runs and samplers, ordered by number."""
    run_ids = select(runs.c.model_id).where(runs.c.session_id == session_id).order_by(runs.c.model_seq_id)
    sampler_ids = select(samplers.c.sampling_session_id).where(samplers.c.session_id == session_id)
    return list(c.execute(run_ids).scalars()), list(c.execute(sampler_ids.order_by(samplers.c.seq)).scalars())


def search_sessions(
    c: Connection, *, user_ids: Sequence[str] | None, request: SessionSearchRequest
) -> list[SessionRow]:
    """Return a page of the sessions of ``user_ids`` (None: everybody), newest first. A short page is the last one."""
    found: list[Session] = []
    after = (request.cursor.last_created_at, request.cursor.last_session_id) if request.cursor else None
    where = _search_filter(user_ids, request)
    while len(found) < request.limit:
        query = select(*_COLUMNS).where(where).order_by(*_NEWEST_FIRST).limit(request.limit)
        if after is not None:
            query = query.where(tuple_(sessions.c.created_at, sessions.c.session_id) < tuple_(*_bound(after)))
        page = [record(Session, row) for row in c.execute(query)]
        # The SQL filter compares metadata as text and may match too much, but never too little.
        found += [session for session in page if request.user_metadata.items() <= session.user_metadata.items()]
        if len(page) < request.limit:
            break
        after = (page[-1].created_at, page[-1].session_id)
    return _with_counts(c, found[: request.limit])


def _bound(after: tuple[datetime, str]) -> tuple[ColumnElement[Any], ColumnElement[Any]]:
    return (
        bindparam("after_at", after[0], type_=sessions.c.created_at.type),
        bindparam("after_id", after[1], type_=sessions.c.session_id.type),
    )


def _search_filter(user_ids: Sequence[str] | None, request: SessionSearchRequest) -> ColumnElement[bool]:
    terms: list[ColumnElement[bool]] = []
    if user_ids is not None:
        terms.append(sessions.c.user_id.in_(user_ids))
    if request.project_ids is not None:
        terms.append(sessions.c.project_id.in_(request.project_ids))
    names: list[ColumnElement[bool]] = []
    if request.session_id is not None:
        names.append(sessions.c.session_id == request.session_id)
    if request.display_name is not None:
        words = request.display_name.casefold().split()
        folded = sessions.c.display_name_folded
        names.append(and_(folded.is_not(None), *(folded.contains(word, autoescape=True) for word in words)))
    if names:
        terms.append(or_(*names))
    if request.statuses is not None:
        terms.append(or_(*(_status_filter(query) for query in request.statuses)))
    for key, value in request.user_metadata.items():
        pair = orjson.dumps({key: value})[1:-1].decode()
        terms.append(sessions.c.user_metadata.cast(runs.c.model_id.type).contains(pair, autoescape=True))
    return and_(True, *terms)


def _status_filter(query: Any) -> ColumnElement[bool]:
    matches = sessions.c.status == query.type
    reasons = getattr(query, "reasons", None)
    return matches if reasons is None else and_(matches, sessions.c.finish_reason.in_(reasons))


def _with_counts(c: Connection, found: list[Session]) -> list[SessionRow]:
    if not found:
        return []
    is_found = runs.c.session_id.in_([session.session_id for session in found])
    query = (
        select(runs.c.session_id, func.count(), func.sum(weights.c.size_bytes))
        .join(checkpoints, checkpoints.c.model_id == runs.c.model_id)
        .join(weights, weights.c.weights_id == checkpoints.c.weights_id)
        .where(is_found)
        .where(or_(checkpoints.c.expires_at.is_(None), checkpoints.c.expires_at > utc_now()))
        .group_by(runs.c.session_id)
    )
    totals = {session_id: (count, int(size)) for session_id, count, size in c.execute(query)}
    members = select(runs.c.session_id, func.count()).where(is_found).group_by(runs.c.session_id)
    num_runs = {row[0]: int(row[1]) for row in c.execute(members)}
    return [
        SessionRow(session, *totals.get(session.session_id, (0, 0)), num_runs.get(session.session_id, 0))
        for session in found
    ]


def _existing(c: Connection, session_id: str) -> Session:
    session = get_session(c, session_id)
    if session is None:
        raise NotFound(f"there is no session {session_id!r}")
    return session
