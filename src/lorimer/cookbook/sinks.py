"""Sinks of metrics besides those of ``logs.py``: trackers of other projects, and a page of curves.

Each is chosen by its name in ``sinks=("jsonl", "console", "tensorboard")``. The packages are loaded when they are asked
for; one that is missing is named with the command that installs it. A resumed run goes on in its own place.
"""

import contextlib
import importlib
import io
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lorimer.cookbook.logs import Metrics, Sink, write_atomically
from lorimer.cookbook.plots import read_charts, write_html
from lorimer.errors import InvalidInput

PAGE_FILE = "curves.html"
REFRESH_SECONDS = 3
RUN_FILE = "tracked_run.json"
"""The name that a tracker gave the run, so that a resumed one goes on with it."""


def open_sink(name: str, directory: Path | str, *, config: Mapping[str, Any], resume_step: int = 0) -> Sink:
    """The sink of that name for the run in ``directory``."""
    if name not in SINKS:
        accepted = ", ".join(["jsonl", "console", "server", *sorted(SINKS)])
        raise InvalidInput(f"there is no sink {name!r}; accepted are {accepted}")
    return SINKS[name](Path(directory), config, resume_step)


def _load(package: str, module: str | None = None) -> Any:
    try:
        return importlib.import_module(module or package)
    except ImportError as error:
        raise InvalidInput(
            f"the sink {package!r} needs the package {package}, which is not installed: pip install {package} ({error})"
        ) from None


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if not isinstance(value, str)}


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(dict(config), default=str)))


def _remembered(directory: Path, tracker: str, resume_step: int, new: Callable[[], str]) -> str:
    """The run's name with a tracker: the one of before where it is resumed, else a new one, which is noted."""
    path = directory / RUN_FILE
    names = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if not resume_step or tracker not in names:
        names[tracker] = new()
        write_atomically(path, json.dumps(names, indent=2) + "\n")
    return str(names[tracker])


class TensorBoardSink:
    """Event files in the directory's ``tensorboard``. Points of steps that are computed again are dropped."""

    def __init__(self, directory: Path, config: Mapping[str, Any], resume_step: int) -> None:
        # Torch's writer is tensorboard's own with less around it, and needs the package all the same.
        _load("tensorboard")
        writer = _load("tensorboard", "torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(directory / "tensorboard"), purge_step=resume_step or None)
        if not resume_step:
            self._writer.add_text("config", f"```\n{json.dumps(_plain(config), indent=2)}\n```")

    def log(self, metrics: Metrics, step: int) -> None:
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases, of the project in ``WANDB_PROJECT`` or ``lorimer``."""

    def __init__(self, directory: Path, config: Mapping[str, Any], resume_step: int) -> None:
        wandb = _load("wandb")
        run_id = _remembered(directory, "wandb", resume_step, lambda: secrets.token_hex(4))
        self._run = wandb.init(
            project=_setting("WANDB_PROJECT", "lorimer"),
            name=directory.name,
            id=run_id,
            resume="allow",
            dir=str(directory),
            config=_plain(config),
        )
        # Steps of its own: W&B's may only rise, and a resumed run computes some again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log(_numbers(metrics) | {"step": step})

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """A run of the experiment in ``MLFLOW_EXPERIMENT_NAME`` or ``lorimer``, at ``MLFLOW_TRACKING_URI``."""

    def __init__(self, directory: Path, config: Mapping[str, Any], resume_step: int) -> None:
        self._client = _load("mlflow").MlflowClient()
        experiment = _setting("MLFLOW_EXPERIMENT_NAME", "lorimer")
        self._run_id = _remembered(
            directory, "mlflow", resume_step, lambda: self._begin(experiment, directory.name, config)
        )

    def _begin(self, experiment: str, name: str, config: Mapping[str, Any]) -> str:
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)
        run_id = str(self._client.create_run(experiment_id, run_name=name).info.run_id)
        for key, value in _plain(config).items():
            self._client.log_param(run_id, key, str(value)[:500])  # the least that its stores take
        return run_id

    def log(self, metrics: Metrics, step: int) -> None:
        entities = _load("mlflow", "mlflow.entities")
        now = int(time.time() * 1000)
        # It refuses names with other marks than these.
        named = {name.replace("@", "_at_").replace(":", "_"): value for name, value in _numbers(metrics).items()}
        points = [entities.Metric(name, value, now, step) for name, value in named.items()]
        self._client.log_batch(self._run_id, metrics=points)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class TrackioSink:
    """A run of trackio's local database, of the project in ``TRACKIO_PROJECT`` or ``lorimer``."""

    def __init__(self, directory: Path, config: Mapping[str, Any], resume_step: int) -> None:
        trackio = _load("trackio")
        name = _remembered(directory, "trackio", resume_step, lambda: f"{directory.name}-{int(time.time())}")
        with contextlib.redirect_stdout(io.StringIO()):  # it prints how to start its own server
            self._run = trackio.init(
                project=_setting("TRACKIO_PROJECT", "lorimer"), name=name, config=_plain(config), resume="allow"
            )

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log(_numbers(metrics), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


class PageSink:
    """``curves.html`` in the directory, written anew at most once a second; a browser follows it until the end.

    It is drawn from ``metrics.jsonl``, so the sink ``jsonl`` stands before it.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any], resume_step: int) -> None:
        self._directory, self._written = directory, -1.0

    def log(self, metrics: Metrics, step: int) -> None:
        if time.monotonic() - self._written >= 1.0 or self._written < 0:
            self._write(REFRESH_SECONDS)

    def _write(self, refresh_seconds: int | None) -> None:
        with contextlib.suppress(InvalidInput):  # there is no metric to draw yet
            title = self._directory.name
            write_html(
                read_charts([self._directory]),
                self._directory / PAGE_FILE,
                title=title,
                refresh_seconds=refresh_seconds,
            )
        self._written = time.monotonic()

    def close(self) -> None:
        self._write(None)


def _setting(variable: str, default: str) -> str:
    return os.environ.get(variable, default)


SINKS: dict[str, Callable[[Path, Mapping[str, Any], int], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "trackio": TrackioSink,
    "page": PageSink,
}
