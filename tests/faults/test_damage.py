"""A flipped bit, a lost file: each kind of file is found out and named, and whoever does not use it goes on."""

import shutil
import signal
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

from tests.conformance.servers import LORIMER, create_key, environment
from tests.faults.caller import Caller
from tests.faults.supervisor import Supervisor, free_port

LARGE = 150
"""Datums of 500 tokens: a request and an answer too large for a row."""


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def query(data: Path, statement: str, *values: object) -> list[tuple]:
    with closing(sqlite3.connect(f"file:{data / 'lorimer.db'}?mode=ro", uri=True)) as database:
        return database.execute(statement, values).fetchall()


def weights_of(data: Path, path: str) -> Path:
    run, kind, name = path.removeprefix("tinker://").split("/")
    kind = {"weights": "training", "sampler_weights": "sampler"}[kind]
    where = "select w.name from weights w join checkpoints using (weights_id) where model_id = ? and kind = ?"
    return data / "weights" / query(data, f"{where} and checkpoints.name = ?", run, kind, name)[0][0]


def blob_of(data: Path, request_id: str, part: str) -> Path:
    found = query(data, "select file from blobs where owner = ? and part = ?", request_id, part)
    assert found and found[0][0], f"the {part} is in no file"
    return data / "blobs" / found[0][0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_flipped_bit_or_a_lost_file_is_named_and_harms_nobody_else(tmp_path, tell):
    data = tmp_path / "data"
    keys = [create_key(data, user) for user in ("alice", "bob")]
    with Supervisor(data, snapshot_seconds=600, recent_result_bytes=0) as server:
        with Caller(server.url, keys[0]) as alice, Caller(server.url, keys[1]) as bob:
            others = bob.run()
            assert bob.step(others) == 1
            told = [damaged_checkpoints(server, alice), damaged_blobs(server, alice)]
            assert bob.step(others) == 2
            old_address = good_address(bob, others)
        told.append(damaged_secret(server, bob, others, old_address))
    told.append(damaged_database(data))
    for fault, saw in told:
        tell(fault, saw)


def damaged_checkpoints(server: Supervisor, alice: Caller) -> tuple[str, str]:
    run = alice.run()
    alice.step(run)
    kinds = {"save_weights": "damaged-state", "save_weights_for_sampler": "damaged-sampler"}
    state, sampler = (str(alice.result(alice.save(run, name, kind))["path"]) for kind, name in kinds.items())
    gone = str(alice.result(alice.save(run, "gone"))["path"])
    good = good_address(alice, run)
    for path in (state, sampler):
        flip(weights_of(server.data, path) / "adapter_model.safetensors")
        answer = alice.address(path)
        assert answer.status_code == 400 and "'adapter_model.safetensors' of the checkpoint is damaged" in answer.text
    shutil.rmtree(weights_of(server.data, gone))
    answer = alice.address(gone)
    assert answer.status_code == 400 and "cannot be read: No such file" in answer.text
    for path, word in ((state, "is damaged"), (gone, "there is no directory")):
        error = alice.failure(alice.operate("load_weights", run, path=path, optimizer=True))
        assert word in error and str(server.data) not in error, error
    made = alice.sampler(model_path=sampler)
    error = alice.failure(alice.sample(made))
    assert "is damaged" in error and "adapter_model.safetensors" in error, error
    assert str(server.data) not in error, error
    assert alice.step(run) == 2, "the run itself goes on"
    assert httpx2.get(good).status_code == 200
    return "flipped bit in a checkpoint, deleted weights", "the file's name, at download, load and sample"


def good_address(caller: Caller, run: str) -> str:
    path = caller.result(caller.save(run, "good"))["path"]
    answer = caller.address(path)
    assert answer.status_code == 302, answer.text
    return str(answer.headers["location"])


def damaged_blobs(server: Supervisor, alice: Caller) -> tuple[str, str]:
    run, other = alice.run(), alice.run()
    tokens = [10 + number % 200 for number in range(500)]
    trained = alice.forward_backward(run, tokens, LARGE)
    alice.result(trained)
    again = alice.forward_backward(other, tokens, LARGE)
    alice.result(again)
    flip(blob_of(server.data, trained["request_id"], "result"))
    error = alice.failure(trained)
    assert "the result was computed and cannot be read" in error and "blobs/" in error, error
    flip(blob_of(server.data, trained["request_id"], "payload"))
    blob_of(server.data, again["request_id"], "payload").unlink()
    server.kill("engine")
    for damaged, word in ((run, "are damaged: 'blobs/"), (other, "are lost: 'blobs/")):
        promise = alice.try_operation("optim_step", damaged, adam_params={})
        error = promise.text if promise.status_code != 200 else alice.failure(promise.json())
        assert "cannot be restored" in error and word in error and str(server.data) not in error, error
    return "flipped bit in a stored request or result", "that run's failure, with the file"


def damaged_secret(server: Supervisor, bob: Caller, run: str, old_address: str) -> tuple[str, str]:
    ended = len(server.exit_codes)
    server.send(signal.SIGTERM)
    server.wait_for_end(ended)
    flip(server.data / "secret")
    server.wait_until_ready()
    server.kill("api")  # it may have read the file before
    server.wait_until_ready()
    with Caller(server.url, bob.http.headers["X-API-Key"]) as again:
        assert httpx2.get(old_address).status_code == 403, "not taken for one of ours"
        again._next = bob._next
        assert again.step(run) == 3
        assert httpx2.get(good_address_of(again, run)).status_code == 200
    return "flipped bit in the secret", "403 for old links, new ones work; keys and runs go on"


def good_address_of(caller: Caller, run: str) -> str:
    return str(caller.address(f"tinker://{run}/weights/good").headers["location"])


def damaged_database(data: Path) -> tuple[str, str]:
    """A page without sense: no server pretends that it is empty or goes on without it."""
    content = (data / "lorimer.db").read_bytes()
    for page in (0, 1):
        (data / "lorimer.db").write_bytes(content[: 4096 * page] + b"\x55" * 4096 + content[4096 * (page + 1) :])
        command = [*LORIMER, "serve", "--port", str(free_port()), "--data", str(data), "--model", "lorimer/debug"]
        served = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
        assert served.returncode == 1, served.stderr
        assert "the database is damaged" in served.stderr and "restore it from a backup" in served.stderr
        assert "Traceback" not in served.stderr
    return "damaged database page", "the server refuses to start and says why"
