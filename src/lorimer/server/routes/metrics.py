"""Metrics of a run over its steps: what the engine measured and clients report, read on from a cursor; its operations.

Only the owner of a run reads or reports; a published checkpoint opens none of it.
"""

import re
import time

from starlette.requests import Request
from starlette.responses import Response

from lorimer.errors import InvalidInput
from lorimer.server.bodies import decode
from lorimer.server.context import context_of
from lorimer.server.openapi import Endpoint
from lorimer.server.routes.checkpoints import RUN
from lorimer.server.routes.limits import MAX_SEQ_ID, check_count
from lorimer.server.routes.ownership import find_run, quote_id
from lorimer.server.routes.queries import MOST_LIMIT, query_number, query_text
from lorimer.server.routes.replies import reply
from lorimer.store import futures, metrics
from lorimer.store.metrics import START, Cursor, Report
from lorimer.types.metrics import MOST_NAME_CHARS, ReportMetricsRequest, ReportMetricsResponse, RunMetricsResponse
from lorimer.types.overview import RunOperation, RunOperationsResponse

MOST_OPERATIONS = 1000


async def get_metrics(request: Request) -> Response:
    """Points of a run's metrics, those that are new or were written again since a cursor."""
    run = await find_run(request, request.path_params["run_id"])
    after = query_cursor(request)
    limit = query_number(request, "limit", MOST_LIMIT, MOST_LIMIT)
    names = (query_text(request, "names") or "").split(",") if "names" in request.query_params else None
    found = await context_of(request).store.read(metrics.read, run.model_id, after, limit)
    series = [
        {"name": name, "source": source, "points": points}
        for (source, name), points in found.series.items()
        if names is None or name in names
    ]
    # As it is: a run may have a hundred thousand points, and numbers that are not finite become null.
    return reply({"series": series, "cursor": ".".join(map(str, found.cursor)), "has_more": found.has_more})


def query_cursor(request: Request) -> Cursor:
    text = request.query_params.get("after")
    if text is None:
        return START
    if not re.fullmatch(r"\d{1,16}\.\d{1,16}\.\d{1,16}", text, re.ASCII):
        raise InvalidInput(f"after is {quote_id(text)}; the cursor of an earlier answer is accepted")
    return Cursor(*map(int, text.split(".")))


async def report_metrics(request: Request) -> Response:
    """Keep what the caller measured; a step that is reported again gets the later value."""
    context = context_of(request)
    run = await find_run(request, request.path_params["run_id"])
    body = await decode(request, ReportMetricsRequest)
    settings, now = context.settings, time.time()
    number = sum(len(point.values) for point in body.points)
    most = settings.max_metric_values_per_request
    check_count("the number of points", len(body.points), most, "max_metric_values_per_request")
    check_count("the number of values", number, most, "max_metric_values_per_request")
    for name in {name for point in body.points for name in point.values}:
        check_metric_name(name)
    reports = [
        Report(
            point.step,
            now if point.time is None else point.time,
            {name: float(value) for name, value in point.values.items()},
        )
        for point in body.points
    ]
    kept = await context.store.write(
        metrics.report,
        run.model_id,
        reports,
        most_names=settings.max_metric_names_per_run,
        most_values=settings.max_metric_values_per_run,
    )
    return reply(ReportMetricsResponse(num_values=kept))


def check_metric_name(name: str) -> None:
    if not 1 <= len(name) <= MOST_NAME_CHARS or not name.isprintable() or "," in name:
        raise InvalidInput(
            f"a metric is called {quote_id(name)}; 1 to {MOST_NAME_CHARS} printable characters without a comma "
            "are accepted"
        )


async def list_operations(request: Request) -> Response:
    """Operations of a run, newest first: what they were, when they were computed, how they ended."""
    run = await find_run(request, request.path_params["run_id"])
    before = query_number(request, "before", MAX_SEQ_ID + 1)
    limit = query_number(request, "limit", 100, MOST_OPERATIONS)
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


ROUTES = [
    Endpoint(
        "GET",
        f"{RUN}/metrics",
        get_metrics,
        query={
            "after": {"type": "string"},
            "names": {"type": "string"},
            "limit": {"type": "integer", "minimum": 0, "maximum": MOST_LIMIT},
        },
        answer=RunMetricsResponse,
    ),
    Endpoint("POST", f"{RUN}/metrics", report_metrics, body=ReportMetricsRequest, answer=ReportMetricsResponse),
    Endpoint(
        "GET",
        f"{RUN}/operations",
        list_operations,
        query={
            "before": {"type": "integer", "minimum": 0},
            "limit": {"type": "integer", "minimum": 0, "maximum": MOST_OPERATIONS},
        },
        answer=RunOperationsResponse,
    ),
]
