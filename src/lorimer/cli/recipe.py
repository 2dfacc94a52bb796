"""``lorimer recipe``: the training scripts that come with the package; `python -m lorimer.recipes.NAME` is the same."""

import ast
import difflib
import importlib
import importlib.util
import inspect
import pkgutil
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.models import OptionInfo

from lorimer.cli.commands import cli_command
from lorimer.cli.output import Column, Format, FormatOption, examples, print_json, print_table
from lorimer.errors import InvalidInput

app = typer.Typer(help="Look at the recipes, and run them.", no_args_is_help=True)

PACKAGE = "lorimer.recipes"
NameArgument = Annotated[str, typer.Argument(help="Name of a recipe.")]


@app.command(name="list", epilog=examples("lorimer recipe list", "lorimer recipe list -f json"))
@cli_command
def list_(output: FormatOption = Format.table) -> None:
    """List the recipes, each with a sentence."""
    found = [(name, docstring(path).splitlines()[0]) for name, path in recipes().items()]
    if output is Format.json:
        print_json([{"name": name, "summary": summary} for name, summary in found])
    else:
        print_table([Column("recipe", whole=True), Column("what it does", whole=True)], found)


@app.command(epilog=examples("lorimer recipe show dpo", "lorimer recipe show dpo --source | less"))
@cli_command
def show(
    name: NameArgument,
    source: Annotated[bool, typer.Option("--source", help="Print the whole script, to copy and change it.")] = False,
    output: FormatOption = Format.table,
) -> None:
    """Show what a recipe does, how long it takes, what to expect, and where its script is."""
    path = found_recipe(name)
    if output is Format.json:
        print_json({"name": name, "description": docstring(path), "path": str(path)})
    elif source:
        print(path.read_text("utf-8"), end="")
    else:
        print(f"{docstring(path)}\n\nscript: {path}\noptions: lorimer recipe run {name} --help")


@app.command(
    epilog=examples("lorimer recipe run sl_basic", "lorimer recipe run dpo --data pairs.jsonl --max-steps 20"),
    context_settings={"allow_interspersed_args": False},  # what follows the name is the recipe's
)
@partial(cli_command, extra="server,cookbook")
def run(
    name: NameArgument,
    arguments: Annotated[list[str] | None, typer.Argument(help="Options of the recipe; --help lists them.")] = None,
) -> None:
    """Run a recipe with its own options."""
    from lorimer.terminal import recipe_app

    found_recipe(name)
    main = importlib.import_module(f"{PACKAGE}.{name}").main
    recipe_app(main)(arguments or [], prog_name=f"lorimer recipe run {name}")


@app.command(epilog=examples("lorimer recipe schema", "lorimer recipe schema | jq .dpo.properties"))
@partial(cli_command, extra="server,cookbook")
def schema() -> None:
    """Print the options of the recipes that train a model, as JSON schemas."""
    found = {}
    for name, path in recipes().items():
        main = importlib.import_module(f"{PACKAGE}.{name}").main
        options = {option: _option(parameter) for option, parameter in _options(main).items()}
        if {"model", "log_dir"} <= options.keys():
            needed = [option for option, one in _options(main).items() if one.default is one.empty]
            found[name] = {"description": docstring(path).splitlines()[0], "properties": options, "required": needed}
    print_json(found)


def _options(main: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a recipe by the names of their options, with ``_`` for ``-``."""
    found = {}
    for parameter in inspect.signature(main).parameters.values():
        told = _typed(parameter)[1]
        first = getattr(told, "default", None)  # in an annotation Typer keeps the first name of an option here
        name = first if isinstance(first, str) and first.startswith("--") else parameter.name
        found[name.lstrip("-").replace("-", "_")] = parameter
    return found


def _typed(parameter: inspect.Parameter) -> tuple[Any, Any]:
    """Return the type of a parameter, and what Typer was told about it."""
    if get_origin(parameter.annotation) is not Annotated:
        return parameter.annotation, None
    hint, *more = get_args(parameter.annotation)
    return hint, next((one for one in more if isinstance(one, OptionInfo)), None)


def _option(parameter: inspect.Parameter) -> dict[str, Any]:
    """Return the JSON schema of an option; that of a file has the format ``path``."""
    from lorimer.cookbook.train.config_file import schema_of

    hint, told = _typed(parameter)
    found = dict(schema_of(hint) or {"type": "string"})
    if Path in (hint, *get_args(hint)):
        found["format"] = "path"
    if told is not None and told.min is not None:
        found["minimum"] = told.min
    if told is not None and told.help:
        found["description"] = told.help
    if parameter.default not in (parameter.empty, None):
        found["default"] = parameter.default if isinstance(parameter.default, int | float) else str(parameter.default)
    return found


def recipes() -> dict[str, Path]:
    """Return the scripts by name, without loading them."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    return {module.name: folder / f"{module.name}.py" for module in pkgutil.iter_modules([str(folder)])}


def found_recipe(name: str) -> Path:
    names = recipes()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"the nearest is {near[0]!r}" if near else f"there are {', '.join(names)}"
        raise InvalidInput(f"there is no recipe {name!r}; {hint}")
    return names[name]


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text("utf-8"))) or path.stem
