"""Recipes as trainings of the server: which options users may set, and the command that runs one.

The options are those of ``lorimer recipe schema``, less everything by which a recipe reads or writes a file, runs code
or connects to another service: paths are never offered, and texts only if they are named here.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lorimer.errors import InvalidInput
from lorimer.types.paths import SCHEME

PREFIX = "recipe:"
ROWS = "data"
TEXTS = {
    *("learning_rates", "ranks", "methods"),  # lists of values
    *("loss_fn", "optimizer", "schedule", "kind", "renderer"),  # names of things that the cookbook has
    *("name", "maker", "suffix"),  # texts that are trained on
    "teacher",  # checked: a checkpoint
}
"""Options with texts by which a recipe reads no file and runs no code of the server's machine."""
REFUSED = {"environments", "graders", "environment_workers", "grader_workers"}
"""Options with a choice of where processes run, and of how many."""

Schema = dict[str, Any]


def offered_recipe(schema: Schema) -> Schema:
    """Return the schema of a recipe with the options that users may set; its model is called ``base_model``."""
    properties = {name: one for name, one in schema["properties"].items() if _is_offered(name, one)}
    required = [name for name in schema["required"] if name in properties]
    base_model = {"base_model": schema["properties"]["model"]}
    return schema | {"properties": base_model | properties, "required": [*required, "base_model"]}


def _is_offered(name: str, option: Schema) -> bool:
    if name in REFUSED or option.get("format") == "path":
        return False
    kinds = {one.get("type") for one in option.get("anyOf", [option]) if "enum" not in one}
    return "string" not in kinds or name in TEXTS


def _is_boolean(option: Schema) -> bool:
    return "boolean" in {one.get("type") for one in option.get("anyOf", [option])}


def check_options(kind: str, settings: Mapping[str, Any], kinds: Mapping[str, Schema]) -> None:
    """Refuse a recipe that is not offered, and options that it does not have or that users may not set."""
    if kind not in kinds:
        names = [one for one in kinds if one.startswith(PREFIX)]
        near = difflib.get_close_matches(kind, names, n=1)
        hint = f"the nearest is {near[0]!r}" if near else f"there are {', '.join(names)}"
        raise InvalidInput(f"kind is {kind!r:.100}, and no such recipe is offered; {hint}")
    accepted = kinds[kind]["properties"]
    for name, value in settings.items():
        if name not in accepted:
            near = difflib.get_close_matches(name, accepted, n=1)
            hint = f"the nearest is {near[0]!r}" if near else f"accepted are {', '.join(accepted)}"
            raise InvalidInput(f"settings has {name!r:.100}, which {kind} does not accept from users; {hint}")
        if not isinstance(value, str | int | float):
            raise InvalidInput(f"settings has {name} {value!r:.100}; a text, a number or a boolean is accepted")
        if isinstance(value, bool) and not _is_boolean(accepted[name]):
            raise InvalidInput(f"settings has {name} {value}, which is not a choice between true and false")
        if isinstance(value, str) and "\0" in value:
            raise InvalidInput(f"settings has {name} {value!r:.100}; a null character is not accepted")
    if (teacher := settings.get("teacher")) is not None and not str(teacher).startswith(SCHEME):
        raise InvalidInput(f"settings has teacher {teacher!r:.200}; a {SCHEME} path is accepted")


def recipe_command(kind: str, settings: Mapping[str, Any], log_dir: Path, rows: Path | None) -> list[str]:
    """Return the command that runs a recipe; every value is one word with the name of its option."""
    options = {"model" if name == "base_model" else name: value for name, value in settings.items()}
    words = ["recipe", "run", kind.removeprefix(PREFIX), f"--log-dir={log_dir}"]
    words += [f"--{ROWS}={rows}"] if rows is not None else []
    for name, value in options.items():
        flag = name.replace("_", "-")
        words.append((f"--{flag}" if value else f"--no-{flag}") if isinstance(value, bool) else f"--{flag}={value}")
    return words
