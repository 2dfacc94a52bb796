"""A rank of a sharded trainer is killed while a tenant trains an adapter, or the weights themselves: the server starts
all ranks again, and the tenant cannot tell. No rank outlives a server that is killed."""

import signal

import psutil
import pytest

from tests.conformance.servers import create_key
from tests.faults.programs import RunningProgram, assert_same, expectation, finish_all
from tests.faults.supervisor import Supervisor, eventually
from tests.faults.tenant import MODEL, Plan

CONFIG = f'[model."{MODEL}"]\nranks = 2\n'
ENDED_SECONDS = 10.0


def ranks(server: Supervisor) -> dict[int, psutil.Process]:
    """The processes of the engine by their rank."""
    found = {}
    for process in server.engines():
        command = " ".join(process.cmdline())
        found |= {rank: process for rank in range(2) if f'"rank":{rank},' in command}
    return found


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("is_full", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["lora", "full"])
def test_a_killed_rank_ends_the_others_and_the_run_continues_exactly(tmp_path, tell, is_full):
    config = tmp_path / "ranks.toml"
    config.write_text(CONFIG)
    data = tmp_path / "data"
    key = create_key(data, "alice")
    plan = Plan(seed=5, steps=16, sample_every=0, save_every=6, full=is_full)
    with Supervisor(data, models=(), extra={"LORIMER_CONFIG": str(config)}, snapshot_seconds=0.2) as server:
        undisturbed = RunningProgram(server.url, key, plan, tmp_path / "undisturbed")
        finish_all([undisturbed])
        expected = expectation(undisturbed)
        program = RunningProgram(server.url, key, plan, tmp_path / "disturbed")
        try:
            for rank, steps in ((1, 4), (0, 10)):
                eventually(lambda steps=steps: program.num_steps >= steps or not program.is_running, f"{steps} steps")
                eventually(lambda: len(ranks(server)) == 2, "an engine of two ranks")
                before = ranks(server)
                before[rank].kill()
                for process in before.values():
                    eventually(lambda process=process: not is_running(process), "the group ended", ENDED_SECONDS)
        finally:
            finish_all([program])
        assert assert_same(program, expected) == 0.0, "the same bits"
        engine = ranks(server)
        assert len(engine) == 2
        server.stop_restarting()
        server.send(signal.SIGKILL)
        for process in engine.values():
            eventually(lambda process=process: not is_running(process), "no rank outlives its server", ENDED_SECONDS)
    assert server.exit_codes == [-9]
    tell(f"kill -9 of a rank of a sharded {'full run' if is_full else 'trainer'}", "a pause")
