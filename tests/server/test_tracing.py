"""Traces of sessions: slices that nest, rows that do not overlap, one process for each run and sampler."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import orjson

from lorimer.server.tracing import trace
from lorimer.store.futures import FutureRow

BEGAN = datetime(2026, 5, 1, tzinfo=UTC)


def row(request_id, lane, received, started, finished, **values):
    def at(seconds):
        return None if seconds is None else BEGAN + timedelta(seconds=seconds)

    fields = {
        "request_id": request_id,
        "user_id": "u",
        "session_id": "s",
        "kind": "forward_backward",
        "lane": lane,
        "seq_id": 1,
        "state": "done",
        "error": None,
        "category": None,
        "received_at": at(received),
        "started_at": at(started),
        "finished_at": at(finished),
        "fetched_at": None,
        "tokens": 12,
        "result_format": "protobuf",
        "result_size": 10,
        "payload_sha256": "",
    }
    return FutureRow(**(fields | values))


def slices(rows, now=100.0):
    made = trace("s", BEGAN, rows, BEGAN + timedelta(seconds=now))
    orjson.dumps(made)
    return [event for event in made["traceEvents"] if event["ph"] == "X"], made


def test_request_is_a_slice_of_waiting_and_running():
    found, made = slices([row("r", "s:train:0", 1, 3, 7)])
    assert [(event["name"], event["ts"], event["dur"]) for event in found] == [
        ("forward_backward", 1_000_000, 6_000_000),
        ("queued", 1_000_000, 2_000_000),
        ("running", 3_000_000, 4_000_000),
    ]
    assert found[0]["args"] == {"request_id": "r", "seq_id": 1, "tokens": 12, "state": "done"}
    assert made["otherData"] == {"session_id": "s", "began_at": "2026-05-01T00:00:00+00:00"}


def test_each_run_and_sampler_is_a_process():
    rows = [row("a", "s:train:0", 0, 1, 2), row("b", "s:sample:0", 0, 1, 2), row("c", "s:train:0", 3, 4, 5)]
    found, made = slices(rows)
    names = {event["pid"]: event["args"]["name"] for event in made["traceEvents"] if event["name"] == "process_name"}
    by_name = {names[event["pid"]]: event["args"]["request_id"] for event in found if "request_id" in event["args"]}
    assert by_name == {"train:0": "c", "sample:0": "b"}


def test_slices_of_one_row_do_not_overlap():
    rows = [
        row(str(number), "s:sample:0", number % 7, number % 7 + 1, number % 7 + 3 + number % 3) for number in range(40)
    ]
    found, _ = slices(rows)
    whole = [event for event in found if "request_id" in event["args"]]
    assert len(whole) == 40
    for thread in {event["tid"] for event in whole}:
        members = sorted((event["ts"], event["ts"] + event["dur"]) for event in whole if event["tid"] == thread)
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(members))


def test_unfinished_request_lasts_until_now():
    found, _ = slices([row("r", "s:train:0", 1, None, None, state="queued")], now=5)
    assert [(event["name"], event["dur"]) for event in found] == [
        ("forward_backward", 4_000_000),
        ("queued", 4_000_000),
    ]


def test_failed_request_says_why():
    found, _ = slices([row("r", "s:train:0", 1, 2, 3, state="failed", error="token 9 is out of range")])
    assert found[0]["args"]["error"] == "token 9 is out of range"


def test_clock_that_jumped_gives_no_negative_times():
    found, _ = slices([row("r", "s:train:0", 5, 3, 4)])
    assert all(event["dur"] >= 0 for event in found)
