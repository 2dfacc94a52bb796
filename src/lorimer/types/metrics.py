"""Metrics of a run by step: the messages to report and read them, and the reduction of a step's parts to one value."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, Strict

from lorimer.types.base import Request, Response

MAX_NAME_CHARS = 200
LAST_STEP = 2**53 - 1
"""The largest integer that every JSON parser reads exactly."""
LAST_SECOND = 100_000_000_000.0

NotFinite = Literal["NaN", "Infinity", "-Infinity"]
"""JSON has no such numbers, so a report spells them as strings."""
Step = Annotated[int, Strict(), Field(ge=0, le=LAST_STEP)]
Value = Annotated[float, Strict()] | NotFinite


class MetricPoint(Request):
    """What a client measured in one step; ``time`` is in seconds since 1970, by default now."""

    step: Step
    time: Annotated[float, Strict(), Field(ge=0, le=LAST_SECOND)] | None = None
    values: dict[str, Value]
    optim_steps: Step | None = None
    """How many optimizer steps the training run has done by the end of this step.

    Only needed where a step of the client has several or none: the engine's metrics then have the client's steps.
    """


class ReportMetricsRequest(Request):
    points: list[MetricPoint]
    steps_done: Step | None = None
    """How many steps of the run are done, in the client's own count; left out, the last report holds."""


class ReportMetricsResponse(Response):
    num_values: int


class MetricSeries(Response):
    name: str
    source: Literal["engine", "client"]
    points: list[tuple[int, float, float | None]]
    """``(step, unix seconds, value)`` in order of steps; ``None`` if the value is not finite."""
    steps_per_bucket: int = 1
    """1 if no point was dropped.

    Else the size of a bucket, which keeps its first, last, smallest, largest and first non-finite value.
    """


class RunMetricsResponse(Response):
    series: list[MetricSeries]
    cursor: str
    """The cursor to pass next, to get what is new or rewritten since this response."""
    has_more: bool


def spelled(value: float) -> float | NotFinite:
    """Convert a number to its form in a report."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def reduce_metric(name: str, values: Sequence[float], weights: Sequence[int]) -> float:
    """Reduce the values of a step's parts to one, by the metric's suffix: ``:sum`` adds, ``:mean`` averages by weight.

    ``:min`` and ``:max`` select, ``:slack`` is the maximum minus the mean. Any other name takes the last value.
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
