"""Runs recipes against the server that the cookbook's tests use too."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import lorimer
from lorimer.terminal import recipe_app
from tests.surroundings import clean_environment  # noqa: F401

Run = Callable[..., str]
Refuse = Callable[..., tuple[int, str]]


def recipe_command(recipe: str, /, **options: object) -> list[str]:
    flags = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    return [sys.executable, "-W", "error", "-m", f"lorimer.recipes.{recipe}", *flags]


@pytest.fixture(scope="session")
def service(base_url: str) -> Iterator[lorimer.ServiceClient]:
    with lorimer.ServiceClient({"suite": "recipes"}, base_url=base_url) as client:
        yield client


@pytest.fixture
def run_recipe(base_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a recipe with the options of its command line against the shared server; what it printed.

    It runs in this process, where what it imports is loaded once for all; some tests start one in a process of its own.
    """
    monkeypatch.chdir(tmp_path)

    def run(recipe: str, /, **options: object) -> str:
        app = typer.Typer()
        app.command()(importlib.import_module(f"lorimer.recipes.{recipe}").main)
        given = {"base_url": base_url, "log_dir": tmp_path / "log"} | options
        if recipe == "inference_gsm8k":
            given.pop("log_dir")
        command = recipe_command(recipe, **given)
        ended = CliRunner().invoke(
            app, command[command.index(f"lorimer.recipes.{recipe}") + 1 :], catch_exceptions=False
        )
        assert ended.exit_code == 0, ended.output[-4000:]
        return ended.stdout

    return run


@pytest.fixture
def refused_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Runs a recipe that fails, as its command line starts it; its exit code and its one line on stderr."""
    monkeypatch.chdir(tmp_path)

    def run(recipe: str, *arguments: object) -> tuple[int, str]:
        app = recipe_app(importlib.import_module(f"lorimer.recipes.{recipe}").main)
        ended = CliRunner().invoke(app, list(map(str, arguments)))
        assert ended.exit_code != 0, ended.output
        assert isinstance(ended.exception, SystemExit), ended.exception
        told = [line for line in ended.stderr.splitlines() if line.startswith("lorimer: ")]
        assert len(told) == 1 and "Traceback" not in ended.output, ended.output
        return ended.exit_code, told[0]

    return run
