"""The doctor finds what is wrong, says what to do, and does not hang."""

import json
import os
import socket
import sqlite3
import threading
import time

import pytest

from lorimer.cli import machine_checks, service_checks
from lorimer.cli.findings import Check, Status, ok, run_checks
from lorimer.server.settings import Settings
from tests.cli.commands import CommandLine, lorimer
from tests.store.buckets import SECRET, variables
from tests.store.postgres import running


@pytest.fixture(scope="module")
def postgres_url():
    with running() as postgres:
        yield postgres.url()


def quiet(text, fraction):
    pass


def test_healthy_machine(alice: CommandLine, tmp_path):
    run = alice.run("doctor", "--data", tmp_path / "data", "-f", "json", LORIMER_PORT="0")
    found = {finding["check"]: finding for finding in json.loads(run.stdout)}
    names = "python packages torch gpu memory sqlite client data directory lock database port hub server"
    assert set(names.replace("data directory", "data_directory").split()) == {n.replace(" ", "_") for n in found}
    assert found["torch"]["status"] == "ok"
    assert "bfloat16 is" in found["torch"]["text"]
    assert "offline" in found["hub"]["text"]
    assert found["server"]["status"] == "ok"
    assert alice.url in found["server"]["text"]
    assert alice.key not in run.stdout
    assert run.exit_code == (1 if any(f["status"] == "failed" for f in found.values()) else 0)
    assert not (tmp_path / "data").exists()


@pytest.fixture
def without_torch(monkeypatch):
    """The slowest check is left out."""
    monkeypatch.setattr("lorimer.cli.doctor.check_torch", lambda: [ok("torch", "not asked")])


def test_failures_are_told_with_advice_and_exit_code_1(without_torch, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o777)
    (data / "lorimer.db").write_bytes(b"no database" * 100)
    (data / "lock").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = lorimer(
            "doctor", "--data", data, LORIMER_PORT=str(taken.getsockname()[1]), TINKER_BASE_URL="http://127.0.0.1:1"
        )
    assert run.exit_code == 1, run.stderr
    assert "Traceback" not in run.stdout + run.stderr
    for text in (
        "every user can write to",
        f"chmod o-w {data}",
        "not a database",
        f"held by process {os.getpid()}",
        "--port",
        "http://127.0.0.1:1 cannot be reached",
    ):
        assert text in run.stdout, run.stdout


def test_wrong_settings_are_a_finding(without_torch):
    run = lorimer("doctor", "-f", "json", LORIMER_PROT="1")
    found = {finding["check"]: finding for finding in json.loads(run.stdout)}
    assert run.exit_code == 1
    assert "LORIMER_PORT" in found["settings"]["text"]


def test_key_that_the_server_refuses(alice: CommandLine, without_torch, tmp_path):
    run = CommandLine(alice.url, "tml-wrong").run("doctor", "--data", tmp_path, "-f", "json")
    found = {finding["check"]: finding for finding in json.loads(run.stdout)}
    assert found["server"]["status"] == "failed"
    assert "tml-wrong" not in run.stdout


def test_hanging_check_fails_in_time():
    release = threading.Event()

    def hang():
        release.wait(60)
        return []

    def break_down():
        raise RuntimeError("broken")

    start = time.monotonic()
    checks = [Check("slow", hang, 0.2), Check("fine", lambda: [ok("fine", "x")]), Check("broken", break_down)]
    findings = run_checks(checks, quiet)
    release.set()
    assert time.monotonic() - start < 5
    assert [(f.check, f.status) for f in findings] == [
        ("slow", Status.failed),
        ("fine", Status.ok),
        ("broken", Status.failed),
    ]
    assert "broken" in findings[2].text


