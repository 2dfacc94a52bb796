"""Keys are made, listed and revoked on a data directory, with and without its server."""

import asyncio
import json
import re
import socket
import sqlite3

import pytest

from lorimer.server.app import running
from lorimer.server.control import CreateKey, DescribeServer, ListKeys, RevokeKey, ask_server
from lorimer.server.keys import run_key_command
from lorimer.server.settings import Settings
from tests.cli.commands import lorimer


def test_create_list_revoke(tmp_path):
    data = tmp_path / "data"
    made = lorimer("key", "create", "alice", "--name", "laptop", "--note", "[red]x\x1b[0m", "--data", data)
    assert made.exit_code == 0, made.stderr
    secret = made.stdout.strip()
    assert re.fullmatch(r"tml-[A-Za-z0-9]{40}", secret)
    listed = lorimer("key", "list", "--data", data)
    assert secret[:8] in listed.stdout
    assert secret not in listed.stdout
    assert "laptop" in listed.stdout
    assert "\x1b" not in listed.stdout
    keys = json.loads(lorimer("key", "list", "--data", data, "-f", "json").stdout)
    assert [(key["key_id"], key["name"], key["revoked_at"]) for key in keys] == [(1, "laptop", None)]
    assert "secret" not in keys[0]
    revoked = lorimer("key", "revoke", 1, "--data", data, "-f", "json")
    assert json.loads(revoked.stdout) == {"key_id": 1, "revoked": True}
    again = lorimer("key", "revoke", 1, "--data", data)
    assert (again.exit_code, "there is no valid key 1" in again.stderr) == (4, True)
    assert "revoked" in lorimer("key", "list", "--data", data).stdout


def test_quotas_belong_to_the_user_and_are_changed(tmp_path):
    data = tmp_path / "data"
    flags = ("--max-stored-bytes", "20GB", "--requests-per-second", "2.5")
    made = lorimer("key", "create", "alice", *flags, "--data", data)
    assert made.exit_code == 0, made.stderr
    assert lorimer("key", "create", "alice", "--name", "second", "--data", data).exit_code == 0
    assert lorimer("key", "create", "bob", "--data", data).exit_code == 0
    assert quotas(data) == {"alice": {(20 * 10**9, 2.5)}, "bob": {(0, 0)}}
    listed = lorimer("key", "list", "--data", data).stdout
    assert all(text in listed for text in ("0 bytes of 20.0 GB", "2.5/s", "no limit"))
    changed = lorimer("key", "quota", "bob", "--max-stored-bytes", "1.5GiB", "--data", data, "-f", "json")
    assert json.loads(changed.stdout) == {
        "user": "bob",
        "stored_bytes": 0,
        "max_stored_bytes": 3 * 2**29,
        "requests_per_second": 0.0,
    }
    lorimer("key", "quota", "alice", "--requests-per-second", "default", "--data", data)
    assert quotas(data) == {"alice": {(20 * 10**9, 0)}, "bob": {(3 * 2**29, 0)}}
    shown = lorimer("key", "quota", "alice", "--data", data)
    assert (shown.exit_code, "0 bytes of 20.0 GB" in shown.stdout, "no limit" in shown.stdout) == (0, True, True)


def quotas(data):
    found = {}
    for key in json.loads(lorimer("key", "list", "--data", data, "-f", "json").stdout):
        found.setdefault(key["user"], set()).add((key["max_stored_bytes"], key["requests_per_second"]))
    return found


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--max-stored-bytes", "20XB"), "--max-stored-bytes is '20XB'; bytes, a size such as 20GB"),
        (("--max-stored-bytes", "-1"), "--max-stored-bytes is '-1'"),
        (("--requests-per-second", "many"), "--requests-per-second is 'many'; a number from 0"),
        (("--requests-per-second", "nan"), "--requests-per-second is 'nan'"),
        ((), "there is no user 'nobody'"),
    ],
    ids=["unit", "negative", "word", "nan", "nobody"],
)
def test_quotas_that_cannot_be_are_refused(tmp_path, flags, text):
    refused = lorimer("key", "quota", "nobody", *flags, "--data", tmp_path / "data")
    assert refused.exit_code != 0 and text in " ".join(refused.stderr.split()), refused.stderr


