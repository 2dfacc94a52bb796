"""The commands as a user runs them: what they print, what they refuse, and with which exit code."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
import typer

from lorimer import __version__
from lorimer.cli.main import app
from tests.cli.commands import lorimer
from tests.conformance.servers import LORIMER, environment

HEAVY = (
    "torch transformers numpy httpx httpx2 pydantic msgspec huggingface_hub starlette sqlalchemy httptools asyncio "
    "matplotlib safetensors psutil lorimer.cookbook lorimer.recipes lorimer.client lorimer.server lorimer.store "
    "lorimer.engine lorimer.types"
).split()

PROGRAM = "from lorimer.cli.main import app; app(prog_name='lorimer')"


def commands(command, *words):
    """Every group and command, by the words that call it."""
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, *words, name)


COMMANDS = list(commands(typer.main.get_command(app)))


def test_help_names_the_commands():
    run = lorimer("--help")
    assert run.exit_code == 0
    for name in ("serve", "run", "checkpoint", "session", "usage", "key", "config", "version"):
        assert name in run.stdout


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_of_every_command(words):
    run = lorimer(*words, "--help")
    assert run.exit_code == 0
    assert f"{' '.join(words)} [OPTIONS]" in run.stdout
    assert not [char for char in run.stdout if ord(char) > 0xFFFF], "a word between colons has become an emoji"


def test_ctrl_c_while_modules_are_loaded_ends_without_a_traceback():
    code = """
import sys

class Interrupted:
    @staticmethod
    def find_spec(name, *_):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted)
from lorimer.cli import run
run()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("arguments", [["--help"], ["checkpoint", "download", "--help"]], ids=" ".join)
def test_help_loads_nothing_heavy(arguments):
    """Typer itself checks the values of options with pydantic."""
    heavy = [name for name in HEAVY if len(arguments) == 1 or name != "pydantic"]
    code = f"""
import atexit, sys
atexit.register(lambda: print("LOADED", [name for name in {heavy} if name in sys.modules]))
from lorimer.cli.main import app
app({arguments})
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.splitlines()[-1] == "LOADED []", run.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["check"], {"checkpoint"}),
        (["checkpoint", "list", "--type", ""], {"training", "sampler", "external"}),
    ],
)
def test_completion(words, expected):
    """As bash asks for it, once ``lorimer --install-completion`` has told it how."""
    line = " ".join(["lorimer", *words])
    variables = {"_LORIMER_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment(**variables), capture_output=True, text=True, timeout=60
    )
    assert set(run.stdout.split()) == expected, run.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_completion_in_a_shell(tmp_path):
    """What ``--install-completion`` adds to bash's configuration completes in bash."""
    command = tmp_path / "lorimer"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c {shlex.quote(PROGRAM)} "$@"\n', "utf-8")
    command.chmod(0o755)
    script = (
        'eval "$(lorimer --show-completion bash)"; COMP_WORDS=(lorimer sess); COMP_CWORD=1; '
        "_lorimer_completion lorimer; echo ${COMPREPLY[@]}"
    )
    variables = environment(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1", PATH=f"{tmp_path}:{os.environ['PATH']}")
    run = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, timeout=60)
    assert run.stdout == "session\n", run.stderr


def test_version_without_a_server():
    assert lorimer("version").stdout.strip() == __version__
    assert json.loads(lorimer("version", "-f", "json").stdout) == {"version": __version__, "server": None}
    run = lorimer("version", "--base-url", "http://127.0.0.1:9")
    assert (run.exit_code, run.stdout.strip()) == (0, __version__)
    assert "no server answers" in run.stderr


def test_version_of_a_server(alice, server):
    assert alice("version") == f"{__version__}\nserver at {server.url}: {__version__}\n"
    assert alice.json("version")["server"] == {"url": server.url, "version": __version__}
    run = lorimer("version", "--data", server.data, "-f", "json")
    assert json.loads(run.stdout)["server"] == {"url": server.url, "version": None}  # no key, no answer


def test_closed_pipe_is_no_traceback(alice, trained):
    command = subprocess.Popen(
        [*LORIMER, "run", "list", "-f", "json"],
        env=environment(LORIMER_BASE_URL=alice.url, LORIMER_API_KEY=alice.key),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    command.stdout.close()
    errors = command.stderr.read()
    command.stderr.close()
    assert command.wait(timeout=60) != 0
    assert "Traceback" not in errors


def test_config_prints_toml_with_origins(tmp_path):
    file = tmp_path / "lorimer.toml"
    file.write_text("port = 1\npoll_seconds = 5\n")
    run = lorimer("config", "--config", file, "--set", "gap_seconds=9", LORIMER_PORT="2")
    assert run.exit_code == 0, run.stderr
    values = tomllib.loads(run.stdout)
    assert (values["port"], values["poll_seconds"], values["gap_seconds"]) == (2, 5.0, 9.0)
    assert "# environment LORIMER_PORT" in run.stdout
    found = json.loads(lorimer("config", "-f", "json", LORIMER_CONFIG=str(file)).stdout)
    assert found["port"] == {"value": 1, "from": str(file)}
    assert found["host"] == {"value": "127.0.0.1", "from": "default"}


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["config", "--set", "prt=1"], {}, "nearest is 'port'"),
        (["config", "--set", "port"], {}, "NAME=VALUE is accepted"),
        (["serve", "--dtype", "int4"], {}, "dtype is 'int4'"),
        (["serve", "--port", "99999"], {}, "port is 99999"),
        (["config", "--config", "/none.toml"], {}, "cannot be read"),
        (["config"], {"LORIMER_PROT": "1"}, "LORIMER_PORT"),
        (["serve", "--model", "a", "--model", "a"], {}, "'a' twice"),
        (["nonsense"], {}, "No such command"),
    ],
)
def test_wrong_usage_is_a_sentence_and_exit_code_2(arguments, environment, message):
    run = lorimer(*arguments, **environment)
    assert run.exit_code == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr
