"""Runs every command once in an installation that may lack packages, and prints as JSON how each ended.

Started by ``test_core_install.py`` with the Python of that installation, which has no pytest.
"""

import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import typer
from typer.testing import CliRunner

import lorimer.recipes
from lorimer.cli.main import app
from lorimer.terminal import recipe_app

VALUES = {"key_id": "1", "to": "peft"}
"""Of required parameters that do not take a path."""


def leaves(command: Any, *words: str) -> Iterator[tuple[list[str], Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield list(words), command
    else:
        for name, one in inner.items():
            yield from leaves(one, *words, name)


def required(command: Any) -> list[str]:
    """A value for each argument and option that has to be given."""
    words = []
    for parameter in command.params:
        if parameter.required:
            value = VALUES.get(parameter.name, "tinker://a:train:0/weights/b")
            words += [value] if parameter.param_type_name == "argument" else [parameter.opts[0], value]
    return words


def outcome(program: Any, words: list[str]) -> dict[str, Any]:
    run = CliRunner().invoke(program, words)
    error = None if run.exception is None or isinstance(run.exception, SystemExit) else repr(run.exception)
    return {"code": run.exit_code, "stdout": run.stdout, "stderr": run.stderr, "error": error}


def main() -> None:
    found = {}
    for words, command in leaves(typer.main.get_command(app)):
        found[" ".join(words)] = outcome(app, [*words, *required(command)])
    for module in pkgutil.iter_modules(lorimer.recipes.__path__):
        try:
            recipe = recipe_app(importlib.import_module(f"lorimer.recipes.{module.name}").main)
        except ImportError as error:
            found[f"recipe {module.name}"] = {"code": 1, "stdout": "", "stderr": "", "error": repr(error)}
            continue
        found[f"recipe {module.name}"] = outcome(recipe, required(typer.main.get_command(recipe)))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
