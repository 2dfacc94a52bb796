"""Session routes: create, keep alive and finish; list, search, assign to projects and export as traces."""

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from lorimer import types
from lorimer.errors import Gone
from lorimer.server.bodies import decode
from lorimer.server.context import context_of, user_of
from lorimer.server.openapi import Endpoint
from lorimer.server.routes.addresses import signed_address
from lorimer.server.routes.field_checks import check_metadata, check_text, text_metadata
from lorimer.server.routes.overview import NUM_ERRORS, recent_error
from lorimer.server.routes.ownership import find_session
from lorimer.server.routes.queries import PAGE, SCOPE, SCOPES, query_page, query_word
from lorimer.server.routes.replies import done, reply
from lorimer.server.signing import user_urn
from lorimer.store import audit, futures, sessions
from lorimer.store.sessions import Session, SessionRow
from lorimer.types.sessions import AssignProjectRequest, FinishSessionRequest, SessionStatus, TraceExportResponse

NO_PROJECT = "default"
"""The project shown for a session without one."""


def act_and_audit(
    c: Connection, event: str, facts: list[str], action: Callable[..., Session], /, *args: Any, **fields: Any
) -> Session:
    """Apply ``action`` to a session and add an audit entry with its fields ``facts``, in one transaction."""
    session = action(c, *args, **fields)
    details = {name: getattr(session, name) for name in ["session_id", *facts]}
    audit.record(c, user_id=session.user_id, event=event, details=details)
    return session


async def create_session(request: Request) -> Response:
    """Create a session for a client that connects."""
    context, user = context_of(request), user_of(request)
    body = await decode(request, types.CreateSessionRequest)
    settings = context.settings
    check_text(settings, display_name=body.display_name, project_id=body.project_id, sdk_version=body.sdk_version)
    check_metadata(settings, body.user_metadata)
    check_metadata(settings, body.tags, "tags")
    context.live_sessions.check_room(user.user_id)
    session = await context.store.write(
        act_and_audit,
        "session_created",
        [],
        sessions.create_session,
        user_id=user.user_id,
        tags=body.tags,
        user_metadata=text_metadata(body.user_metadata) or {},
        sdk_version=body.sdk_version,
        project_id=body.project_id,
        display_name=body.display_name,
    )
    context.live_sessions.touch(user.user_id, session.session_id)
    return reply(types.CreateSessionResponse(session_id=session.session_id))


async def heartbeat(request: Request) -> Response:
    """Record a heartbeat; 410 once the session is finished, which stops the client's heartbeats."""
    body = await decode(request, types.SessionHeartbeatRequest)
    session = await find_session(request, body.session_id)
    if session.status != "active":
        raise Gone(f"session {session.session_id!r} is finished")
    context_of(request).heartbeat(session)
    return reply(types.SessionHeartbeatResponse())


async def finish_session(request: Request) -> Response:
    """Finish a session with the client's reason. Only the first call has an effect."""
    context = context_of(request)
    session = await find_session(request, request.path_params["session_id"])
    body = await decode(request, FinishSessionRequest)
    check_text(context.settings, detail=body.detail)
    finish = (sessions.finish_session, session.session_id, body.reason.type, body.detail)
    await context.store.write(act_and_audit, "session_finished", ["finish_reason"], *finish)
    context.live_sessions.end(session.user_id, session.session_id)
    return done()


async def list_sessions(request: Request) -> Response:
    """List the ids of the caller's sessions, newest first."""
    query_word(request, "access_scope", SCOPES)
    limit, offset = query_page(request, 20)
    found = await context_of(request).store.read(sessions.list_sessions, user_of(request).user_id, limit, offset)
    return reply(types.ListSessionsResponse(sessions=found))


async def get_session(request: Request) -> Response:
    """Return the runs and samplers of a session, how it ended, and its newest failed requests."""
    query_word(request, "access_scope", SCOPES)
    session = await find_session(request, request.path_params["session_id"])
    store = context_of(request).store
    run_ids, sampler_ids = await store.read(sessions.session_members, session.session_id)
    failed = await store.read(futures.session_errors, session.session_id, NUM_ERRORS)
    return reply(
        types.GetSessionResponse(
            training_run_ids=run_ids,
            sampler_ids=sampler_ids,
            user_metadata=text_metadata(session.user_metadata),
            display_name=session.display_name,
            status=session_status(session),
            errors=[recent_error(row) for row in failed],
        )
    )


