"""Exports a session's requests in the Chrome trace event format, which Perfetto opens.

Each run and each sampler is a process of the trace. A request is a slice from arrival to completion, with two slices
inside: queued and running. Overlapping slices are placed in separate rows, as threads.
"""

import heapq
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from lorimer.store.futures import FutureRow

Event = dict[str, Any]


def trace(session_id: str, began_at: datetime, rows: Iterable[FutureRow], now: datetime) -> dict[str, Any]:
    """Build the trace of a session. Unfinished requests last until `now`; times are microseconds since `began_at`.

    If the clock was set back meanwhile, the trace starts at the first request, so no time is negative.
    """
    lanes: dict[str, list[FutureRow]] = {}
    for row in rows:
        lanes.setdefault(row.lane, []).append(row)
        began_at = min(began_at, row.received_at)
    events: list[Event] = []
    for number, (lane, members) in enumerate(sorted(lanes.items()), start=1):
        events.append(_name("process_name", number, 0, lane.removeprefix(f"{session_id}:")))
        events += _lane_events(number, members, began_at, now)
    metadata = {"session_id": session_id, "began_at": began_at.isoformat()}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata}


def _lane_events(process: int, rows: list[FutureRow], began_at: datetime, now: datetime) -> Iterable[Event]:
    """Yield the slices of a lane. A row is reused by the first request that arrives after its last one ended."""
    free: list[int] = []
    busy: list[tuple[datetime, int]] = []
    num_rows = 0
    for row in sorted(rows, key=lambda row: (row.received_at, row.seq_id or 0)):
        while busy and busy[0][0] <= row.received_at:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            num_rows += 1
            yield _name("thread_name", process, num_rows, f"row {num_rows}")
            heapq.heappush(free, num_rows)
        thread = heapq.heappop(free)
        ended_at = max(row.finished_at or now, row.received_at)
        heapq.heappush(busy, (ended_at, thread))
        yield from _slices(process, thread, row, ended_at, began_at)


def _slices(process: int, thread: int, row: FutureRow, ended_at: datetime, began_at: datetime) -> Iterable[Event]:
    def slice_of(name: str, start: datetime, end: datetime, **args: Any) -> Event:
        times = {"ts": _microseconds(start - began_at), "dur": _microseconds(end - start)}
        return {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": row.state, **times, "args": args}

    started_at = min(max(row.started_at or ended_at, row.received_at), ended_at)
    facts = {"request_id": row.request_id, "seq_id": row.seq_id, "tokens": row.tokens, "state": row.state}
    if row.error:
        facts["error"] = row.error
    yield slice_of(row.kind, row.received_at, ended_at, **facts)
    if started_at > row.received_at:  # Perfetto nests whatever follows a slice of length zero inside it
        yield slice_of("queued", row.received_at, started_at)
    if row.started_at is not None and ended_at > started_at:
        yield slice_of("running", started_at, ended_at)


def _microseconds(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1_000_000)


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
