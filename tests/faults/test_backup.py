"""A backup made while tenants train: after the server and its directory are gone, runs go on from it elsewhere."""

import json
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx2
import numpy as np
import pytest

from tests.conformance.servers import LORIMER, create_key, environment
from tests.faults.programs import RunningProgram
from tests.faults.supervisor import Supervisor, eventually
from tests.faults.tenant import Plan
from tests.faults.test_growth import SOON
from tests.store.postgres import PostgresServer, running

PLAN = Plan(steps=300, sample_every=3, save_every=7, tokens=60)
BACKUPS = 3
OPEN_RESULTS = {"result_seconds_after_fetch": 600, "result_seconds": 600, "history_seconds": 600}
"""Files come and go, but what the test asks about stays."""


@pytest.fixture(params=["sqlite", "postgresql"])
def databases(request) -> Iterator[list[str]]:
    """The URL of the database that is backed up, and of the one that is restored into; empty for a file."""
    if request.param == "sqlite":
        yield ["", ""]
    else:
        with running() as server:
            yield [new_database(server, name) for name in ("first", "second")]


def new_database(server: PostgresServer, name: str) -> str:
    server.execute(f"CREATE DATABASE {name}")
    return server.url(name)


def lorimer(*arguments: object) -> dict:
    command = [*LORIMER, *map(str, arguments), "-f", "json"]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr + run.stdout
    return json.loads(run.stdout)


def named(database: str) -> dict[str, str]:
    return {"database": database} if database else {}


@pytest.mark.slow
def test_runs_go_on_from_a_backup_made_under_load(tmp_path, databases):
    """Snapshots, samplers and payloads are removed all the while; each backup has every file that its rows name."""
    first, second = databases
    flag = ["--database", second] if second else []
    with Supervisor(tmp_path / "data", **SOON | OPEN_RESULTS | named(first)) as server:
        keys = [create_key(tmp_path / "data", user) for user in ("alice", "bob")]
        programs = [
            RunningProgram(server.url, key, PLAN, tmp_path / f"home-{number}") for number, key in enumerate(keys)
        ]
        try:
            eventually(lambda: all(program.num_steps >= 5 for program in programs), "some steps")
            known = []
            for number in range(BACKUPS):
                known = [program.num_steps for program in programs]
                made = lorimer("backup", tmp_path / f"copy-{number}", "--data", tmp_path / "data")
                assert made["faults"] == [] and made["source"] == ("postgresql" if first else "sqlite")
            assert all(program.is_running for program in programs), "the programs ended too soon"
            assert server.logged().count("a backup ended") == BACKUPS
            server.stop_restarting()
            server.kill("both")
        finally:
            for program in programs:
                program.stop()
    shutil.rmtree(tmp_path / "data")
    lorimer("restore", tmp_path / f"copy-{BACKUPS - 1}", "--data", tmp_path / "new", *flag)
    with Supervisor(tmp_path / "new", **named(second)) as server:
        for program, least in zip(programs, known, strict=True):
            go_on(server, program, least, tmp_path / f"copy-{BACKUPS - 1}")


def go_on(server: Supervisor, program: RunningProgram, least: int, copy: Path) -> None:
    """Everything that was acknowledged before the backup is there, and the weights are those of that step."""
    program.url = server.url
    saved = [line["saved"] for line in program.of("saved")[: sum(step % 7 == 0 for step in range(least - 1))]]
    assert {f"weights/{name}" for name in saved} <= set(program.checkpoints())
    with httpx2.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": program.key}, timeout=120) as client:
        with closing(sqlite3.connect(copy / "lorimer.db")) as database:
            query = "SELECT request_id, kind, seq_id FROM futures WHERE lane = ? ORDER BY seq_id"
            asked = database.execute(query, [program.model_id]).fetchall()
        steps = [request_id for request_id, kind, _ in asked if kind == "optim_step"]
        count = int(result(client, steps[-1])["metrics"]["optimizer_step"])
        assert count == len(steps) >= least
        body = {"model_id": program.model_id, "seq_id": asked[-1][2] + 1, "path": "restored"}
        answer = client.post("/save_weights", json=body).raise_for_status().json()
        assert result(client, answer["request_id"])["path"].endswith("/weights/restored")
    again = RunningProgram(
        server.url,
        program.key,
        Plan(steps=count, sample_every=0, save_every=0, tokens=PLAN.tokens),
        program.home.with_name(f"{program.home.name}-again"),
    ).finish()
    found, expected = program.tensors("weights/restored"), again.tensors("weights/end")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        np.testing.assert_allclose(tensor, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)


def result(client: httpx2.Client, request_id: str) -> dict:
    while (answer := client.post("/retrieve_future", json={"request_id": request_id})).status_code == 408:
        continue
    return answer.raise_for_status().json()
