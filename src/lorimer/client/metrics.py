"""Metrics of runs: reported in the order of the calls, and read page by page until there is nothing new."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import SupportsFloat
from urllib.parse import quote, urlencode

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

PAGE_ENTRIES = 10_000
"""Most operations and reported steps of one answer."""


def metric_point(metrics: Mapping[str, SupportsFloat], step: int) -> MetricPoint:
    """The metrics of one step, measured now; numbers of NumPy and tensors of one element are numbers too."""
    values = {name: spelled(float(value)) for name, value in metrics.items()}
    return MetricPoint(step=step, time=time.time(), values=values)


class Reports:
    """What one client reports to its run, one request after the other, so that the last word on a step is the last."""

    def __init__(self, connection: Connection, model_id: str) -> None:
        self._connection, self._path = connection, metrics_path(model_id)
        self._turn = asyncio.Lock()

    def send(
        self, points: Sequence[MetricPoint], patience: float = PATIENCE_SECONDS
    ) -> AwaitableConcurrentFuture[ReportMetricsResponse]:
        return self._connection.run(self._send(ReportMetricsRequest(points=list(points)), patience))

    async def _send(self, body: ReportMetricsRequest, patience: float) -> ReportMetricsResponse:
        async with self._turn:
            return await self._connection.transport.ask(
                ReportMetricsResponse, "POST", self._path, body, patience=patience
            )


async def read_metrics(
    connection: Connection, model_id: str, names: Sequence[str] | None, after: str | None
) -> RunMetricsResponse:
    """All points, or those since a cursor."""
    points: dict[tuple[str, str], dict[int, tuple[int, float, float | None]]] = {}
    cursor, has_more = after, True
    while has_more:
        query = {"limit": PAGE_ENTRIES, "after": cursor, "names": None if names is None else ",".join(names)}
        given = urlencode({key: value for key, value in query.items() if value is not None})
        page = await connection.transport.ask(RunMetricsResponse, "GET", f"{metrics_path(model_id)}?{given}")
        for series in page.series:
            points.setdefault((series.source, series.name), {}).update({point[0]: point for point in series.points})
        cursor, has_more = page.cursor, page.has_more
    merged = [
        MetricSeries.model_validate({"name": name, "source": source, "points": [found[step] for step in sorted(found)]})
        for (source, name), found in sorted(points.items())
    ]
    return RunMetricsResponse(series=merged, cursor=cursor or "", has_more=False)


def metrics_path(model_id: str) -> str:
    return f"/api/v1/training_runs/{quote(model_id, safe=':')}/metrics"
