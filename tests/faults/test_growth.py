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
from tests.faults.supervisor import Supervisor, eventually
from tests.faults.tenant import Plan

log = logging.getLogger(__name__)

PLAN = Plan(steps=400, sample_every=5, save_every=0, tokens=200)
SOON = {
    "result_seconds_after_fetch": 1,
    "result_seconds": 4,
    "history_seconds": 1,
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
}


NUM_SAMPLERS = PLAN.steps // PLAN.sample_every
NUM_REQUESTS = 2 * PLAN.steps + 2 * NUM_SAMPLERS
OF_ANY_RATE = ("disk lorimer.db-wal", "disk blobs", "disk snapshots")
"""What does not depend on how many steps fall into the seconds that things are kept."""


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
        # Only the checkpoint that was asked for stays, and what is not in a snapshot yet.
        eventually(lambda: measured(server)["weights"] == 1, "one directory of weights")
        eventually(lambda: measured(server)["samplers"] == 0, "no sampler")
        eventually(lambda: measured(server)["requests"] < NUM_REQUESTS / 10, "few requests")
        log.info("in the end %s", json.dumps(measured(server)))
    for name in OF_ANY_RATE:
        assert second[name] <= 1.5 * first[name] + 4096, name
    everything = NUM_REQUESTS * max(
        one["bytes of requests"] / max(one["requests"], 1) for one in seen[len(seen) // 2 :]
    )
    # Were nothing deleted, the second half would add half of everything; metrics of the run stay.
    assert second["disk lorimer.db"] < first["disk lorimer.db"] + everything / 4
    assert second["requests"] < NUM_REQUESTS / 3
    assert second["samplers"] < NUM_SAMPLERS / 3
    assert second["weights"] < NUM_SAMPLERS / 3


def measured(server: Supervisor) -> dict[str, int]:
    disk = server.disk_bytes()
    with closing(sqlite3.connect(f"file:{server.data / 'lorimer.db'}?mode=ro", uri=True)) as database:
        counts = {name: database.execute(query).fetchone()[0] for name, query in COUNTS.items()}
    places = ("lorimer.db", "lorimer.db-wal", "blobs", "snapshots", "weights")
    counts["weights"] = len(list((server.data / "weights").iterdir()))
    return counts | {f"disk {place}": disk.get(place, 0) for place in places}


def half(seen: list[dict[str, int]], late: bool) -> dict[str, int]:
    """The most there ever was of each, in the first or the second half of the steps."""
    chosen = [one for one in seen if (one["steps"] > PLAN.steps / 2) == late]
    return {name: max(one[name] for one in chosen) for name in seen[0] if name != "steps"}
