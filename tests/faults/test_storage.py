"""Faults of the data directory: another server in it, a damaged snapshot, a disk that is full."""

import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.conformance.servers import LORIMER, create_key, environment
from tests.faults.programs import RunningProgram, assert_same, expectation, finish_all
from tests.faults.supervisor import Supervisor, eventually, free_port
from tests.faults.tenant import Plan

ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}


def record(server: Supervisor, query: str, *values: object) -> Any:
    """One value of the server's database."""
    with closing(sqlite3.connect(f"file:{server.data / 'lorimer.db'}?mode=ro", uri=True)) as database:
        return database.execute(query, values).fetchone()[0]


def one_more_step(server: Supervisor, program: RunningProgram) -> dict[str, Any]:
    """Go on with a run whose program has ended; what its future comes to."""
    seq_id = 1 + record(server, "select max(seq_id) from futures where lane = ?", program.model_id)
    body = {"model_id": program.model_id, "seq_id": seq_id, "adam_params": ADAM}
    with httpx2.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": program.key}, timeout=60) as client:
        submitted = client.post("/optim_step", json=body).raise_for_status().json()
        poll = {"request_id": submitted["request_id"]}
        while (answer := client.post("/retrieve_future", json=poll)).status_code == 408:
            continue
        return dict(answer.raise_for_status().json())


@pytest.mark.slow
def test_a_second_server_and_damaged_snapshots(tmp_path):
    """Each harms nobody but itself, and one damaged snapshot nobody at all."""
    keys = [create_key(tmp_path / "data", user) for user in ("alice", "bob")]
    plan = Plan(steps=4, sample_every=0, save_every=0)
    with Supervisor(tmp_path / "data", snapshot_seconds=0.01) as server:
        alice, bob = programs = [
            RunningProgram(server.url, key, plan, tmp_path / f"home-{number}") for number, key in enumerate(keys)
        ]
        finish_all(programs)
        refuse_second_server(server)
        assert one_more_step(server, alice)["metrics"]["optimizer_step"] == 5
        eventually(lambda: all(snapshots_of(server, program) for program in programs), "snapshots")
        flip_a_byte(two_snapshots(server, alice)[0] / "training_state.safetensors")
        assert one_more_step(server, alice)["metrics"]["optimizer_step"] == 6
        assert "falling back on an older snapshot" in server.logged()
        for snapshot in two_snapshots(server, alice):
            flip_a_byte(snapshot / "training_state.safetensors")
        answer = one_more_step(server, alice)
        assert "training_state.safetensors" in answer["error"] and "damaged" in answer["error"], answer
        assert str(tmp_path) not in answer["error"]
        assert one_more_step(server, bob)["metrics"]["optimizer_step"] == 5
        assert alice.tensors("weights/end").keys() == bob.tensors("weights/end").keys()
        again = RunningProgram(server.url, alice.key, plan, tmp_path / "home-again").finish()
        assert_same(again, expectation(alice))


def refuse_second_server(server: Supervisor) -> None:
    command = [*LORIMER, "serve", "--port", str(free_port()), "--data", str(server.data), "--model", "lorimer/debug"]
    second = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert second.returncode == 3, second.stderr
    assert f"is in use by process {server.pid} on " in second.stderr


def snapshots_of(server: Supervisor, program: RunningProgram) -> list[Path]:
    """The newest first."""
    columns = ("newest_name", "snapshot_name")
    names = [record(server, f"select {column} from runs where model_id = ?", program.model_id) for column in columns]
    return [server.data / "snapshots" / name for name in names if name is not None]


def restart(server: Supervisor) -> None:
    """End the server in order, and wait for the next."""
    ended = len(server.exit_codes)
    server.send(signal.SIGTERM)
    assert server.wait_for_end(ended) == 0
    server.wait_until_ready()


def two_snapshots(server: Supervisor, program: RunningProgram) -> list[Path]:
    """A server that ends secures every run once more, and the next loads none before it is used."""
    restart(server)
    found = snapshots_of(server, program)
    assert len(found) == 2
    return found


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 0x10
    path.write_bytes(content)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m,mode=700", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_makes_everybody_wait(tmp_path, small_disk):
    """Until there is room again; then all goes on, and nothing is missing."""
    data = small_disk / "data"
    key = create_key(data, "alice")
    plan = Plan(steps=60, sample_every=0, save_every=0, tokens=400)
    filler = small_disk / "filler"
    with Supervisor(data, log=tmp_path / "log", snapshot_seconds=0.3) as server:
        expected = expectation(RunningProgram(server.url, key, plan, tmp_path / "undisturbed").finish())
        restart(server)  # which empties the database's log; a long one is written over and needs no more room
        program = RunningProgram(server.url, key, plan, tmp_path / "disturbed")
        try:
            eventually(lambda: program.num_steps >= 8 or not program.is_running, "some steps")
            before = program.num_steps
            fill(filler)
            eventually(lambda: "disk is full" in server.logged(), "a full disk")
            time.sleep(3.0)
            assert program.is_running and program.num_steps < plan.steps, (before, program.stderr()[-2000:])
            assert httpx2.get(f"{server.url}/api/v1/healthz", timeout=30).status_code == 200
            filler.unlink()
            program.finish()
        finally:
            filler.unlink(missing_ok=True)
            program.stop()
        assert_same(program, expected)
        assert server.exit_codes == [0]


def fill(path: Path) -> None:
    """Take every byte that is free."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