async def test_a_running_server_follows_a_change_of_quotas(tmp_path):
    settings = Settings(data=tmp_path / "data", start_engines="lazy", max_stored_bytes=7)
    async with running(settings) as context:
        made = await in_thread(lorimer, "key", "create", "alice", "--data", settings.data)
        secret = made.stdout.strip()
        assert (await context.credentials.identify(secret)).user.requests_per_second is None
        changed = await in_thread(
            lorimer, "key", "quota", "alice", "--requests-per-second", "9", "--data", settings.data, "-f", "json"
        )
        assert json.loads(changed.stdout)["max_stored_bytes"] == 7, "the server's setting"
        assert (await context.credentials.identify(secret)).user.requests_per_second == 9


def test_new_key_as_json(tmp_path):
    made = json.loads(lorimer("key", "create", "bob", "--data", tmp_path / "data", "-f", "json").stdout)
    assert made["secret"].startswith("tml-" + made["prefix"][4:])
    assert made["name"] == "bob"


async def test_running_server_does_it_and_notices_at_once(tmp_path):
    # Longer than the address of a socket may be.
    data = tmp_path / ("long" * 20) / ("path" * 20)
    async with running(Settings(data=data, start_engines="lazy")) as context:
        made = await in_thread(lorimer, "key", "create", "alice", "--data", data)
        assert made.exit_code == 0, made.stderr
        assert not context.credentials.is_open
        assert (await context.credentials.identify(made.stdout.strip())).key.key_id == 1
        assert "alice" in (await in_thread(lorimer, "key", "list", "--data", data)).stdout
        assert (await in_thread(lorimer, "key", "revoke", 1, "--data", data)).exit_code == 0
        with pytest.raises(Exception, match="revoked"):
            await context.credentials.identify(made.stdout.strip())


async def test_commands_reach_the_server_only_while_it_runs(tmp_path):
    settings = Settings(data=tmp_path / "data", start_engines="lazy")
    assert ask_server(settings.data, ListKeys()) is None
    async with running(settings):
        assert (settings.data / "control").stat().st_mode & 0o777 == 0o600
        reply = await in_thread(ask_server, settings.data, CreateKey("alice", "a"))
        assert reply.keys[0].secret
        assert (await in_thread(ask_server, settings.data, DescribeServer())).url == ""
    assert ask_server(settings.data, ListKeys()) is None
    listed = await in_thread(run_key_command, settings, ListKeys())
    assert [(key.name, key.secret) for key in listed.keys] == [("a", None)]
    assert (await in_thread(run_key_command, settings, RevokeKey(1))).revoked


def test_socket_of_a_killed_server_is_no_server(tmp_path):
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(data / "control"))
    assert ask_server(data, ListKeys()) is None
    assert run_key_command(Settings(data=data), ListKeys()).keys == []


async def test_held_directory_without_an_answer_is_exit_code_3(tmp_path):
    data = tmp_path / "data"
    async with running(Settings(data=data, start_engines="lazy")):
        (data / "control").unlink()
        run = await in_thread(lorimer, "key", "list", "--data", data)
        assert (run.exit_code, "in use by process" in run.stderr) == (3, True)
        (data / "control").touch()


def test_only_a_hash_is_stored(tmp_path):
    secret = lorimer("key", "create", "alice", "--data", tmp_path / "data").stdout.strip()
    with sqlite3.connect(tmp_path / "data" / "lorimer.db") as database:
        dump = "\n".join(database.iterdump())
    database.close()
    assert secret not in dump
    assert secret[:8] in dump


async def in_thread(work, *arguments):
    return await asyncio.to_thread(work, *arguments)