async def search_sessions(request: Request) -> Response:
    """Search the caller's sessions by all given conditions, newest first. Sessions are not shared between users."""
    user = user_of(request)
    body = await decode(request, types.SessionSearchRequest)
    settings = context_of(request).settings
    check_text(settings, session_id=body.session_id, display_name=body.display_name)
    check_text(settings, project_ids="".join(body.project_ids or []))
    check_text(settings, cursor=body.cursor.last_session_id if body.cursor else None)
    if isinstance(body.owner, types.UserSearchOwner) and user_urn(user.user_id) not in body.owner.owner_urns:
        return reply(types.SessionSearchResponse(sessions=[]))
    store = context_of(request).store
    found = await store.read(sessions.search_sessions, user_ids=[user.user_id], request=body)
    cursor = None
    if len(found) == body.limit:
        last = found[-1].session
        cursor = types.SessionSearchCursor(last_created_at=last.created_at, last_session_id=last.session_id)
    return reply(types.SessionSearchResponse(sessions=[summary(request, row) for row in found], next_cursor=cursor))


def summary(request: Request, row: SessionRow) -> types.SessionSummary:
    session = row.session
    return types.SessionSummary(
        session_id=session.session_id,
        created_at=session.created_at,
        owner=user_urn(session.user_id),
        project_id=session.project_id or NO_PROJECT,
        status=session_status(session),
        checkpoints_count=row.checkpoints_count,
        display_name=session.display_name,
        user_metadata=text_metadata(session.user_metadata),
        checkpoint_storage_bytes=row.checkpoint_storage_bytes,
        tags=session.tags,
        training_runs_count=row.training_runs_count,
        last_seen_at=context_of(request).seen_at(session),
    )


def session_status(session: Session) -> SessionStatus:
    if session.status == "active":
        return types.SessionActive()
    if session.status == "client_finished":
        reason = types.ClientSessionFinished.model_validate(
            {"reason": {"type": session.finish_reason}, "detail": session.finish_detail}
        )
        return reason
    return types.SessionCancelled(detail=session.finish_detail)


async def assign_project(request: Request) -> Response:
    """Assign a session and its runs to a project."""
    context = context_of(request)
    session = await find_session(request, request.path_params["session_id"])
    body = await decode(request, AssignProjectRequest)
    check_text(context.settings, project_id=body.project_id)
    await context.store.write(
        act_and_audit, "project_assigned", ["project_id"], sessions.set_project, session.session_id, body.project_id
    )
    return done()


async def export_trace(request: Request) -> Response:
    """Return the signed URL of the session's trace, which is generated when it is fetched."""
    session = await find_session(request, request.path_params["session_id"])
    url, _ = signed_address(request, f"traces/{session.session_id}.json")
    return reply(TraceExportResponse(status="ready", url=url))


ROUTES = [
    Endpoint(
        "POST",
        "/api/v1/create_session",
        create_session,
        body=types.CreateSessionRequest,
        answer=types.CreateSessionResponse,
    ),
    Endpoint(
        "POST",
        "/api/v1/session_heartbeat",
        heartbeat,
        body=types.SessionHeartbeatRequest,
        answer=types.SessionHeartbeatResponse,
    ),
    Endpoint("GET", "/api/v1/sessions", list_sessions, query=PAGE | SCOPE, answer=types.ListSessionsResponse),
    Endpoint(
        "POST",
        "/api/v1/sessions/search",
        search_sessions,
        body=types.SessionSearchRequest,
        answer=types.SessionSearchResponse,
    ),
    Endpoint("GET", "/api/v1/sessions/{session_id}", get_session, query=SCOPE, answer=types.GetSessionResponse),
    Endpoint("POST", "/api/v1/sessions/{session_id}/finish", finish_session, body=FinishSessionRequest, status=204),
    Endpoint("PUT", "/api/v1/sessions/{session_id}/project", assign_project, body=AssignProjectRequest, status=204),
    Endpoint("GET", "/api/v1/sessions/{session_id}/trace_export", export_trace, answer=TraceExportResponse),
]
