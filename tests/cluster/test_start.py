"""What processes of an installation are refused at start: each in one sentence."""

import subprocess
import time

import pytest

from lorimer.errors import InvalidInput
from lorimer.server import roles
from lorimer.server.settings import Settings
from lorimer.store.database import Store
from lorimer.store.directory import DataDirectory
from tests.conformance.servers import LORIMER, environment
from tests.store.postgres import running


@pytest.fixture(scope="module")
def database():
    with running() as server:
        yield server.url()


def refused(*arguments: str) -> str:
    done = subprocess.run([*LORIMER, *arguments], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode in (1, 2, 3), done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


@pytest.mark.parametrize("command", [["serve", "--role", "api"], ["worker"]])
def test_sqlite_cannot_be_shared(command, tmp_path):
    line = refused(*command, "--data", str(tmp_path))
    assert "needs a PostgreSQL database: several processes cannot share a SQLite file" in line


def test_a_worker_is_not_a_server(tmp_path):
    assert "start it with `lorimer worker`" in refused("serve", "--role", "worker", "--database", "postgresql://l@x/y")


def test_a_database_that_does_not_answer(tmp_path):
    line = refused("worker", "--data", str(tmp_path), "--database", "postgresql://l@127.0.0.1:1/none")
    assert "the database cannot be used" in line


def open_as(role: str, database: str, data, **settings: object) -> Store:
    chosen = Settings(role=role, database=database, data=data, **settings)
    directory = DataDirectory(data)
    directory.lock(is_shared=roles.shares_directory(chosen))
    try:
        return roles.open_store(chosen, directory)
    finally:
        directory.unlock()


def test_processes_share_one_secret_and_a_server_alone_is_kept_out(database, tmp_path):
    secrets = {}
    for name in ("one", "two"):
        secrets[name] = tmp_path / name
        secrets[name].write_text(name * 32)
    first = open_as("worker", database, tmp_path / "a", objects="s3://b/c", secret_file=str(secrets["one"]))
    try:
        open_as("api", database, tmp_path / "b", objects="s3://b/c", secret_file=str(secrets["one"])).close()
        with pytest.raises(InvalidInput, match="the secret differs from that of the other processes"):
            open_as("api", database, tmp_path / "c", objects="s3://b/c", secret_file=str(secrets["two"]))
        line = refused("serve", "--data", str(tmp_path / "d"), "--database", database, "--port", "0")
        assert "the database is in use by" in line
    finally:
        first.close()


def test_a_short_secret_is_refused(database, tmp_path):
    (tmp_path / "short").write_text("abc")
    with pytest.raises(InvalidInput, match="has 3 bytes; at least 32 are needed"):
        open_as("api", database, tmp_path / "data", objects="s3://b/c", secret_file=str(tmp_path / "short"))


def test_clocks_that_are_apart_are_refused(database, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("one" * 32)
    now = time.time
    monkeypatch.setattr(roles.time, "time", lambda: now() + 60)
    with pytest.raises(InvalidInput, match="are 60 s apart; at most 5 s are accepted"):
        open_as("api", database, tmp_path / "data", objects="s3://b/c", secret_file=str(tmp_path / "secret"))
