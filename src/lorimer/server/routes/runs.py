"""Routes for runs as people track them: list, search, group, describe, rename, finish, archive, delete, curves.

A run is addressed by its id or by the id of any of its parts. Only its owner sees it; what others may see of a
published checkpoint's training run is in `checkpoints`.
"""

import re
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from lorimer.errors import InvalidInput
from lorimer.server.bodies import decode
from lorimer.server.context import context_of, user_of
from lorimer.server.openapi import Endpoint
from lorimer.server.routes.field_checks import check_run, check_text
from lorimer.server.routes.metrics import ENTRIES_PER_READ, METRICS_QUERY, query_choice, query_limit, reply_metrics
from lorimer.server.routes.ownership import look_up, missing_run, quote_id
from lorimer.server.routes.queries import query_number, query_text, query_word
from lorimer.server.routes.replies import done, reply
from lorimer.store import client_steps, futures, run_curves, run_search, tracking
from lorimer.store.metrics import Cursor
from lorimer.store.run_curves import JoinedCursor
from lorimer.store.run_search import FoundRun, Scope
from lorimer.store.tracking import TrackedRun
from lorimer.types.runs import (
    EngineDeath,
    FinishRunRequest,
    JoinedMetricsResponse,
    MetricSummary,
    Run,
    RunDetails,
    RunFieldsResponse,
    RunGroup,
    RunGroupsResponse,
    RunLink,
    RunPart,
    RunsResponse,
    UpdateRunRequest,
)

RUN = "/api/v1/runs/{run_id}"
SILENT_SECONDS = 60.0
"""A session without a heartbeat for so long is lost."""
MAX_RUNS = 1000
MAX_VALUES = 50
MAX_DEATHS = 100
"""Of a training run."""
ARCHIVED = {"no": False, "yes": True, "any": None}


# ── one run ───────────────────────────────────────────────────────────────────────────────────────────


async def find_tracked(request: Request) -> TrackedRun:
    """Return the caller's run that the URL names. Raise `NotFound` otherwise."""
    run_id = request.path_params["run_id"]
    run = await look_up(request, tracking.get, run_id)
    if run is None or run.user_id != user_of(request).user_id:
        raise missing_run(run_id)
    return run


def silent_before(request: Request) -> Any:
    """Return the time before which a live session has sent a heartbeat that is persisted."""
    context = context_of(request)
    return context.now() - timedelta(seconds=SILENT_SECONDS + context.settings.heartbeat_flush_seconds)


async def get_run(request: Request) -> Response:
    """Return a run: configuration, status, progress, summary of its metrics, parts and lineage."""
    run = await find_tracked(request)
    found = await context_of(request).store.read(describe, run.run_id, silent_before(request))
    if found is None:
        raise missing_run(run.run_id)
    one, details = found
    return reply(RunDetails(**shown(request, one), **details))


def describe(c: Connection, run_id: str, before: Any) -> tuple[FoundRun, dict[str, Any]] | None:
    found = run_search.find_run(c, run_id, before)
    if found is None:
        return None
    parent = tracking.get(c, found.run.parent_run_id) if found.run.parent_run_id else None
    parts = tracking.parts_of(c, run_id)
    return found, {
        "config": found.run.config,
        "metrics": summary(c, run_id),
        "parts": [shown_part(part) for part in parts],
        "engine_deaths": [death for part in parts for death in engine_deaths(c, part.model_id)],
        "parent": None if parent is None else RunLink(run_id=parent.run_id, name=parent.name),
        "children": [RunLink(run_id=child, name=name) for child, name in tracking.children_of(c, run_id)],
    }


def engine_deaths(c: Connection, model_id: str) -> list[EngineDeath]:
    rows = futures.deaths_of_lane(c, model_id, MAX_DEATHS)
    times = [row.started_at or row.received_at for row in rows]
    places = [
        (model_id, tracking.count_steps(c, model_id, row.seq_id or 0), at) for row, at in zip(rows, times, strict=True)
    ]
    return [
        EngineDeath(training_run_id=model_id, kind=row.kind, step=step or 0, time=at, num_deaths=row.deaths)
        for row, at, step in zip(rows, times, client_steps.counted(c, places), strict=True)
    ]


