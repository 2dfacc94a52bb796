"""Curves of runs, drawn from their ``metrics.jsonl``: a PNG by matplotlib, and an HTML page without scripts.

A chart has one metric and a line for each run that has it. What a loop writes is described in ``logs.py``.
"""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lorimer.cookbook.logs import METRICS_FILE, read_metrics
from lorimer.errors import InvalidInput

Line = list[tuple[float, float]]
"""Points: step and value."""

COLORS = "#1f77b4 #d62728 #2ca02c #9467bd #ff7f0e #17becf #8c564b #e377c2".split()
FIRST = ("reward/total", "correct", "accuracy", "nll", "loss", "kl", "entropy", "grad_norm")
"""What people look at first; a metric with one of these in its name comes before the others, in this order."""
DULL = ("time/*", "num_*", "*/num_*", "step", "tokens_per_second")
"""Left out unless asked for."""


@dataclass(frozen=True)
class Chart:
    metric: str
    lines: Mapping[str, Line]
    """By the name of the run."""
    x_label: str = "step"
    is_log_x: bool = False
    """Whether the horizontal axis is logarithmic; it then starts above 0."""


def read_charts(directories: Sequence[Path | str], metrics: Sequence[str] = ()) -> list[Chart]:
    """A chart for each metric that matches one of the patterns, or for all but the dull ones without a pattern."""
    runs = {name: _read(path) for name, path in _names([Path(path) for path in directories]).items()}
    names = list(dict.fromkeys(name for lines in runs.values() for name in lines))
    chosen = [name for name in names if _is_wanted(name, metrics)]
    if not chosen:
        wanted = f"matches {', '.join(metrics)}" if metrics else "is worth a chart"
        raise InvalidInput(f"no metric {wanted}; there are {', '.join(names) or 'none'}")
    chosen.sort(key=lambda name: next((place for place, word in enumerate(FIRST) if word in name), len(FIRST)))
    return [Chart(name, {run: lines[name] for run, lines in runs.items() if name in lines}) for name in chosen]


def _names(directories: list[Path]) -> dict[str, Path]:
    """The shortest ends of the paths that tell them apart."""
    paths = [path.resolve() for path in directories]
    for length in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return dict(zip(names, paths, strict=True))
    raise InvalidInput(f"the same directory was given twice: {', '.join(map(str, directories))}")


def _read(directory: Path) -> dict[str, Line]:
    if not (directory / METRICS_FILE).exists():
        raise InvalidInput(f"{str(directory)!r} has no {METRICS_FILE}; give the log directory of a run")
    lines: dict[str, Line] = {}
    for row in read_metrics(directory):
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                lines.setdefault(name, []).append((row["step"], value))
    return lines


def _is_wanted(name: str, patterns: Sequence[str]) -> bool:
    if patterns:
        return any(fnmatch(name, pattern) or pattern == name for pattern in patterns)
    return not any(fnmatch(name, pattern) for pattern in DULL)


def smoothed(line: Line, weight: float) -> Line:
    """An exponential moving average that starts without a bias; ``weight`` 0 changes nothing, towards 1 it flattens."""
    if not 0 <= weight < 1:
        raise InvalidInput(f"smoothing is {weight!r}; 0 or more and less than 1 is accepted")
    total, norm, points = 0.0, 0.0, []
    for step, value in line:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        points.append((step, total / norm))
    return points


