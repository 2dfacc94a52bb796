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
from tests.faults.caller import Caller, training_input
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


ROOM_BYTES = 600 << 10
"""Less than the weights of a run of rank 128 take."""
AGE_RECIPIENT = "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_full_disk_during_submit_snapshot_save_and_export(tmp_path, small_disk, tell):
    """Each is refused or put off in words; what was acknowledged stays, and all of it works when there is room."""
    data, filler = small_disk / "data", small_disk / "filler"
    key = create_key(data, "alice")
    with Supervisor(data, log=tmp_path / "log", snapshot_seconds=600) as server, Caller(server.url, key) as alice:
        run = str(alice.result(alice.create_run(lora_config={"rank": 128, "seed": 1}))["model_id"])
        assert [alice.step(run) for _ in range(3)] == [1, 2, 3]
        exported = alice.result(export(alice, run, "export-0"))["path"]
        sampler = alice.sampler()
        try:
            fill_but(filler, ROOM_BYTES)
            tell("disk full: snapshot", full_snapshot(server, alice, run))
            fill_but(small_disk / "filler-1", ROOM_BYTES)  # the restart has emptied the database's log
            tell("disk full: save", full_save(alice, run))
            tell("disk full: export, download", full_export(alice, run, exported))
            fill(small_disk / "filler-2")
            tell("disk full: submit", full_submit(server, alice, run))
            assert server.exit_codes == [0]
        finally:
            for file in small_disk.glob("filler*"):
                file.unlink()
        assert alice.step(run) == 6, "nothing acknowledged is lost, nothing refused was done"
        for number, name in enumerate(("save_weights", "save_weights_for_sampler")):
            assert alice.result(alice.save(run, f"later-{number}", name))["path"]
        assert alice.result(export(alice, run, "export-1"))["path"]
        assert httpx2.get(file_url(alice, exported), timeout=60).status_code == 200
        assert alice.result(alice.sample(sampler))["sequences"]
        assert list((data / "weights").glob("*.tmp-*")) == list((data / "snapshots").glob("*.tmp-*")) == []
        restart(server)
        assert alice.step(run) == 7


def fill_but(path: Path, num_bytes: int) -> None:
    fill(path)
    os.truncate(path, max(path.stat().st_size - num_bytes, 0))


def export(alice: Caller, run: str, name: str) -> dict[str, Any]:
    return alice.operate("save_weights_external", run, path=name, age_encryption_recipients=[AGE_RECIPIENT])


def file_url(alice: Caller, path: str) -> str:
    run, kind, name = path.removeprefix("tinker://").split("/")
    answer = alice.http.get(f"/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls")
    assert answer.status_code == 200, answer.text
    return str(answer.json()["urls"]["adapter_model.safetensors.age"])


def full_submit(server: Supervisor, alice: Caller, run: str) -> str:
    """Without any room each submit is refused, and its number stays free; whoever only reads is served."""
    for large in (1, 120):
        body = training_input([10 + number % 200 for number in range(500)], large)
        answer = alice.try_operation("forward_backward", run, forward_backward_input=body)
        assert answer.status_code == 507 and answer.json()["code"] == "disk_full", answer.text
        assert "bytes are free" in answer.json()["detail"] and str(server.data) not in answer.json()["detail"]
    assert httpx2.get(f"{server.url}/api/v1/healthz", timeout=30).status_code == 200
    assert alice.http.get(f"/training_runs/{run}").status_code == 200
    return f"{answer.status_code} {answer.json()['code']}; the SDK waits"


def full_snapshot(server: Supervisor, alice: Caller, run: str) -> str:
    """There is room for steps and not for a snapshot: the server ends without it, and the next repeats the steps."""
    assert alice.step(run) == 4
    restart(server)
    assert "no snapshot: " in server.logged() and "No space left" in server.logged()
    assert alice.step(run) == 5
    assert "replaying" in server.logged()
    return "nothing; a longer replay after a restart"


def full_save(alice: Caller, run: str) -> str:
    for number, name in enumerate(("save_weights", "save_weights_for_sampler")):
        error = alice.failure(alice.save(run, f"full-{number}", name))
        assert error == "the disk of the server is full; nothing was saved", error
    return error


def full_export(alice: Caller, run: str, exported: str) -> str:
    error = alice.failure(export(alice, run, "full"))
    assert error == "the disk of the server is full; nothing was saved", error
    answer = httpx2.get(file_url(alice, exported), timeout=60)  # it is encrypted into a file of its own
    assert answer.status_code == 507, (answer.status_code, answer.text)
    return f"{error}; {answer.status_code} {answer.json()['code']}"
