"""Routes for a run's metrics (measured by the engine or reported by clients, read from a cursor) and its operations.

Only the owner of a run can read or report metrics; publishing a checkpoint does not expose them.
"""

import re
from typing import Any

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from lorimer.errors import InvalidInput
from lorimer.server.bodies import decode_data, off_loop
from lorimer.server.body_limits import metrics_limits
from lorimer.server.context import context_of
from lorimer.server.decoding import DecodeMetrics, MetricsHead
from lorimer.server.openapi import Endpoint
from lorimer.server.routes.checkpoints import RUN
from lorimer.server.routes.field_checks import MAX_SEQ_ID
from lorimer.server.routes.ownership import find_run, quote_id
from lorimer.server.routes.queries import MAX_LIMIT, query_number, query_text
from lorimer.server.routes.replies import reply
from lorimer.store import futures, metrics, tracking
from lorimer.store.metrics import START, Choice, Cursor, Reading
from lorimer.types.metrics import (
    LAST_STEP,
    ReportMetricsRequest,
    ReportMetricsResponse,
    RunMetricsResponse,
)
from lorimer.types.overview import RunOperation, RunOperationsResponse
from lorimer.types.thinning import POINTS_PER_BUCKET

MAX_OPERATIONS = 1000
MAX_POINTS = 10_000
MAX_ENTRIES_TO_THIN = 100_000
ENTRIES_PER_READ = 10_000
"""A large response is read in several queries of this size, so that other reads run in between."""
BYTES_OF_POINT = 40


async def get_metrics(request: Request) -> Response:
    """Return a run's points that are new or rewritten since a cursor, thinned to `max_points` if given."""
    run = await find_run(request, request.path_params["run_id"])
    after, choice = query_cursor(request), query_choice(request)
    limit = query_limit(request, choice)
    store = context_of(request).store
    found = await store.read(metrics.read, run.model_id, after, min(limit, ENTRIES_PER_READ), choice)
    while choice.max_points is not None and found.has_more and found.num_entries < limit:
        room = min(limit - found.num_entries, ENTRIES_PER_READ)
        found = await store.read(metrics.read_on, run.model_id, found, room, choice)
    return await reply_metrics(found, choice, ".".join(map(str, found.cursor)))


def query_limit(request: Request, choice: Choice) -> int:
    max_entries = MAX_LIMIT if choice.max_points is None else MAX_ENTRIES_TO_THIN
    return query_number(request, "limit", max_entries, max_entries)


async def reply_metrics(found: Reading, choice: Choice, cursor: str, **more: object) -> Response:
    """Return a response with the points of a reading, encoded off the loop if there are many."""
    num_points = sum(len(one.steps) for one in found.series.values())
    return await off_loop(num_points * BYTES_OF_POINT, lambda: reply(answer(found, choice, cursor) | more))


def answer(found: Reading, choice: Choice, cursor: str) -> dict[str, Any]:
    """Build the JSON of a `RunMetricsResponse` without pydantic, for speed.

    Orjson writes non-finite numbers as null.
    """
    series = [
        {"name": name, "source": source, "points": one.points()}
        | ({} if choice.max_points is None else {"steps_per_bucket": one.steps_per_bucket})
        for (source, name), one in found.series.items()
    ]
    return {"series": series, "cursor": cursor, "has_more": found.has_more}


def query_choice(request: Request) -> Choice:
    asked = request.query_params
    names = frozenset((query_text(request, "names") or "").split(",")) if "names" in asked else None
    first = query_number(request, "first_step", 0, LAST_STEP)
    last = query_number(request, "last_step", LAST_STEP, LAST_STEP)
    if first > last:
        raise InvalidInput(f"first_step is {first} and last_step is {last}; a last step that is not before is accepted")
    max_points = (
        query_number(request, "max_points", 0, MAX_POINTS, POINTS_PER_BUCKET) if "max_points" in asked else None
    )
    steps = (first, last) if asked.keys() & {"first_step", "last_step"} else None
    return Choice(names, steps, max_points)


def query_cursor(request: Request) -> Cursor:
    text = request.query_params.get("after")
    if text is None:
        return START
    if not re.fullmatch(r"\d{1,16}\.\d{1,16}\.\d{1,16}", text, re.ASCII):
        raise InvalidInput(f"after is {quote_id(text)}; the cursor of an earlier answer is accepted")
    return Cursor(*map(int, text.split(".")))


async def report_metrics(request: Request) -> Response:
    """Persist the values that a client measured. A later report of the same step replaces the earlier value."""
    context = context_of(request)
    run = await find_run(request, request.path_params["run_id"])
    settings = context.settings
    body, _ = await decode_data(request, DecodeMetrics(), MetricsHead, metrics_limits(settings))
    kept = await context.store.write(
        report_and_progress,
        run.model_id,
        body,
        max_names=settings.max_metric_names_per_run,
        max_values=settings.max_metric_values_per_run,
    )
    return reply(ReportMetricsResponse(num_values=kept))


def report_and_progress(c: Connection, /, model_id: str, body: MetricsHead, **limits: int) -> int:
    """Store a report together with the progress that it tells. Return the number of values."""
    if body.steps_done is not None:
        tracking.report_progress(c, model_id, body.steps_done)
    return metrics.report(c, model_id, body.reports, body.names, **limits)


async def list_operations(request: Request) -> Response:
    """List the operations of a run, newest first, with their times, states and errors."""
    run = await find_run(request, request.path_params["run_id"])
    before = query_number(request, "before", MAX_SEQ_ID + 1)
    limit = query_number(request, "limit", 100, MAX_OPERATIONS)
    found = await context_of(request).store.read(futures.newest_of_lane, run.model_id, before, limit + 1)
    operations = [
        RunOperation(
            seq_id=row.seq_id or 0,
            kind=row.kind,
            state=row.state,
            received_at=row.received_at,
            started_at=row.started_at,
            finished_at=row.finished_at,
            tokens=row.tokens,
            error=row.error,
        )
        for row in found[:limit]
    ]
    return reply(RunOperationsResponse(operations=operations, has_more=len(found) > limit))


METRICS_QUERY: dict[str, dict[str, Any]] = {
    "after": {"type": "string"},
    "names": {"type": "string"},
    "first_step": {"type": "integer", "minimum": 0},
    "last_step": {"type": "integer", "minimum": 0},
    "max_points": {"type": "integer", "minimum": POINTS_PER_BUCKET, "maximum": MAX_POINTS},
    "limit": {"type": "integer", "minimum": 0, "maximum": MAX_ENTRIES_TO_THIN},
}

ROUTES = [
    Endpoint("GET", f"{RUN}/metrics", get_metrics, query=METRICS_QUERY, answer=RunMetricsResponse),
    Endpoint("POST", f"{RUN}/metrics", report_metrics, body=ReportMetricsRequest, answer=ReportMetricsResponse),
    Endpoint(
        "GET",
        f"{RUN}/operations",
        list_operations,
        query={
            "before": {"type": "integer", "minimum": 0},
            "limit": {"type": "integer", "minimum": 0, "maximum": MAX_OPERATIONS},
        },
        answer=RunOperationsResponse,
    ),
]
