"""PostgreSQL is killed and started again, three times, while two tenants train: neither of them can tell."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.servers import create_key
from tests.faults.programs import RunningProgram, assert_same, expectation, finish_all
from tests.faults.supervisor import Supervisor, eventually
from tests.faults.tenant import Plan
from tests.store.postgres import PostgresServer, running

PLANS = [Plan(seed=number, steps=24, sample_every=5, save_every=6) for number in range(2)]
AWAY_SECONDS = (0.0, 1.0, 6.0)


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with running() as server:
        server.execute("ALTER SYSTEM SET fsync = 'on'")  # a kill must lose nothing that was committed
        server.execute("ALTER SYSTEM SET full_page_writes = 'on'")
        server.stop()
        server.start()
        yield server


def kill(postgres: PostgresServer) -> None:
    """SIGKILL to the first process and its children, as the kernel does it."""
    pid = int((postgres.data / "postmaster.pid").read_text().split()[0])
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    for each in (pid, *children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    eventually(lambda: not any(is_alive(each) for each in (pid, *children)), "the database ended")
    # Where nobody takes note of its end, the next would take the dead process for one that runs.
    (postgres.data / "postmaster.pid").unlink()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_database_killed_under_load_only_pauses(tmp_path, postgres, tell):
    with Supervisor(tmp_path / "data", database=postgres.url(), snapshot_seconds=0.2) as server:
        keys = [create_key(tmp_path / "data", user) for user in ("alice", "bob")]
        undisturbed, disturbed = (
            [(key, plan, tmp_path / f"{word}-{plan.seed}") for key, plan in zip(keys, PLANS, strict=True)]
            for word in ("undisturbed", "disturbed")
        )
        programs = [RunningProgram(server.url, *each) for each in undisturbed]
        finish_all(programs)
        expected = [expectation(program) for program in programs]
        programs = [RunningProgram(server.url, *each) for each in disturbed]
        try:
            for number, seconds in enumerate(AWAY_SECONDS):
                due = PLANS[0].steps * (number + 1) // (len(AWAY_SECONDS) + 1)
                eventually(lambda due=due: any(p.num_steps >= due or not p.is_running for p in programs), "steps")
                kill(postgres)
                time.sleep(seconds)
                postgres.start()
        finally:
            finish_all(programs)
        for program, known in zip(programs, expected, strict=True):
            assert_same(program, known)
        assert server.exit_codes == []
    pause = max(program.longest_pause for program in programs)
    tell("PostgreSQL killed three times under load", f"a pause, {pause:.1f} s at most")
