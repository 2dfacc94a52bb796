"""The Chrome trace event format as Perfetto reads it, checked strictly: types, units, names, and how slices nest."""

from itertools import pairwise
from typing import Any

COMMON = {"ph", "pid", "tid", "name"}
FIELDS = {"X": COMMON | {"cat", "ts", "dur", "args"}, "M": COMMON | {"args"}}
NAMES = {"process_name", "thread_name"}


def check_trace(trace: dict[str, Any]) -> None:
    """Fail on anything that a viewer drops, reports or guesses at."""
    assert trace.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert all(isinstance(value, str) for value in trace["otherData"].values())
    for event in trace["traceEvents"]:
        _check_event(event)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    rows = {(event["pid"], event["tid"]) for event in slices}
    named = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    processes = [event["pid"] for event in named if event["name"] == "process_name"]
    threads = [(event["pid"], event["tid"]) for event in named if event["name"] == "thread_name"]
    assert sorted(set(processes)) == sorted(processes), "a process has one name"
    assert sorted(set(threads)) == sorted(threads), "a row has one name"
    assert rows <= set(threads) and {pid for pid, _ in rows} <= set(processes), "whatever has slices has a name"
    for row in rows:
        _check_nesting([event for event in slices if (event["pid"], event["tid"]) == row])


def _check_event(event: dict[str, Any]) -> None:
    assert event.keys() == FIELDS[event["ph"]], event
    assert type(event["pid"]) is int and event["pid"] > 0, "0 is the idle task of a kernel"
    assert type(event["tid"]) is int and event["tid"] >= 0
    assert isinstance(event["name"], str) and event["name"]
    assert isinstance(event["args"], dict)
    if event["ph"] == "M":
        assert event["name"] in NAMES and event["args"].keys() == {"name"} and event["args"]["name"]
        return
    assert event["tid"] > 0 and isinstance(event["cat"], str) and event["cat"]
    assert type(event["ts"]) is int and event["ts"] >= 0, "whole microseconds: a viewer counts in nanoseconds"
    assert type(event["dur"]) is int and 0 <= event["dur"] < 2**53


def _check_nesting(slices: list[dict[str, Any]]) -> None:
    """In the order of the file a slice that holds others comes before them; no two overlap in part."""
    starts = [event["ts"] for event in slices]
    assert starts == sorted(starts), "in order of time, as slices with one start nest in the order of the file"
    open_until: list[int] = []
    for event in slices:
        while open_until and open_until[-1] <= event["ts"] and (event["dur"] or open_until[-1] < event["ts"]):
            open_until.pop()
        end = event["ts"] + event["dur"]
        assert not open_until or end <= open_until[-1], f"{event['name']} ends after what it lies in"
        open_until.append(end)
    for earlier, later in pairwise([event for event in slices if "request_id" in event["args"]]):
        assert earlier["ts"] + earlier["dur"] <= later["ts"], "requests of one row follow one another"
