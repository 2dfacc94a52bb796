"""The clock of the server's machine jumps an hour forward, then two back, while tenants train."""

import re
import time
from datetime import datetime
from glob import glob
from pathlib import Path

import httpx2
import pytest

from tests.conformance.servers import create_key
from tests.faults.caller import Caller
from tests.faults.programs import RunningProgram, assert_same, expectation
from tests.faults.supervisor import Supervisor, eventually
from tests.faults.tenant import Plan

PLAN = Plan(seed=9, steps=24, sample_every=6, save_every=8)
JUMPS = ("+3600", "-3600", "+0")
"""Seconds away from the right time."""


class Clock:
    """The clock of all processes that are started with ``variables``."""

    def __init__(self, folder: Path) -> None:
        libraries = glob("/usr/lib/*/faketime/libfaketimeMT.so.1")
        if not libraries:
            pytest.skip("libfaketime is not installed (Debian: apt-get install faketime)")
        self._file = folder / "clock"
        self._file.write_text("+0\n")
        self.variables = {
            "LD_PRELOAD": libraries[0],
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def jump(self, seconds: str) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds}\n")
        new.rename(self._file)


def server_time(server: Supervisor) -> float:
    """What the server takes for the time: the newest moment in its log."""
    found = re.findall(r'"time":"([^"]+)"', server.logged())
    return datetime.fromisoformat(found[-1]).timestamp()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_clock_jumps_an_hour_each_way(tmp_path, tell):
    clock = Clock(tmp_path)
    key = create_key(tmp_path / "data", "alice")
    soon = {"sweep_seconds": 0.3, "heartbeat_flush_seconds": 0.3, "snapshot_seconds": 0.2}
    with Supervisor(tmp_path / "data", extra=clock.variables, **soon) as server, Caller(server.url, key) as alice:
        expected = expectation(RunningProgram(server.url, key, PLAN, tmp_path / "undisturbed").finish())
        run, sampler = alice.run(), alice.sampler()
        trained = alice.forward_backward(run)
        token = alice.ok("auth/token")["jwt"]
        saved = str(alice.result(alice.save(run, "before"))["path"])
        program = RunningProgram(server.url, key, PLAN, tmp_path / "disturbed")
        try:
            for number, seconds in enumerate(JUMPS):
                due = (number + 1) * PLAN.steps // (len(JUMPS) + 1)
                eventually(lambda due=due: program.num_steps >= due or not program.is_running, "some steps")
                clock.jump(seconds)
                look_around(server, alice, token, saved, run, number)
                assert abs(server_time(server) - time.time() - int(seconds)) < 60, "the clock did not jump"
            program.finish()
        finally:
            program.stop()
        assert_same(program, expected)
        assert alice.result(trained)["metrics"], "a result that nobody had fetched is still there"
        assert alice.result(alice.sample(sampler))["sequences"]
        heard = alice.post("session_heartbeat", session_id=alice.session_id)
        assert heard.status_code == 200, heard.text
        assert server.exit_codes == [] and len(server.engines()) == 1
        assert "engine said nothing" not in server.logged()
    tell("clock jumps an hour each way", f"nothing; longest pause {program.longest_pause:.1f} s")


def look_around(server: Supervisor, alice: Caller, token: str, saved: str, run: str, number: int) -> None:
    """Just after a jump, with sweeps going on."""
    time.sleep(1.0)
    with httpx2.Client(base_url=f"{server.url}/api/v1", timeout=60) as client:
        headers = {"authorization": f"Bearer {token}"}
        assert client.get("/get_server_capabilities", headers=headers).status_code == 200
        answer = client.get(
            "/get_server_capabilities", headers={"authorization": f"Bearer {alice.ok('auth/token')['jwt']}"}
        )
        assert answer.status_code == 200, answer.text
    assert alice.post("session_heartbeat", session_id=alice.session_id).status_code == 200
    assert alice.step(run) == number + 1
    assert httpx2.get(alice.address(saved).headers["location"], timeout=60).status_code == 200