def summary(c: Connection, run_id: str) -> list[MetricSummary]:
    """Return the summary as of now, whenever it was last stored."""
    return run_curves.combined([state for _, state in run_curves.advance(c, run_id).parts])


def shown_part(part: Any) -> RunPart:
    return RunPart(
        training_run_id=part.model_id,
        session_id=part.session_id,
        created_at=part.created_at,
        last_request_time=part.last_request_at,
        loaded_from=part.loaded_from,
        first_step=part.first_step,
        optim_steps_before=part.optim_steps_before,
        corrupted=part.corrupted,
    )


def shown(request: Request, found: FoundRun) -> dict[str, Any]:
    """Return the fields of a `Run`."""
    run, now = found.run, context_of(request).now()
    is_running = found.status == "running"
    until = now if is_running else run.ended_at or found.last_request_at
    part_seconds = max((until - found.part_created_at).total_seconds(), 0.0)
    steps_done = run.optim_steps if run.steps_reported is None else run.steps_reported
    return {
        "run_id": run.run_id,
        "name": run.name,
        "notes": run.notes,
        "tags": run.tags,
        "status": found.status,
        "error": found.error,
        "base_model": run.base_model,
        "training_run_id": run.model_id,
        "num_parts": run.num_parts,
        "session_id": run.session_id,
        "session_name": found.session_name,
        "project_id": run.project_id,
        "created_at": run.created_at,
        "last_request_time": found.last_request_at,
        "duration_seconds": run.past_seconds + part_seconds,
        "steps_done": steps_done,
        "num_steps": run.num_steps,
        "eta_seconds": eta(run, steps_done, found.part_first_step, part_seconds) if is_running else None,
        "is_archived": run.is_archived,
        "parent_path": run.parent_path,
        "parent_run_id": run.parent_run_id,
        "user_metadata": found.user_metadata or None,
        "values": found.values or None,
    }


def eta(run: TrackedRun, steps_done: int | None, first_step: int, part_seconds: float) -> float | None:
    """Return the seconds to the last planned step at the pace of the newest part."""
    if run.num_steps is None or steps_done is None or steps_done <= first_step:
        return None
    return max(run.num_steps - steps_done, 0) * part_seconds / (steps_done - first_step)


async def update_run(request: Request) -> Response:
    """Rename a run, or change its notes, tags, configuration, planned steps, or whether it is archived."""
    run = await find_tracked(request)
    body = await decode(request, UpdateRunRequest)
    check_run(context_of(request).settings, body)
    await context_of(request).store.write(tracking.change, run.run_id, body)
    return await get_run(request)


async def finish_run(request: Request) -> Response:
    """Record how a run ended, with the error if it failed. A resumed run is running again."""
    run = await find_tracked(request)
    body = await decode(request, FinishRunRequest)
    check_text(context_of(request).settings, error=body.error)
    await context_of(request).store.write(tracking.finish, run.run_id, body.status, body.error)
    return done()


async def delete_run(request: Request) -> Response:
    """Delete a run with its checkpoints, metrics and rollouts. A run that is running is refused."""
    run = await find_tracked(request)
    store = context_of(request).store
    found = await store.read(run_search.find_run, run.run_id, silent_before(request))
    if found is not None and found.status == "running":
        raise InvalidInput(
            f"run {run.name!r} is running; it can be deleted after its program has ended or finished the run"
        )
    await store.write(tracking.remove, run)
    return done()


async def get_run_metrics(request: Request) -> Response:
    """Return the curves of a run over all its parts: the points that are new or rewritten since a cursor."""
    run = await find_tracked(request)
    after, choice = query_joined_cursor(request), query_choice(request)
    limit = query_limit(request, choice)
    store = context_of(request).store
    found = await store.read(run_curves.read, run.run_id, after, min(limit, ENTRIES_PER_READ), choice)
    is_restarted, known = found.is_restarted, found
    while choice.max_points is not None and known.reading.has_more and known.reading.num_entries < limit:
        known = await store.read(run_curves.read_on, run.run_id, known, ENTRIES_PER_READ, choice)
    cursor = ".".join(map(str, (known.cursor.num_parts, known.cursor.part, *known.cursor.cursor)))
    return await reply_metrics(known.reading, choice, cursor, is_restarted=is_restarted)


