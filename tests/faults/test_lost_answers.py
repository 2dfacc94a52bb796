"""The server does what it is asked, the answer is lost on its way, and the client asks again: it is done once."""

import json
import sqlite3
from contextlib import closing

import pytest

from tests.conformance.servers import create_key
from tests.faults.programs import RunningProgram, assert_same, expectation
from tests.faults.proxy import BreakingWire
from tests.faults.supervisor import Supervisor, eventually
from tests.faults.tenant import Plan

PLAN = Plan(seed=5, steps=6, sample_every=2, save_every=3)
CUTS = (
    "create_session",
    "create_model",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "asample",
    "retrieve_future",
)


def counts(server: Supervisor) -> dict[str, int]:
    """How often each kind of request is stored, and what came of them."""
    with closing(sqlite3.connect(f"file:{server.data / 'lorimer.db'}?mode=ro", uri=True)) as database:
        kinds = dict(database.execute("select kind, count(*) from futures group by kind").fetchall())
        for table in ("runs", "checkpoints", "samplers", "weights"):
            kinds[table] = database.execute(f"select count(*) from {table}").fetchone()[0]
    return kinds


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lost_answer_is_asked_for_again_and_the_work_done_once(tmp_path, tell):
    key = create_key(tmp_path / "data", "alice")
    with Supervisor(tmp_path / "data", snapshot_seconds=600) as server, BreakingWire(server.port) as wire:
        before = counts(server)
        expected = expectation(RunningProgram(server.url, key, PLAN, tmp_path / "undisturbed").finish())
        once = {kind: number - before.get(kind, 0) for kind, number in counts(server).items()}
        for path in CUTS:
            before, cuts = counts(server), wire.num_cuts
            wire.arm(f"/api/v1/{path}", "answer", lambda: None)
            program = RunningProgram(wire.url, key, PLAN, tmp_path / path).finish()
            assert wire.num_cuts == cuts + 1, f"there was no {path}"
            program.url = server.url
            assert_same(program, expected)
            made = {kind: number - before.get(kind, 0) for kind, number in counts(server).items()}
            assert made == once, f"{path}: {json.dumps(made)} instead of {json.dumps(once)}"
            tell(f"lost answer: {path}", f"a retry; longest pause {program.longest_pause:.1f} s")
        assert server.exit_codes == []


def test_a_lost_answer_to_a_submit(tmp_path):
    """The one of them that matters most: a step is not made twice."""
    key = create_key(tmp_path / "data", "alice")
    with Supervisor(tmp_path / "data") as server, BreakingWire(server.port) as wire:
        program = RunningProgram(wire.url, key, Plan(steps=4, sample_every=0, save_every=0), tmp_path / "home")
        eventually(lambda: program.num_steps >= 1 or not program.is_running, "a step")
        wire.arm("/api/v1/optim_step", "answer", lambda: None)
        program.finish()
        assert wire.num_cuts == 1
        assert [line["count"] for line in program.of("step")] == [1, 2, 3, 4]
