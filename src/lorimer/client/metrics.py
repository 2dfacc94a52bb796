"""Metrics of runs: reported in the order of the calls, and read page by page until there is nothing new."""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import SupportsFloat
from urllib.parse import quote, urlencode

import numpy as np

from lorimer.client.connection import Connection
from lorimer.client.futures import AwaitableConcurrentFuture
from lorimer.client.retries import PATIENCE_SECONDS
from lorimer.types.metrics import (
    MetricPoint,
    MetricSeries,
    ReportMetricsRequest,
    ReportMetricsResponse,
    RunMetricsResponse,
    spelled,
)
from lorimer.types.runs import JoinedMetricsResponse
from lorimer.types.thinning import Columns, join, thin

PAGE_ENTRIES = 10_000
"""Most operations and reported steps of one answer."""


def metric_point(metrics: Mapping[str, SupportsFloat], step: int, optim_steps: int | None = None) -> MetricPoint:
    """The metrics of one step, measured now; numbers of NumPy and tensors of one element are numbers too."""
    values = {name: spelled(float(value)) for name, value in metrics.items()}
    return MetricPoint(step=step, time=time.time(), values=values, optim_steps=optim_steps)


class Reports:
    """What one client reports to its run, one request after the other, so that the last word on a step is the last."""

    def __init__(self, connection: Connection, model_id: str) -> None:
        self._connection, self._path = connection, metrics_path(model_id)
        self._turn = asyncio.Lock()

    def send(
        self, points: Sequence[MetricPoint], patience: float = PATIENCE_SECONDS, steps_done: int | None = None
    ) -> AwaitableConcurrentFuture[ReportMetricsResponse]:
        body = ReportMetricsRequest(points=list(points), steps_done=steps_done)
        return self._connection.run(self._send(body, patience))

    async def _send(self, body: ReportMetricsRequest, patience: float) -> ReportMetricsResponse:
        async with self._turn:
            return await self._connection.transport.ask(
                ReportMetricsResponse, "POST", self._path, body, patience=patience
            )


async def read_metrics(
    connection: Connection,
    path: str,
    names: Sequence[str] | None,
    after: str | None,
    *,
    first_step: int | None = None,
    last_step: int | None = None,
    max_points: int | None = None,
) -> RunMetricsResponse:
    """Return all points at ``path``, or those since a cursor; of some steps, and thinned, if that is wanted."""
    query = {
        "names": None if names is None else ",".join(names),
        "first_step": first_step,
        "last_step": last_step,
        "max_points": max_points,
        "limit": PAGE_ENTRIES if max_points is None else None,
    }
    parts: dict[tuple[str, str], list[Columns]] = {}
    cursor, has_more = after, True
    while has_more:
        given = urlencode({key: value for key, value in (query | {"after": cursor}).items() if value is not None})
        page = await connection.transport.ask(JoinedMetricsResponse, "GET", f"{path}?{given}")
        if page.is_restarted:
            parts = {}
        for series in page.series:
            parts.setdefault((series.source, series.name), []).append(columns(series))
        cursor, has_more = page.cursor, page.has_more
    merged = [merge(name, source, parts[source, name], max_points) for source, name in sorted(parts)]
    return RunMetricsResponse(series=merged, cursor=cursor or "", has_more=False)


def columns(series: MetricSeries) -> Columns:
    steps = np.array([step for step, _, _ in series.points], np.int64)
    times = np.array([seconds for _, seconds, _ in series.points], np.float64)
    values = np.array([math.nan if value is None else value for _, _, value in series.points], np.float64)
    return Columns(steps, times, values, series.steps_per_bucket)


def merge(name: str, source: str, parts: Sequence[Columns], max_points: int | None) -> MetricSeries:
    """Parts that were read one after the other as one series."""
    whole = join(parts)
    if max_points is not None:
        whole = thin(whole, max_points)
    points = [(step, at, None if math.isnan(value) else value) for step, at, value in whole.points()]
    return MetricSeries.model_validate(
        {"name": name, "source": source, "points": points, "steps_per_bucket": whole.steps_per_bucket}
    )


def metrics_path(model_id: str) -> str:
    return f"/api/v1/training_runs/{quote(model_id, safe=':')}/metrics"
