"""Traces of sessions: slices that nest, rows that do not overlap, one process for each run and sampler."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorimer.server.tracing import trace
from lorimer.store.futures import FutureRow
from tests.server.traces import check_trace

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
        "place": None,
    }
    return FutureRow(**(fields | values))


def slices(rows, now=100.0):
    made = trace("s", BEGAN, rows, BEGAN + timedelta(seconds=now))
    check_trace(orjson.loads(orjson.dumps(made)))
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


MOMENTS = st.none() | st.floats(-5, 60, allow_nan=False).map(lambda seconds: round(seconds, 6))
ROWS = st.builds(
    lambda number, lane, received, started, finished: row(str(number), lane, received, started, finished),
    st.integers(),
    st.sampled_from(["s:train:0", "s:train:1", "s:sample:0"]),
    st.floats(-5, 60, allow_nan=False).map(lambda seconds: round(seconds, 6)),
    MOMENTS,
    MOMENTS,
)


@given(st.lists(ROWS, max_size=30))
def test_whatever_happened_when_the_trace_is_well_formed(rows):
    found, _ = slices(rows)
    assert sum("request_id" in event["args"] for event in found) == len(rows)


def broken(**changes):
    event = {"ph": "X", "pid": 1, "tid": 1, "name": "a", "cat": "c", "ts": 5, "dur": 3, "args": {}} | changes
    names = [("process_name", 0), ("thread_name", 1)]
    named = [{"ph": "M", "pid": 1, "tid": tid, "name": name, "args": {"name": "x"}} for name, tid in names]
    outer = {"ph": "X", "pid": 1, "tid": 1, "name": "o", "cat": "c", "ts": 4, "dur": 10, "args": {}}
    return {"traceEvents": [*named, outer, event], "displayTimeUnit": "ms", "otherData": {}}


@pytest.mark.parametrize(
    "changes",
    [{"ts": 5.5}, {"ts": -1}, {"dur": -1}, {"dur": 20}, {"tid": 0}, {"pid": 0}, {"tid": 2}, {"ts": 3}, {"id": 4}],
    ids=str,
)
def test_planted_faults_are_found(changes):
    check_trace(broken())
    with pytest.raises(AssertionError):
        check_trace(broken(**changes))
