"""The sink ``server``: loops report to their run by themselves, and never suffer from it."""

import logging
import math
import socket
import threading
import time

import pytest

from lorimer.client.connection import Connection
from lorimer.client.metrics import Reports
from lorimer.cookbook import reporting
from lorimer.cookbook.logs import DEFAULT_SINKS, open_log, read_metrics
from lorimer.cookbook.supervised import train
from tests.cookbook.test_supervised import MODEL, config


@pytest.fixture
def client(service):
    return service.create_lora_training_client(MODEL, rank=2, seed=0)


@pytest.fixture
def reported(service):
    """What clients reported to a run: by metric, the values of the steps."""

    def read(run_id):
        found = service.create_rest_client().get_metrics(run_id).result()
        return {
            one.name: {step: value for step, _, value in one.points} for one in found.series if one.source == "client"
        }

    return read


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "lorimer.cookbook")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "lorimer.cookbook"]


async def test_a_loop_reports_what_it_logs(service, log_dir, reported):
    await train(config(log_dir, sinks=DEFAULT_SINKS), service)
    newest = service.create_rest_client().list_training_runs(1).result().training_runs[0]
    expected: dict[str, dict[int, float]] = {}
    for line in read_metrics(log_dir):
        for name, value in line.items():
            if name != "step" and not isinstance(value, str):
                expected.setdefault(name, {})[line["step"]] = value
    assert "train/nll" in expected and "test/nll" in expected
    assert reported(newest.training_run_id) == expected


def test_a_log_reports_numbers_under_names_that_servers_take(client, log_dir, reported):
    with open_log(log_dir, config={}, sinks=["server"]) as log:
        log.log({"loss": 9.0}, 0)  # of no run yet
        log.follow(client)
        log.log({"loss": 1.0, "note": "text", "a,b\n": 2, "x" * 300: 3, "bad": math.nan}, 1)
        log.log({"loss": 0.5}, 2)
    assert reported(client.model_id) == {
        "loss": {1: 1.0, 2: 0.5},
        "a_b_": {1: 2.0},
        "x" * 200: {1: 3.0},
        "bad": {1: None},
    }


def test_quick_steps_share_requests(client, log_dir, reported, monkeypatch):
    sent = []
    send = Reports.send

    def count(self, points, *more):
        sent.append(len(points))
        return send(self, points, *more)

    monkeypatch.setattr(Reports, "send", count)
    with open_log(log_dir, config={}, sinks=["server"]) as log:
        log.follow(client)
        began = time.monotonic()
        for step in range(500):
            log.log({"loss": float(step), "other": 1.0}, step)
        assert time.monotonic() - began < 2.0
    assert sum(sent) == 500 and len(sent) < 50
    assert len(reported(client.model_id)["loss"]) == 500


def test_a_server_that_is_away_neither_stops_nor_fails_a_loop(client, log_dir, warnings, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    client.reports = Reports(Connection(address), client.model_id)
    monkeypatch.setattr(reporting, "MAX_POINTS", 10)
    monkeypatch.setattr(reporting, "CLOSE_SECONDS", 0.3)
    log = open_log(log_dir, config={}, sinks=["server"])
    log.follow(client)
    began = time.monotonic()
    for step in range(100):
        log.log({"loss": 1.0}, step)
    assert time.monotonic() - began < 1.0
    log.close()
    assert time.monotonic() - began < 3.0
    assert len(warnings()) == 1 and "metrics are not reported to the server" in warnings()[0]


def test_a_server_that_comes_back_gets_what_it_missed(client, log_dir, reported, monkeypatch):
    """The first requests find nobody; what is logged meanwhile arrives with them, in order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = Reports(Connection(f"http://127.0.0.1:{free.getsockname()[1]}"), client.model_id)
    monkeypatch.setattr(reporting, "PATIENCE_SECONDS", 0.2)
    there, client.reports = client.reports, gone
    with open_log(log_dir, config={}, sinks=["server"]) as log:
        log.follow(client)
        failed = threading.Event()
        monkeypatch.setattr(reporting.ServerSink, "_warn", lambda self, reason: failed.set())
        log.log({"loss": 0.0}, 0)
        assert failed.wait(30)
        for step in range(1, 5):
            log.log({"loss": float(step)}, step)
        client.reports = there
        deadline = time.monotonic() + 30
        while len(reported(client.model_id).get("loss", ())) < 5 and time.monotonic() < deadline:
            time.sleep(0.1)
    assert reported(client.model_id)["loss"] == {step: float(step) for step in range(5)}


def test_a_run_that_is_not_there_is_given_up_after_one_warning(client, log_dir, warnings):
    client.reports = Reports(client.holder.connection, "nothing:train:0")
    with open_log(log_dir, config={}, sinks=["server"]) as log:
        log.follow(client)
        for step in range(3):
            log.log({"loss": 1.0}, step)
    assert len(warnings()) == 1 and "nothing:train:0" in warnings()[0]
