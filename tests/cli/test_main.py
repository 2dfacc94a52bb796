"""The commands as a user runs them: what they print, what they refuse, and with which exit code."""

import json
import os
import subprocess
import sys
import tomllib

import pytest
from typer.testing import CliRunner

from lorimer import __version__
from lorimer.cli.main import app


def lorimer(*arguments, **environment):
    """Run a command in this process; only variables named here are seen of ``LORIMER_*``."""
    hidden = {name: None for name in os.environ if name.startswith("LORIMER_")}
    return CliRunner().invoke(app, list(map(str, arguments)), env={**hidden, "NO_COLOR": "1", **environment})


def test_help_names_the_commands():
    run = lorimer("--help")
    assert run.exit_code == 0
    for name in ("serve", "key", "config", "version"):
        assert name in run.stdout


def test_help_loads_neither_the_server_nor_numerics():
    heavy = ["torch", "numpy", "starlette", "sqlalchemy", "granian", "pydantic", "lorimer.server", "lorimer.store"]
    code = f"import sys, lorimer.cli.main; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "[]", run.stderr


def test_version():
    assert lorimer("version").stdout.strip() == __version__
    assert json.loads(lorimer("version", "-f", "json").stdout) == {"version": __version__}


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
