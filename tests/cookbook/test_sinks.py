"""Sinks: the page that follows a run, and trackers of other projects where they are installed."""

import json
import sys
import time

import pytest

from lorimer.cookbook import sinks
from lorimer.cookbook.logs import open_log
from lorimer.cookbook.sinks import open_sink
from lorimer.errors import InvalidInput


def run(directory, name, resume_step=0, num_steps=3):
    with open_log(directory, config={"rank": 4}, resume_step=resume_step, sinks=["jsonl", name]) as log:
        for step in range(resume_step, num_steps):
            log.log({"train/nll": 3.0 - step, "note": "a text"}, step)
    return directory


def test_unknown_sinks_and_missing_packages_are_named(tmp_path, monkeypatch):
    with pytest.raises(InvalidInput, match=r"no sink 'csv'; accepted are jsonl, console, server, mlflow, page"):
        open_sink("csv", tmp_path, config={})
    for package in ("tensorboard", "wandb", "mlflow", "trackio"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(InvalidInput, match=f"pip install {package}"):
            open_sink(package, tmp_path, config={})


def test_the_page_follows_a_run_until_its_end(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(sinks.time, "monotonic", lambda: now[0])
    page = tmp_path / "curves.html"
    with open_log(tmp_path, config={}, sinks=["jsonl", "page"]) as log:
        log.log({"train/nll": 3.0}, 0)
        assert '<meta http-equiv="refresh" content="3">' in page.read_text("utf-8")
        log.log({"train/nll": 2.0}, 1)
        assert "step 1: 2" not in page.read_text("utf-8"), "at most once a second"
        now[0] += 1.0
        log.log({"train/nll": 1.0}, 2)
        assert "step 2: 1" in page.read_text("utf-8")
        log.log({"train/nll": 0.5}, 3)
    assert "step 3: 0.5" in page.read_text("utf-8")
    assert "refresh" not in page.read_text("utf-8"), "a page of a run that has ended stays as it is"


def test_tensorboard_has_the_points_of_a_resumed_run_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(tmp_path, "tensorboard")
    run(tmp_path, "tensorboard", resume_step=2, num_steps=4)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/nll"]
    assert [(event.step, event.value) for event in events.Scalars("train/nll")] == [(0, 3), (1, 2), (2, 1), (3, 0)]


def test_mlflow_goes_on_with_its_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    run(tmp_path / "log", "mlflow")
    run(tmp_path / "log", "mlflow", resume_step=2, num_steps=4)
    run_id = json.loads((tmp_path / "log" / sinks.RUN_FILE).read_text())["mlflow"]
    client = mlflow.MlflowClient()
    assert {point.step: point.value for point in client.get_metric_history(run_id, "train/nll")} == {
        0: 3.0,
        1: 2.0,
        2: 1.0,
        3: 0.0,
    }
    found = client.get_run(run_id)
    assert found.data.params == {"rank": "4"}
    assert found.info.status == "FINISHED"


def test_wandb_logs_without_a_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run(tmp_path / "log", "wandb")
    files = list((tmp_path / "log").rglob("*.wandb"))
    assert len(files) == 1
    deadline = time.monotonic() + 30
    while b"train/nll" not in files[0].read_bytes():  # a process of its own writes the end of it
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_trackio_has_the_points(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    run(tmp_path / "log", "trackio")
    database = next((tmp_path / "trackio").rglob("*.db"))
    assert b"train/nll" in b"".join(path.read_bytes() for path in database.parent.glob("*.db*"))
