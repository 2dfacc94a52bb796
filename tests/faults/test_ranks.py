"""A rank of a sharded trainer is killed while a tenant trains an adapter, or the weights themselves: the server starts
all ranks again, and the tenant cannot tell. No rank outlives a server that is killed."""

import signal
from collections.abc import Collection

import psutil
import pytest

from tests.conformance.servers import create_key
from tests.faults.programs import RunningProgram, assert_same, expectation, finish_all
from tests.faults.supervisor import Supervisor, eventually
from tests.faults.tenant import MODEL, Plan

CONFIG = f'max_full_runs = 1\n[model."{MODEL}"]\nranks = 2\n'
ENDED_SECONDS = 10.0


def ranks(server: Supervisor, others: Collection[psutil.Process] = ()) -> dict[int, psutil.Process]:
    """The processes of the engine, the only one of the server besides ``others``, by their rank."""
    found: list[tuple[int, psutil.Process]] = []
    for process in server.engines():
        command = " ".join(process.cmdline()) if process not in others else ""
        found += [(rank, process) for rank in range(2) if f'"rank":{rank},' in command]
    return dict(found) if len(found) == len(dict(found)) else {}


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
        # A full run has an engine of its own, beside that of the base.
        eventually(lambda: len(ranks(server)) == 2, "an engine of the base")
        others = list(ranks(server).values()) if is_full else []
        undisturbed = RunningProgram(server.url, key, plan, tmp_path / "undisturbed")
        finish_all([undisturbed])
        expected = expectation(undisturbed)
        program = RunningProgram(server.url, key, plan, tmp_path / "disturbed")
        try:
            for rank, steps in ((1, 4), (0, 10)):
                eventually(lambda steps=steps: program.num_steps >= steps or not program.is_running, f"{steps} steps")
                eventually(lambda: len(ranks(server, others)) == 2, "an engine of two ranks")
                before = ranks(server, others)
                before[rank].kill()
                for process in before.values():
                    eventually(lambda process=process: not is_running(process), "the group ended", ENDED_SECONDS)
        finally:
            finish_all([program])
        assert assert_same(program, expected) == 0.0, "the same bits"
        engine = ranks(server, others)
        assert len(engine) == 2 and all(map(is_running, others)), "only the engine of the run has died"
        server.stop_restarting()
        server.send(signal.SIGKILL)
        for process in [*engine.values(), *others]:
            eventually(lambda process=process: not is_running(process), "no rank outlives its server", ENDED_SECONDS)
    assert server.exit_codes == [-9]
    tell(f"kill -9 of a rank of a sharded {'full run' if is_full else 'trainer'}", "a pause")
