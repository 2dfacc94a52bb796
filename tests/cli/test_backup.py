"""Backups of the tests' own server: complete, verified byte by byte, and refused where they would destroy something."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lorimer.store.directory import RESTORING
from tests.cli.commands import CommandLine, lorimer, refused
from tests.conformance.servers import LORIMER, environment


@pytest.fixture(scope="module")
def copy(server, trained, tmp_path_factory) -> Path:
    """A backup, made while the server runs."""
    place = tmp_path_factory.mktemp("backup") / "copy"
    run = lorimer("backup", place, "--data", server.data, "-f", "json")
    assert run.exit_code == 0, run.stderr
    facts = json.loads(run.stdout)
    assert facts["faults"] == [] and facts["source"] == "sqlite" and facts["files"] > 5
    return place


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_restored_directory_has_the_same_runs_checkpoints_and_keys(server, alice, trained, copy, tmp_path):
    assert lorimer("restore", copy, "--data", tmp_path / "new").exit_code == 0
    assert (tmp_path / "new" / "secret").read_bytes() == (server.data / "secret").read_bytes()
    for command in (("checkpoint", "list"), ("key", "list")):
        there, here = (printed(alice, data, *command) for data in (server.data, tmp_path / "new"))
        if command == ("key", "list"):  # when a key was last used is written now and then
            there, here = ([{**one, "last_used_at": None} for one in found] for found in (there, here))
        assert there == here
    for place in ("weights", "snapshots", "blobs"):
        assert files(tmp_path / "new" / place) == files(copy / place)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in copy.rglob("*"))
    assert copy.stat().st_mode & 0o077 == 0


def printed(user: CommandLine, data: Path, *command: str):
    """In a process of its own, as a command without a server is one."""
    line = [*LORIMER, *command, "--data", str(data), "-f", "json"]
    run = subprocess.run(line, env=environment(LORIMER_API_KEY=user.key), capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_every_damaged_file_is_named_and_nothing_is_restored(copy, tmp_path):
    target = tmp_path / "new"
    for name in files(copy):
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
        shutil.copytree(copy, tmp_path / "damaged")
        flip_a_bit(tmp_path / "damaged" / name)
        code, text = refused(lorimer("restore", tmp_path / "damaged", "--data", target))
        assert code == 1 and name in text and "damaged" in text
    (tmp_path / "damaged" / name).unlink()
    assert name in refused(lorimer("restore", tmp_path / "damaged", "--data", target))[1]
    assert files(target).keys() == {"lock"}
    assert refused(lorimer("restore", tmp_path, "--data", target)) == (
        2,
        f"lorimer: {str(tmp_path)!r} is not a backup: it has no manifest.json\n",
    )


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x04
    path.write_bytes(content)


def test_restore_refuses_a_directory_in_use_or_with_something_in_it(server, copy, tmp_path):
    code, text = refused(lorimer("restore", copy, "--data", server.data, "--replace"))
    assert code == 3 and "is in use by process" in text
    assert lorimer("restore", copy, "--data", tmp_path / "new").exit_code == 0
    before = files(tmp_path / "new")
    code, text = refused(lorimer("restore", copy, "--data", tmp_path / "new"))
    assert code == 2 and "is not empty" in text and "--replace" in text
    assert files(tmp_path / "new") == before
    flip_a_bit(tmp_path / "new" / "secret")
    run = lorimer("restore", copy, "--data", tmp_path / "new", "--replace", "-f", "json")
    aside = Path(json.loads(run.stdout)["replaced"])
    assert (
        (tmp_path / "new" / "secret").read_bytes() == (copy / "secret").read_bytes() != (aside / "secret").read_bytes()
    )


def test_backup_refuses_what_exists_what_is_not_there_and_its_own_directory(server, copy, tmp_path):
    code, text = refused(lorimer("backup", copy, "--data", server.data))
    assert code == 2 and "not an empty directory" in text
    assert refused(lorimer("backup", tmp_path / "copy", "--data", tmp_path / "none"))[0] == 2
    assert refused(lorimer("backup", server.data / "copy", "--data", server.data))[0] == 2
    assert not list(tmp_path.iterdir()) and not (server.data / "copy").exists()


def test_damage_of_the_data_directory_itself_is_told(copy, tmp_path):
    """A file that was damaged or lost before the backup is kept as it is, and named."""
    data = tmp_path / "new"
    assert lorimer("restore", copy, "--data", data).exit_code == 0
    first, second = sorted((data / "weights").iterdir())[:2]
    flip_a_bit(first / "adapter_model.safetensors")
    shutil.rmtree(second)
    run = lorimer("backup", tmp_path / "again", "--data", data, "-f", "json")
    assert run.exit_code == 1 and "2 files of the data directory are not whole" in run.stderr
    assert sorted(json.loads(run.stdout)["faults"]) == sorted(
        [
            f"weights/{first.name} is damaged: it is not what its lorimer.json says",
            f"weights/{second.name} is missing",
        ]
    )
    page = (data / "lorimer.db").read_bytes()
    (data / "lorimer.db").write_bytes(page[:8192] + bytes(4096) + page[12288:])
    code, text = refused(lorimer("backup", tmp_path / "third", "--data", data))
    assert code == 1 and "the database is damaged" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "new"]


KILLED = """
import os, shutil, sys
from lorimer.cli.main import app
from lorimer.server import restore
def killed(*_): os.kill(os.getpid(), 9)
setattr(restore, sys.argv[1], killed)
app(["restore", sys.argv[2], "--data", sys.argv[3]])
"""


@pytest.mark.parametrize("moment", ["_stage_one", "_move_aside", "_move_in"])
def test_a_killed_restore_is_refused_by_the_server_or_not_seen_and_can_be_repeated(copy, tmp_path, moment):
    data = tmp_path / "new"
    command = [sys.executable, "-c", KILLED, moment, str(copy), str(data)]
    assert subprocess.run(command, env=environment(), timeout=60).returncode == -signal.SIGKILL
    is_begun = (data / RESTORING).exists()
    assert is_begun == (moment != "_stage_one")
    if is_begun:
        serve = [*LORIMER, "serve", "--port", "0", "--data", str(data), "--model", "lorimer/debug"]
        served = subprocess.run(serve, env=environment(), capture_output=True, text=True, timeout=60)
        assert served.returncode == 1 and "did not finish; run `lorimer restore` again" in served.stderr
    assert lorimer("restore", copy, "--data", data).exit_code == 0
    assert not (data / RESTORING).exists()
    assert files(data / "weights") == files(copy / "weights")
    assert os.path.getsize(data / "lorimer.db")
