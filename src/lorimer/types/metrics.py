"""Metrics of a run over its steps: what is reported, what is read, and how the parts of one step become one value."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, Strict

from lorimer.types.base import Request, Response

MAX_NAME_CHARS = 200
LAST_STEP = 2**53 - 1
"""The largest whole number that every reader of JSON keeps."""
LAST_SECOND = 100_000_000_000.0

NotFinite = Literal["NaN", "Infinity", "-Infinity"]
"""JSON has no such numbers; a report spells them."""
Step = Annotated[int, Strict(), Field(ge=0, le=LAST_STEP)]
Value = Annotated[float, Strict()] | NotFinite


class MetricPoint(Request):
    """What a client measured in one step; ``time`` is in seconds since 1970, by default now."""

    step: Step
    time: Annotated[float, Strict(), Field(ge=0, le=LAST_SECOND)] | None = None
    values: dict[str, Value]


class ReportMetricsRequest(Request):
    points: list[MetricPoint]


class ReportMetricsResponse(Response):
    num_values: int


class MetricSeries(Response):
    name: str
    source: Literal["engine", "client"]
    points: list[tuple[int, float, float | None]]
    """``(step, unix seconds, value)`` in order of the steps; ``None`` where the value is not finite."""
    steps_per_bucket: int = 1
    """1 if these are all points; else of each so many steps the first, last, least, greatest and first not finite."""


class RunMetricsResponse(Response):
    series: list[MetricSeries]
    cursor: str
    """Where the next answer begins: what is new or was written again since this one."""
    has_more: bool


def spelled(value: float) -> float | NotFinite:
    """A number as a report holds it."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def reduce_metric(name: str, values: Sequence[float], weights: Sequence[int]) -> float:
    """One value of those of several parts, as the end of the name says: ``:sum`` adds, ``:mean`` averages by weight.

    ``:min`` and ``:max`` choose, ``:slack`` is the most above the average. The value of any other name is the last.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        match name.rpartition(":")[2] if ":" in name else "":
            case "sum":
                return float(np.sum(values))
            case "min":
                return float(np.min(values))
            case "max":
                return float(np.max(values))
            case "mean":
                return float(np.average(values, weights=weights))
            case "slack":
                return float(np.max(values) - np.average(values, weights=weights))
    return values[-1]