def query_joined_cursor(request: Request) -> JoinedCursor:
    text = request.query_params.get("after")
    if text is None:
        return JoinedCursor()
    if not re.fullmatch(r"\d{1,9}\.\d{1,9}\.\d{1,16}\.\d{1,16}\.\d{1,16}", text, re.ASCII):
        raise InvalidInput(f"after is {quote_id(text)}; the cursor of an earlier answer is accepted")
    num_parts, part, *cursor = map(int, text.split("."))
    return JoinedCursor(num_parts, part, Cursor(*cursor))


# ── lists ─────────────────────────────────────────────────────────────────────────────────────────────


def scope_of(request: Request) -> Scope:
    archived = ARCHIVED[query_word(request, "archived", ("no", "yes", "any"))]
    query = query_text(request, "q") or ""
    check_text(context_of(request).settings, q=query)
    return Scope(user_of(request).user_id, silent_before(request), archived, query)


async def list_runs(request: Request) -> Response:
    """List the caller's runs that match `q`, sorted, with the values of chosen fields."""
    scope = scope_of(request)
    names = [name for name in (query_text(request, "fields") or "").split(",") if name]
    if len(names) > MAX_VALUES:
        raise InvalidInput(f"fields names {len(names)} fields; at most {MAX_VALUES} are accepted")
    found, total = await context_of(request).store.read(
        run_search.list_runs,
        scope,
        sort=query_text(request, "sort") or "-created",
        fields=list(dict.fromkeys(names)),
        limit=query_number(request, "limit", 50, MAX_RUNS),
        offset=query_number(request, "offset", 0),
    )
    return reply(RunsResponse(runs=[Run(**shown(request, one)) for one in found], total_count=total))


async def group_runs(request: Request) -> Response:
    """Count the caller's runs that match `q` by the values of a field."""
    by = query_text(request, "by") or "tag"
    found = await context_of(request).store.read(run_search.group_runs, scope_of(request), by)
    return reply(RunGroupsResponse(groups=[RunGroup(value=value, num_runs=count) for value, count in found]))


async def list_run_fields(request: Request) -> Response:
    """List the configuration fields, metrics and tags of the caller's runs that match `q`."""
    config, metrics, tags = await context_of(request).store.read(run_search.field_names, scope_of(request))
    return reply(RunFieldsResponse(config=config, metrics=metrics, tags=tags))


SEARCH: dict[str, dict[str, Any]] = {
    "q": {"type": "string"},
    "archived": {"type": "string", "enum": list(ARCHIVED)},
}

ROUTES = [
    Endpoint(
        "GET",
        "/api/v1/runs",
        list_runs,
        query=SEARCH
        | {
            "sort": {"type": "string"},
            "fields": {"type": "string"},
            "limit": {"type": "integer", "minimum": 0, "maximum": MAX_RUNS},
            "offset": {"type": "integer", "minimum": 0},
        },
        answer=RunsResponse,
    ),
    Endpoint(
        "GET", "/api/v1/run_groups", group_runs, query=SEARCH | {"by": {"type": "string"}}, answer=RunGroupsResponse
    ),
    Endpoint("GET", "/api/v1/run_fields", list_run_fields, query=SEARCH, answer=RunFieldsResponse),
    Endpoint("GET", RUN, get_run, answer=RunDetails),
    Endpoint("PATCH", RUN, update_run, body=UpdateRunRequest, answer=RunDetails),
    Endpoint("DELETE", RUN, delete_run, status=204),
    Endpoint("POST", RUN + "/finish", finish_run, body=FinishRunRequest, status=204),
    Endpoint("GET", RUN + "/metrics", get_run_metrics, query=METRICS_QUERY, answer=JoinedMetricsResponse),
]
