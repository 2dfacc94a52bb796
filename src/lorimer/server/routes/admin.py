"""Audit log, hourly token usage and checkpoint storage. Each user sees only their own."""

import re
from datetime import UTC, date, datetime, timedelta
from typing import get_args

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from lorimer import types
from lorimer.errors import InvalidInput
from lorimer.server.context import context_of, user_of, user_quotas
from lorimer.server.openapi import Endpoint
from lorimer.server.routes.field_checks import text_metadata
from lorimer.server.routes.ownership import quote_id
from lorimer.server.routes.queries import query_moment, query_text, query_word
from lorimer.server.routes.replies import reply
from lorimer.server.signing import user_urn
from lorimer.store import audit, checkpoints, rollouts, sessions, usage
from lorimer.store.audit import EventType
from lorimer.store.checkpoints import StorageUsage
from lorimer.store.quotas import stored_bytes
from lorimer.store.usage import UsageBucket
from lorimer.store.users import User

EVENT_TYPES: tuple[EventType, ...] = get_args(EventType)
MAX_DAYS = 14
GIGABYTE = 10**9


async def get_audit_log(request: Request) -> Response:
    """Return the caller's audit log, newest first, optionally of one event type or one day (UTC)."""
    event_type = query_word(request, "event_type", EVENT_TYPES)
    found = await context_of(request).store.read(
        audit.entries, user_id=user_of(request).user_id, event_type=event_type, day=query_day(request)
    )
    entries = [
        types.AuditLogEntry(
            timestamp=entry.at,
            event=entry.event,
            event_details=entry.details,
            model_id=entry.model_id,
            tinker_path=entry.tinker_path,
            purpose=entry.purpose,
        )
        for entry in found
    ]
    return reply(types.AuditLogResponse(entries=entries))


def query_day(request: Request) -> date | None:
    text = request.query_params.get("day")
    if text is None:
        return None
    try:
        if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text, re.ASCII):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise InvalidInput(f"day is {quote_id(text)}; a date such as '2026-01-31' is accepted")


async def get_usage(request: Request) -> Response:
    """Return the caller's hourly token and checkpoint usage over up to 14 days."""
    start, end = query_moment(request, "starting_on"), query_moment(request, "ending_before")
    for name, moment in (("starting_on", start), ("ending_before", end)):
        if moment.minute or moment.second or moment.microsecond:
            raise InvalidInput(f"{name} is {moment.isoformat()!r}; a full hour is accepted")
    if not start < end <= start + timedelta(days=MAX_DAYS):
        raise InvalidInput(f"ending_before is {end.isoformat()!r}; up to {MAX_DAYS} days after starting_on is accepted")
    answer = await context_of(request).store.read(
        usage_of, user_of(request), start.astimezone(UTC), end.astimezone(UTC)
    )
    return reply(answer)


def usage_of(c: Connection, user: User, start: datetime, end: datetime) -> types.BillingUsageResponse:
    buckets = usage.usage_events(c, user_id=user.user_id, start=start, end=end)
    session_ids = {bucket.session_id for bucket in buckets if bucket.session_id is not None}
    found = {session_id: sessions.get_session(c, session_id) for session_id in sorted(session_ids)}
    labels = {
        session_id: types.BillingUsageSession(user_metadata=text_metadata(session.user_metadata))
        for session_id, session in found.items()
        if session is not None
    }
    return types.BillingUsageResponse(data=[usage_event(user, bucket) for bucket in buckets], sessions=labels)


def usage_event(user: User, bucket: UsageBucket) -> types.BillingUsageEvent:
    return types.BillingUsageEvent(
        bucket_start=bucket.bucket_start,
        bucket_end=bucket.bucket_end,
        base_model=bucket.base_model,
        user_id=user_urn(user.user_id),
        user_name=user.name,
        session_id=bucket.session_id,
        project_id=bucket.project_id,
        event_info=event_info(bucket),
    )


def event_info(bucket: UsageBucket) -> types.BillingEventInfo:
    match bucket.kind:
        case "training":
            return types.TrainingBillingEvent(token_count=bucket.amount)
        case "sampling_prefill" | "sampling_prefill_cached":
            is_cached = bucket.kind == "sampling_prefill_cached"
            return types.SamplingPrefillBillingEvent(cached=is_cached, token_count=bucket.amount)
        case "sampling_sample":
            return types.SamplingSampleBillingEvent(token_count=bucket.amount)
        case "checkpoint":
            return types.CheckpointBillingEvent(count=bucket.amount)


async def get_storage_usage(request: Request) -> Response:
    """Return the number and size of the caller's current checkpoints, by project."""
    user, project_id = user_of(request), query_text(request, "project_id")
    found, quotas = await context_of(request).store.read(storage_of, user.user_id, project_id, user_quotas(request))
    items = [
        types.CurrentCheckpointStorageUsageItem(
            project_id=item.project_id,
            org_user_urn=user_urn(item.user_id),
            user_email=user.email or None,
            user_name=user.name,
            checkpoint_count=item.checkpoint_count,
            size_bytes=item.size_bytes,
            size_gigabytes=item.size_bytes / GIGABYTE,
        )
        for item in found
    ]
    return reply(types.CurrentCheckpointStorageUsageResponse(data=items, quotas=quotas))


def storage_of(
    c: Connection, user_id: str, project_id: str | None, quotas: types.UserQuotas
) -> tuple[list[StorageUsage], types.UserQuotas]:
    """Return the storage used in one project or all, and the quotas with the storage used in all projects."""
    found = checkpoints.storage_usage(c, user_id, project_id)
    used = {"stored_bytes": stored_bytes(c, user_id), "rollout_bytes": rollouts.bytes_of_user(c, user_id)}
    return found, quotas.model_copy(update=used)


MOMENT = {"type": "string", "format": "date-time", "required": True}

ROUTES = [
    Endpoint(
        "GET",
        "/api/v1/audit",
        get_audit_log,
        query={
            "event_type": {"type": "string", "enum": list(EVENT_TYPES)},
            "day": {"type": "string", "format": "date"},
        },
        answer=types.AuditLogResponse,
    ),
    Endpoint(
        "GET",
        "/api/v1/billing/usage/events",
        get_usage,
        query={"starting_on": MOMENT, "ending_before": MOMENT},
        answer=types.BillingUsageResponse,
    ),
    Endpoint(
        "GET",
        "/api/v1/billing/usage/checkpoints/current",
        get_storage_usage,
        query={"project_id": {"type": "string"}},
        answer=types.CurrentCheckpointStorageUsageResponse,
    ),
]