def draw_png(charts: Sequence[Chart], path: Path | str, *, smoothing: float = 0.0, title: str = "") -> Path:
    """The charts in a grid; smoothed lines stand before their faint originals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(charts))
    rows = -(-len(charts) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.6 * columns, 3.1 * rows), squeeze=False, dpi=120)
    for axis, chart in zip(axes.flat, charts, strict=False):
        _draw_chart(axis, chart, smoothing)
    for axis in list(axes.flat)[len(charts) :]:
        axis.set_axis_off()
    if title:
        figure.suptitle(title)
    figure.tight_layout()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _draw_chart(axis: Any, chart: Chart, smoothing: float) -> None:
    for color, (run, line) in zip(_colors(len(chart.lines)), chart.lines.items(), strict=True):
        steps, values = zip(*line, strict=True)
        marker = "o" if len(line) < 3 else ""
        if smoothing and len(line) > 2:
            axis.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            values = tuple(value for _, value in smoothed(line, smoothing))
        axis.plot(steps, values, color=color, marker=marker, linewidth=1.6, label=run)
    axis.set_title(chart.metric, fontsize=9)
    axis.grid(alpha=0.25)
    axis.tick_params(labelsize=8)
    axis.set_xlabel(chart.x_label, fontsize=8)
    if chart.is_log_x:
        axis.set_xscale("log")
    if len(chart.lines) > 1:
        axis.legend(fontsize=7)


def _colors(number: int) -> list[str]:
    return [COLORS[place % len(COLORS)] for place in range(number)]


# ── HTML ──────────────────────────────────────────────────────────────────────────────────────────────

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 460, 250, 54, 30, 12
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
{refresh}<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; --text: #555; }}
@media (prefers-color-scheme: dark) {{ :root {{ --text: #aaa; }} }}
body {{ font: 14px system-ui, sans-serif; margin: 24px; }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap: 20px; }}
figure {{ margin: 0; }} figcaption {{ font-weight: 600; margin-bottom: 4px; overflow-wrap: anywhere; }}
svg {{ width: 100%; height: auto; }} text {{ fill: var(--text); font-size: 11px; }}
.grid {{ stroke: var(--line); }} .raw {{ opacity: .3; }} circle:hover {{ r: 5; fill-opacity: 1; }}
.key span {{ margin-right: 14px; white-space: nowrap; }} .key i {{ display: inline-block; width: 12px; height: 3px;
vertical-align: middle; margin-right: 5px; }}
</style>
<h1>{title}</h1><p class="key">{key}</p>
<main>{charts}</main></html>
"""


def write_html(
    charts: Sequence[Chart],
    path: Path | str,
    *,
    smoothing: float = 0.0,
    title: str = "Metrics",
    refresh_seconds: int | None = None,
) -> Path:
    """One page that needs nothing else; the value of a point shows when the pointer is on it.

    With ``refresh_seconds`` a browser loads it again and again, for a run that goes on.
    """
    runs = list(dict.fromkeys(run for chart in charts for run in chart.lines))
    colors = dict(zip(runs, _colors(len(runs)), strict=True))
    key = "".join(f'<span><i style="background:{colors[run]}"></i>{html.escape(run)}</span>' for run in runs)
    figures = "".join(
        f"<figure><figcaption>{html.escape(chart.metric)}</figcaption>{_svg(chart, colors, smoothing)}</figure>"
        for chart in charts
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    refresh = f'<meta http-equiv="refresh" content="{int(refresh_seconds)}">' if refresh_seconds else ""
    page = _PAGE.format(title=html.escape(title), key=key, charts=figures, refresh=refresh)
    part = path.with_name(path.name + ".part")  # a browser never loads half a page
    part.write_text(page, "utf-8")
    part.replace(path)
    return path


def _svg(chart: Chart, colors: Mapping[str, str], smoothing: float) -> str:
    points = [point for line in chart.lines.values() for point in line]
    scale: Callable[[float], float] = math.log10 if chart.is_log_x else float
    steps, values = _range([scale(step) for step, _ in points]), _range([value for _, value in points])

    def place(step: float, value: float) -> tuple[str, str]:
        x = LEFT + (WIDTH - LEFT - 8) * (scale(step) - steps[0]) / (steps[1] - steps[0])
        y = TOP + (HEIGHT - TOP - BOTTOM) * (values[1] - value) / (values[1] - values[0])
        return f"{x:.1f}", f"{y:.1f}"

    parts = []
    for part in range(5):
        step, value = (low + (high - low) * part / 4 for low, high in (steps, values))
        step = 10**step if chart.is_log_x else step
        x, y = place(step, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 8}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y}" text-anchor="end" dominant-baseline="middle">{value:.3g}</text>')
        parts.append(f'<text x="{x}" y="{HEIGHT - 10}" text-anchor="middle">{step:.4g}</text>')
    for run, line in chart.lines.items():
        shown = smoothed(line, smoothing)
        for kind, drawn in (("raw", line if smoothing else []), ("", shown)):
            if drawn:
                path = " ".join(",".join(place(*point)) for point in drawn)
                parts.append(
                    f'<polyline class="{kind}" fill="none" stroke="{colors[run]}" stroke-width="1.8" points="{path}"/>'
                )
        for step, value in line:
            x, y = place(step, value)
            told = html.escape(f"{run}, {chart.x_label} {step:g}: {value:.6g}")
            dot = f'<circle cx="{x}" cy="{y}" r="3" fill="{colors[run]}" fill-opacity="{0.9 if len(line) < 60 else 0}">'
            parts.append(f"{dot}<title>{told}</title></circle>")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        return low - 0.5, high + 0.5
    return low, high
