"""Tenants come, train, sample, save and leave, for as long as ``SOAK_SECONDS`` says: memory and disk stay flat.

`make soak` runs it for half an hour, `make faults` for a minute. Everything that is kept for hours or days is kept for
seconds here, so that what would grow in a week grows in the time there is.
"""

import json
import logging
import os
import statistics
import time
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.conformance.servers import create_key
from tests.faults.programs import RunningProgram
from tests.faults.supervisor import Supervisor
from tests.faults.tenant import Plan
from tests.faults.test_growth import SOON

log = logging.getLogger(__name__)

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
PLAN = Plan(steps=12, sample_every=3, save_every=0, tokens=100)
KEPT = {
    "result_seconds": 30,
    "history_seconds": 30,
    "ephemeral_seconds": 30,
    "sampler_idle_seconds": 30,
    "run_seconds": 30,
    "recent_result_bytes": 1 << 20,
}
"""Seconds: longer than a program pauses on a busy machine."""
GROWTH = 1.15
"""Of what there was in the second quarter, by the last quarter."""
SLACK = {"memory of the server": 24 << 20, "memory of the engine": 48 << 20, "disk": 8 << 20, "files": 8, "threads": 4}
"""What that may be exceeded by: allocators and the database take room in steps."""


def measured(server: Supervisor) -> dict[str, float]:
    api, engines = psutil.Process(server.pid), server.engines()
    return {
        "memory of the server": api.memory_info().rss,
        "memory of the engine": sum(engine.memory_info().rss for engine in engines),
        "disk": sum(server.disk_bytes().values()),
        "files": api.num_fds(),
        "threads": api.num_threads(),
    }


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
def test_memory_and_disk_stay_flat(tmp_path, tell):
    key = create_key(tmp_path / "data", "alice")
    seen: list[dict[str, float]] = []
    num_programs = 0
    with Supervisor(tmp_path / "data", **SOON | KEPT) as server:
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < SECONDS or num_programs < 8:
            assert elapsed < SECONDS + 500, "the programs take too long"
            programs = [new_program(server, key, tmp_path, num_programs + number) for number in range(2)]
            num_programs += len(programs)
            for program in programs:
                program.finish(300)
                assert len(program.of("step")) == PLAN.steps
                delete_checkpoint(program)  # which would be kept, and rightly so
            seen.append(measured(server))
            log.info("%4.0f s, %d programs: %s", elapsed, num_programs, json.dumps(seen[-1]))
        assert server.exit_codes == [] and len(server.engines()) == 1
    second, last = quarter(seen, 1), quarter(seen, 3)
    for name, slack in SLACK.items():
        assert last[name] <= GROWTH * second[name] + slack, f"{name}: {second[name]:.0f}, then {last[name]:.0f}"
    change = ", ".join(f"{name} {100 * (last[name] / second[name] - 1):+.0f} %" for name in SLACK)
    tell(f"{elapsed:.0f} s of {num_programs} programs", f"nothing; {change}")


def new_program(server: Supervisor, key: str, folder: Path, number: int) -> RunningProgram:
    return RunningProgram(server.url, key, PLAN, folder / f"home-{number}")


def delete_checkpoint(program: RunningProgram) -> None:
    url = f"{program.url}/api/v1/training_runs/{program.model_id}/checkpoints/weights/end"
    httpx2.delete(url, headers={"X-API-Key": program.key}, timeout=60).raise_for_status()


def quarter(seen: list[dict[str, float]], number: int) -> dict[str, float]:
    size = max(len(seen) // 4, 1)
    chosen = seen[number * size : (number + 1) * size] if number < 3 else seen[-size:]
    return {name: statistics.median(one[name] for one in chosen) for name in seen[0]}