@pytest.mark.parametrize(
    ("version", "status"),
    [((3, 40, 1), "warning"), ((3, 51, 2), "warning"), ((3, 51, 3), "ok"), ((3, 52, 0), "warning"), ((3, 53, 0), "ok")],
)
def test_sqlite_versions(monkeypatch, version, status):
    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    (finding,) = service_checks.check_sqlite()
    assert finding.status == status


def test_torch_that_crashes_is_a_finding(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is torn')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (finding,) = machine_checks.check_torch()
    assert (finding.status, "libtorch is torn" in finding.text) == ("failed", True)


def test_database_of_a_server_is_read(alice: CommandLine, server):
    (finding,) = service_checks.check_database(Settings(data=server.data))
    assert finding.status == "ok", finding
    (locked,) = service_checks.check_lock(Settings(data=server.data))
    assert "held by process" in locked.text


def test_database_that_is_away():
    url = "postgresql://nobody:secret@127.0.0.1:1/none"
    (finding,) = service_checks.check_database(Settings(database=url))
    assert finding.status == "failed"
    assert "secret" not in finding.text


@pytest.mark.service
@pytest.mark.parametrize(("apart", "status"), [(0, "ok"), (4, "ok"), (60, "failed"), (-60, "failed")])
def test_clock_of_the_database(monkeypatch, postgres_url, apart, status):
    clock = time.time
    monkeypatch.setattr("lorimer.server.roles.time.time", lambda: clock() + apart)
    (finding,) = service_checks.check_clock(Settings(database=postgres_url))
    assert finding.status == status, finding
    assert ("NTP" in finding.advice) == (status == "failed")
    (database,) = service_checks.check_database(Settings(database=postgres_url))
    assert (database.status, "is empty" in database.text) == ("ok", True)


@pytest.mark.service
def test_clock_is_asked_of_postgresql_only(without_torch, postgres_url, tmp_path):
    for database, is_asked in ((postgres_url, True), ("postgresql://nobody@127.0.0.1:1/none", False), ("", False)):
        run = lorimer("doctor", "--data", tmp_path, "-f", "json", LORIMER_DATABASE=database, LORIMER_PORT="0")
        found = {finding["check"] for finding in json.loads(run.stdout)}
        assert ("clock" in found, "database" in found) == (is_asked, True)


def test_object_store(without_torch, tmp_path):
    (tmp_path / "file").write_text("no directory")
    for url, status in ((f"file://{tmp_path}/objects", "ok"), (f"file://{tmp_path}/file/objects", "failed")):
        run = lorimer("doctor", "--data", tmp_path / "data", "-f", "json", LORIMER_OBJECTS=url, LORIMER_PORT="0")
        found = {finding["check"]: finding for finding in json.loads(run.stdout)}
        assert (found["object store"]["status"], url in found["object store"]["text"]) == (status, True), run.stdout
    assert not [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]


def test_object_store_that_is_away(monkeypatch):
    for name, value in variables("http://127.0.0.1:1").items():
        monkeypatch.setenv(name, value)
    (finding,) = service_checks.check_objects(Settings(objects="s3://bucket/prefix"))
    assert finding.status == "failed"
    assert SECRET not in finding.text


@pytest.mark.parametrize(("free", "status"), [(1 << 20, "failed"), (1 << 30, "warning"), (1 << 40, "ok")])
def test_disk_space(monkeypatch, tmp_path, free, status):
    real = os.statvfs(tmp_path)
    fake = os.statvfs_result([real[0], 1, *real[2:4], free, *real[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: fake)
    monkeypatch.setattr(service_checks, "fsync_seconds", lambda path: 0.001)
    (finding,) = service_checks.check_data_directory(Settings(data=tmp_path / "deep" / "data"))
    assert finding.status == status
    assert not (tmp_path / "deep").exists()


def test_proxy_without_exception_is_a_warning(monkeypatch):
    from lorimer.cli.doctor import check_client

    monkeypatch.setenv("HTTP_PROXY", "http://proxy")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert check_client()[0].status == "warning"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert check_client()[0].status == "ok"
