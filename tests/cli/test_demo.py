"""``lorimer demo``: which server it takes, and that what it prints works as it is printed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lorimer.cli.demo import server_for
from lorimer.terminal import command
from tests.cli.commands import lorimer
from tests.conformance.servers import LORIMER, environment, running_server


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("LORIMER_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_running_server_with_the_model_is_used(data, tmp_path, capsys):
    with running_server(data, ["lorimer/debug"], start_engines="lazy") as server:
        with server_for("lorimer/debug", None, tmp_path / "demo") as chosen:
            assert (chosen.url, chosen.is_own) == (server.url, False)
        assert f"using the server at {server.url}" in capsys.readouterr().err
        with server_for("lorimer/debug", server.url, tmp_path / "demo") as chosen:
            assert (chosen.url, chosen.chat_flags) == (server.url, ("--base-url", server.url))


def test_beside_a_server_without_the_model_it_has_a_directory_of_its_own(data, tmp_path, capsys):
    own = tmp_path / "demo" / "data"
    serving = running_server(data, ["other=lorimer/debug"], start_engines="lazy")
    with serving as server, server_for("lorimer/debug", None, tmp_path / "demo") as chosen:
        assert chosen.is_own and chosen.url != server.url
        assert own.is_dir()
        listed = lorimer("run", "list", "--data", str(own))
        assert (listed.exit_code, listed.stdout) == (0, "")
    told = capsys.readouterr().err
    assert f"the demo keeps its own in {own}" in told and "starting a server, which loads lorimer/debug" in told
    assert chosen.again == ("serve", "--data", str(own), "--model", "lorimer/debug")
    assert chosen.chat_flags == ("--data", str(own))


def test_without_a_server_the_usual_directory_is_used(data, tmp_path):
    with server_for("lorimer/tiny", None, tmp_path / "demo") as chosen:
        assert chosen.is_own and (data / "lorimer.db").exists()
    assert (chosen.again, chosen.chat_flags) == (("serve",), ())


def test_printed_commands_work_where_the_user_stands(tmp_path, monkeypatch):
    """On the path, below the current directory, elsewhere, and without a script."""
    script = Path(sys.executable).with_name("lorimer")
    if not script.exists():
        pytest.skip("lorimer is not installed as a script")
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    assert command("serve", "--data", "a b") == "lorimer serve --data 'a b'"
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    assert command("version") == f"{script} version"
    monkeypatch.chdir(script.parents[1])
    assert command("version") == "bin/lorimer version"
    run = subprocess.run(shlex.split(command("version")), env=environment(), capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert command("serve") == f"{tmp_path}/python -m lorimer.cli serve"


@pytest.mark.slow
@pytest.mark.parametrize("example", re.findall(r"\$ lorimer demo(.*)", lorimer("demo", "--help").stdout))
def test_examples_show_that_trying_helps(example, tmp_path):
    flags = [*shlex.split(example.strip()), "--no-stay"]
    variables = environment(LORIMER_DATA=str(tmp_path / "data"))
    run = subprocess.run([*LORIMER, "demo", *flags], env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    before, between, after = map(int, re.search(r"right of 200 +(\d+)% +(\d+)% +(\d+)%", run.stdout).groups())
    assert before < between < after
    talk = shlex.split(re.search(r"talk to it: (.*)", run.stdout)[1])
    said = subprocess.run(
        [*talk, "--once", "What is 2 + 3?"], env=variables, cwd=tmp_path, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    assert "See everything again, and talk to it, after: " in run.stdout
