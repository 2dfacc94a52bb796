"""A long run does not fill the disk: what was fetched and secured goes, whatever the number of steps.

A week in little: everything that is kept for hours or days is kept for a second or two.
"""

import json
import logging
import sqlite3
import time
from contextlib import closing

import pytest

from tests.conformance.servers import create_key
from tests.faults.programs import RunningProgram
from tests.faults.supervisor import Supervisor
from tests.faults.tenant import Plan

log = logging.getLogger(__name__)

PLAN = Plan(steps=400, sample_every=5, save_every=0, tokens=200)
SOON = {
    "result_seconds_after_fetch": 1,
    "result_seconds": 4,
    "history_seconds": 4,
    "ephemeral_samplers_per_run": 1,
    "ephemeral_seconds": 2,
    "sampler_idle_seconds": 2,
    "snapshot_seconds": 0.1,
    "sweep_seconds": 0.5,
    "heartbeat_flush_seconds": 0.2,
}
COUNTS = {
    "requests": "select count(*) from futures",
    "bytes of requests": "select coalesce(sum(length(data)), 0) from blobs",
    "samplers": "select count(*) from samplers",
    "weights": "select count(*) from weights",
}


@pytest.mark.slow
def test_a_long_run_stays_small(tmp_path):
    key = create_key(tmp_path / "data", "alice")
    with Supervisor(tmp_path / "data", **SOON) as server:
        program = RunningProgram(server.url, key, PLAN, tmp_path / "home")
        seen = []
        try:
            while program.is_running:
                time.sleep(0.25)
                seen.append({"steps": program.num_steps} | measured(server))
        finally:
            program.finish()
    first, second = (half(seen, late) for late in (False, True))
    log.info("first half %s, second half %s", json.dumps(first), json.dumps(second))
    for name in second:
        assert second[name] <= 1.5 * first[name] + 4096, name
    num_requests = 2 * PLAN.steps + 2 * PLAN.steps // PLAN.sample_every
    assert second["requests"] < num_requests / 2
    assert second["samplers"] < 30 and second["weights"] < 30


def measured(server: Supervisor) -> dict[str, int]:
    disk = server.disk_bytes()
    with closing(sqlite3.connect(f"file:{server.data / 'lorimer.db'}?mode=ro", uri=True)) as database:
        counts = {name: database.execute(query).fetchone()[0] for name, query in COUNTS.items()}
    places = ("lorimer.db", "lorimer.db-wal", "blobs", "snapshots", "weights")
    return counts | {f"disk {place}": disk.get(place, 0) for place in places}


def half(seen: list[dict[str, int]], late: bool) -> dict[str, int]:
    """The most there ever was of each, in the first or the second half of the steps."""
    chosen = [one for one in seen if (one["steps"] > PLAN.steps / 2) == late]
    return {name: max(one[name] for one in chosen) for name in seen[0] if name != "steps"}
