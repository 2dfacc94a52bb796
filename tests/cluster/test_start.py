"""What processes of an installation are refused at start: each in one sentence."""

import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from lorimer.errors import InvalidInput
from lorimer.server import roles
from lorimer.server.control import CreateKey, ListKeys
from lorimer.server.keys import run_key_command
from lorimer.server.settings import Settings
from lorimer.store.database import Store
from lorimer.store.directory import DataDirectory
from tests.conformance.servers import LORIMER, environment
from tests.store.postgres import running


@pytest.fixture(scope="module")
def database():
    with running() as server:
        yield server.url()


def refused(*arguments: str, code: int | None = None) -> str:
    done = subprocess.run([*LORIMER, *arguments], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode in ((1, 2, 3) if code is None else (code,)), done.stderr
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


def test_keys_are_made_while_a_worker_holds_its_directory(database, tmp_path):
    """As `kubectl exec` and `docker compose run` of the documents do; neither may keep the other from starting."""
    directory = DataDirectory(tmp_path / "data")
    directory.lock()
    settings = Settings(database=database, data=tmp_path / "data")
    assert run_key_command(settings, CreateKey("alice", "laptop")).keys[0].secret
    assert [key.name for key in run_key_command(settings, ListKeys()).keys] == ["laptop"]
    directory.unlock()


# ── cluster = "ray"; what needs Ray for its refusal is in tests/ray ─────────────────────────────────────


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines))
    return str(path)


def test_ray_cannot_share_sqlite(tmp_path):
    config = write(tmp_path / "lorimer.toml", 'cluster = "ray"')
    for command in (["cluster", "start"], ["worker"], ["serve", "--role", "api"]):
        assert "needs a PostgreSQL database" in refused(*command, "--config", config, code=2)


@pytest.mark.skipif(find_spec("ray") is not None, reason="ray is installed")
def test_where_ray_is_not_installed_the_message_says_how(tmp_path):
    config = write(tmp_path / "lorimer.toml", 'cluster = "ray"', 'database = "postgresql://l@127.0.0.1:1/none"')
    assert "pip install 'lorimer[cluster]'" in refused("cluster", "start", "--config", config, code=2)


def test_a_server_that_computes_does_not_use_ray(tmp_path):
    config = write(tmp_path / "lorimer.toml", 'cluster = "ray"', 'database = "postgresql://l@127.0.0.1:1/none"')
    assert "serve with --role api, and leave computing to workers" in refused("serve", "--config", config, code=2)


def test_the_command_cluster_needs_the_setting(tmp_path):
    assert 'set cluster = "ray" in the configuration file' in refused("cluster", "status", code=2)


def test_a_claim_that_names_no_replica(database, tmp_path):
    (tmp_path / "secret").write_text("one" * 32)
    flags = ["--data", str(tmp_path), "--database", database, "--set", "worker_claims=lorimer/tiny#7"]
    flags += ["--set", f"secret_file={tmp_path / 'secret'}"]
    line = refused("worker", *flags, code=2)
    assert "worker_claims has 'lorimer/tiny#7', which names no replica; there are lorimer/tiny#0" in line


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
