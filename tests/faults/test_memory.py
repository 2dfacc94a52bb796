"""The kernel kills an engine for want of memory: the request that takes it is given up alone."""

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.servers import create_key
from tests.faults.caller import Caller
from tests.faults.supervisor import Supervisor

LIMIT_BYTES = 1200 << 20
"""The server and an engine take half of it at rest."""
LARGE = {"token_budget": 1 << 20, "max_engine_deaths": 2}
"""Passes are not cut into small ones, so that one request can take more than there is."""


def own_group() -> tuple[Path, str]:
    """The group of this process that limits memory, and the name of the limit there."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory" + path), "memory.limit_in_bytes"
        if number == "0" and Path(f"/sys/fs/cgroup{path}/memory.max").exists():
            return Path("/sys/fs/cgroup" + path), "memory.max"
    pytest.skip("no control group limits memory here")


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A group below our own with little memory; what is started in it stays in it."""
    parent, limit = own_group()
    group = parent / f"lorimer-{secrets.token_hex(4)}"
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT_BYTES))
        with contextlib.suppress(OSError):  # memory that is moved to a disk is not used up
            (group / "memory.swappiness").write_text("0")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"a control group cannot be made: {error}")
    yield group
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)  # the last process has not quite gone


def num_kills(group: Path) -> int:
    for name in ("memory.oom_control", "memory.events"):
        if (group / name).exists():
            words = dict(line.split() for line in (group / name).read_text().splitlines())
            return int(words.get("oom_kill", 0))
    return 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_engine_killed_for_memory_fails_only_the_request_that_took_it(tmp_path, small_group, tell):
    keys = [create_key(tmp_path / "data", user) for user in ("alice", "bob")]
    into_group = ["sh", "-c", f'echo $$ > {small_group}/cgroup.procs; exec "$@"', "sh"]
    with (
        Supervisor(tmp_path / "data", prefix=into_group, **LARGE) as server,
        Caller(server.url, keys[0]) as alice,
        Caller(server.url, keys[1]) as bob,
    ):
        greedy, modest = alice.run(), bob.run()
        assert alice.step(greedy) == bob.step(modest) == 1
        tokens = [10 + number % 200 for number in range(500)]
        began = time.monotonic()
        promise = alice.forward_backward(greedy, tokens, 800)
        assert bob.step(modest) == 2, "others go on"
        error = alice.failure(promise)
        seconds = time.monotonic() - began
        assert "engine" in error and "ended" in error, error
        assert num_kills(small_group) >= 2, "the kernel killed nothing"
        assert bob.step(modest) == 3
        assert alice.step(greedy) == 2, "the run goes on without what was given up"
        assert server.exit_codes == [] and os.path.exists(f"/proc/{server.pid}")
    tell("engine killed by the kernel for memory", f"after {seconds:.0f} s: {error}")
