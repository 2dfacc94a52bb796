"""Two tenants train and sample while processes of their server are killed at random; neither of them can tell."""

import json
import logging
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conformance.servers import create_key
from tests.faults.programs import Expected, RunningProgram, assert_same, expectation, finish_all
from tests.faults.supervisor import Kind, Supervisor, eventually
from tests.faults.tenant import Plan

log = logging.getLogger(__name__)

FEW: list[Kind] = ["engine", "api", "both"]
MANY: list[Kind] = ["engine"] * 18 + ["api"] * 7 + ["both"] * 5
STEPS_PER_KILL = 4
"""Of each tenant."""
SOON = 0.25
"""How often a kill comes while the server may still be recovering from the one before."""
SOON_SECONDS = 4.0


def test_few_kills(tmp_path):
    kill_at_random(tmp_path, FEW, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_kills(tmp_path):
    kill_at_random(tmp_path, MANY, seed=2)


def kill_at_random(folder: Path, kinds: Sequence[Kind], seed: int) -> None:
    chance = random.Random(seed)
    kinds = chance.sample(kinds, len(kinds))
    data = folder / "data"
    keys = [create_key(data, user) for user in ("alice", "bob")]
    plans = [Plan(seed=number, steps=STEPS_PER_KILL * (len(kinds) + 1)) for number in range(len(keys))]
    with Supervisor(data, snapshot_seconds=0.2) as server:
        expected = undisturbed(server, keys, plans, folder)
        began = time.monotonic()
        programs = [
            RunningProgram(server.url, key, plan, folder / f"disturbed-{plan.seed}")
            for key, plan in zip(keys, plans, strict=True)
        ]
        try:
            disturb(server, programs, kinds, chance)
        finally:
            finish_all(programs)
        seconds = time.monotonic() - began
        differences = [assert_same(program, known) for program, known in zip(programs, expected, strict=True)]
        codes = server.exit_codes.copy()
    assert codes == [-9] * (len(kinds) - kinds.count("engine"))
    assert server.exit_codes[-1] == 0
    report = {
        "kills": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "seconds": round(seconds, 1),
        "seconds undisturbed": round(max(known.lines[-1]["seconds"] for known in expected), 1),
        "longest pause of a client": round(max(program.longest_pause for program in programs), 1),
        "replays": server.logged().count("replaying"),
        "steps": [program.num_steps for program in programs],
        "samples": [len(program.of("sampled")) for program in programs],
        "largest difference of a weight": max(differences),
    }
    log.info("%s", json.dumps(report))


def undisturbed(server: Supervisor, keys: Sequence[str], plans: Sequence[Plan], folder: Path) -> list[Expected]:
    programs = [
        RunningProgram(server.url, key, plan, folder / f"undisturbed-{plan.seed}")
        for key, plan in zip(keys, plans, strict=True)
    ]
    finish_all(programs)
    return [expectation(program) for program in programs]


def disturb(
    server: Supervisor, programs: Sequence[RunningProgram], kinds: Sequence[Kind], chance: random.Random
) -> None:
    """Kill one after the other: most when the programs have come some steps further, some soon after the last."""
    is_soon = True  # at first there is nothing to recover from
    total = sum(program.plan.steps for program in programs)
    for number, kind in enumerate(kinds):
        is_soon = not is_soon and chance.random() < SOON
        if is_soon:
            time.sleep(chance.uniform(0, SOON_SECONDS))
        else:
            due = total * (number + 0.5) / (len(kinds) + 1)
            eventually(lambda due=due: done(programs) >= due, f"{due:g} steps before kill {number}")
            time.sleep(chance.uniform(0, 0.2))
        assert any(program.is_running for program in programs)
        log.info("kill %d: %s after %d steps%s", number, kind, done(programs), " (soon)" if is_soon else "")
        server.kill(kind)


def done(programs: Sequence[RunningProgram]) -> int:
    failed = [program for program in programs if program.process.poll()]
    assert not failed, failed[0].stderr()[-4000:]
    return sum(program.num_steps for program in programs)
