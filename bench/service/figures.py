"""Defines the figures of a row and their targets, and writes the table that shows which are met."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report import Aim


def at_most(bound: float) -> Aim:
    return Aim(bound, is_minimum=False)


AIMS = {
    "engine start": at_most(5),
    "added latency": at_most(3),
    "added latency p99": at_most(6),
    "publish": at_most(10),
    "client throughput": Aim(300),
    "lost": at_most(0),
    "sample fairness": at_most(3),
    "client fairness": at_most(1.5),
    "heartbeat": at_most(50),
    "submit": at_most(50),
    "hostile": at_most(2),
    "growth": at_most(1.05),
    "operation": at_most(1.15),
    "sdk overhead": at_most(1),
    "sweep": at_most(1.1),
}
"""Targets by `Figure.aim`: seconds for engine start, milliseconds for latency, publish, heartbeat and submit, counts
for lost and (a second) for throughput, ratios for the others."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number and its details."""

    text: str
    value: float
    unit: str = ""
    details: str = ""
    aim: str = ""
    """The entry of ``AIMS`` that applies."""

    def cells(self) -> list[str]:
        aim = AIMS.get(self.aim)
        verdict = ["-", "-"] if aim is None else [str(aim), "yes" if aim.is_met(self.value) else "**no**"]
        return [self.text, f"{rounded(self.value)} {self.unit}".strip(), self.details or "-", *verdict]


HEADER = ["row", "figure", "of which", "aim", "met"]


def table(figures: Sequence[Figure]) -> str:
    rows = [HEADER, ["---"] * len(HEADER), *(figure.cells() for figure in figures)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def rounded(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.2f}"


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` of all values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def spread(seconds: Sequence[float]) -> str:
    """Format the median and 99th percentile of durations, in milliseconds."""
    return f"p50 {1000 * median(seconds):.1f} ms, p99 {1000 * percentile(seconds, 99):.1f} ms (n={len(seconds)})"
