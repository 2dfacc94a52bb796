"""The log of a run: ``config.json`` and ``metrics.jsonl`` in its directory, a display of its progress, and other sinks.

A resumed run drops the lines of steps it computes again, so that the file reads as if nothing had happened. Sinks that
need other packages are in ``sinks.py``; plots are drawn from the file by ``plots.py``.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from lorimer.cookbook.checkpoints import append_jsonl, read_jsonl
from lorimer.cookbook.progress import say
from lorimer.cookbook.run_health import Health
from lorimer.errors import InvalidInput

if TYPE_CHECKING:
    from lorimer.client.training import TrainingClient

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.json"
HEALTH_FILE = "health.jsonl"
"""What was told of a run that goes wrong; there is none while nothing does."""
DEFAULT_SINKS = ("jsonl", "console", "server")

Metric = float | int | str
Metrics = Mapping[str, Metric]


class Sink(Protocol):
    """Takes the metrics of each step. Those of one name in ``sinks.py`` are made by its ``open_sink``."""

    def log(self, metrics: Metrics, step: int) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class FollowingSink(Sink, Protocol):
    """One that needs to know the run."""

    def follow(self, client: "TrainingClient") -> None: ...


class MetricLog:
    """Hands metrics to every sink, in order of the steps."""

    def __init__(self, sinks: Sequence[Sink], health: "HealthLog | None" = None) -> None:
        self._sinks = list(sinks)
        self._health = health

    def follow(self, client: "TrainingClient") -> None:
        """The run that is trained from now on; the sink ``server`` reports to it."""
        for sink in self._sinks:
            if isinstance(sink, FollowingSink):
                sink.follow(client)

    def log(self, metrics: Metrics, step: int) -> None:
        """All metrics of step number ``step``; the first step has number 0."""
        if self._health is not None:
            metrics = self._health.marked(metrics, step)
        for sink in self._sinks:
            sink.log(metrics, step)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
        self._sinks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_log(
    directory: Path | str,
    *,
    config: Mapping[str, Any],
    total_steps: int | None = None,
    resume_step: int = 0,
    sinks: Sequence[str] = DEFAULT_SINKS,
) -> MetricLog:
    """The log of a run in ``directory``, which is made. ``config`` is what must not change when the run is resumed.

    ``sinks`` are names: ``jsonl``, ``console``, ``server``, which begins with ``follow``, and those of ``sinks.py``.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _write_config(directory / CONFIG_FILE, config, resume_step)
    before = [line for line in read_metrics(directory) if line["step"] < resume_step]
    health = HealthLog(directory / HEALTH_FILE, Health(config, before), resume_step) if sinks else None
    return MetricLog([_open_sink(name, directory, config, total_steps, resume_step) for name in sinks], health)


def read_metrics(directory: Path | str) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``: an object for each step."""
    return read_jsonl(Path(directory) / METRICS_FILE)


def _open_sink(
    name: str, directory: Path, config: Mapping[str, Any], total_steps: int | None, resume_step: int
) -> Sink:
    if name == "jsonl":
        return JsonlSink(directory / METRICS_FILE, resume_step)
    if name == "console":
        from lorimer.cookbook.progress import open_console

        return open_console(total_steps, resume_step)
    if name == "server":
        from lorimer.cookbook.reporting import ServerSink

        return ServerSink(total_steps)
    from lorimer.cookbook.sinks import open_sink

    return open_sink(name, directory, config=config, resume_step=resume_step)


class JsonlSink:
    """One object for each step, in the file before ``log`` returns: a checkpoint logged after it never misses it."""

    def __init__(self, path: Path, resume_step: int) -> None:
        kept = [line for line in read_jsonl(path) if line["step"] < resume_step]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: Metrics, step: int) -> None:
        line = {"step": step} | {name: _json_value(value) for name, value in metrics.items()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class HealthLog:
    """Tells what goes wrong in a run: in the terminal, in a file, and as ``health/...`` among the metrics."""

    def __init__(self, path: Path, health: Health, resume_step: int) -> None:
        self._path, self._health = path, health
        kept = [line for line in read_jsonl(path) if line["step"] < resume_step]
        if path.exists():
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))

    def marked(self, metrics: Metrics, step: int) -> Metrics:
        """Return the metrics with a mark for each thing that is wrong, and tell those that are new."""
        marks, concerns = self._health.look(metrics)
        for concern in concerns:
            say(f"warning: {concern}")
            append_jsonl(self._path, {"step": step, **vars(concern)})
        return {**metrics, **marks}


def _json_value(value: Metric) -> Metric | None:
    """NumPy's numbers as Python's; JSON has no number that is not finite."""
    if isinstance(value, str):
        return value
    number = value.item() if hasattr(value, "item") else value
    return number if math.isfinite(number) else None


def _write_config(path: Path, config: Mapping[str, Any], resume_step: int) -> None:
    values = json.loads(json.dumps(dict(config), default=str))
    if resume_step and path.exists():
        before = json.loads(path.read_text("utf-8"))
        changed = [
            f"{name} was {before.get(name)!r} and is {values.get(name)!r}"
            for name in sorted(before.keys() | values.keys())
            if before.get(name) != values.get(name)
        ]
        if changed:
            raise InvalidInput(
                f"{path.parent} holds a run of {resume_step} steps with another configuration: {'; '.join(changed)}. "
                "Give the same values to go on with it, or another directory"
            )
    write_atomically(path, json.dumps(values, indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by one that is complete on disk."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
