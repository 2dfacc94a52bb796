"""Makes ``docs/cli.md`` from the commands themselves: ``python tools/cli_page.py`` writes it."""

import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from lorimer.cli.connection import PANEL
from lorimer.cli.failures import EXIT_CODES
from lorimer.cli.main import SERVICE, TRAINING, TRY, WEIGHTS, app

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"

INTRODUCTION = """# The command line

This page is generated from the commands; `lorimer COMMAND --help` shows the same. `lorimer --install-completion`
teaches your shell to complete them.

## Which server

Commands that ask a server find it in this order:

1. `--base-url URL` (also `--url`), the address of a server;
2. `--data DIR`, the data directory of one;
3. `LORIMER_BASE_URL`, or `TINKER_BASE_URL`;
4. the data directory of the settings (`LORIMER_DATA`, or the user's own).

With a data directory, the server that runs on it is asked, at whatever address it has. If none runs, the command is
the server for as long as it takes; no model is loaded for that. The key is `--api-key`, `LORIMER_API_KEY`,
`TINKER_API_KEY` or what `tinker auth login` stored; a server without keys needs none.

## Output

Tables are for people: they fit the terminal and say how long ago things were. `-f json` (`--format json`) is for
programs: one JSON document on stdout and nothing else there, times in ISO 8601, sizes in bytes. Names in it stay; new
ones may come. Everything else, such as notes, questions, progress and errors, goes to stderr.
An error is one line; with `LORIMER_DEBUG=1` it is a traceback.
"""


def cli_page() -> str:
    """The page, as Markdown."""
    codes = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())
    parts = [INTRODUCTION, f"## Exit codes\n\n| code | meaning |\n|---|---|\n{codes}\n| 130 | Ctrl-C |\n"]
    root: Any = typer.main.get_command(app)
    for panel in (TRY, TRAINING, WEIGHTS, SERVICE):
        parts.append(f"## {panel}\n")
        for name, command in root.commands.items():
            if command.rich_help_panel == panel:
                parts += [section(path, leaf) for path, leaf in leaves(command, f"lorimer {name}")]
    return "\n".join(parts)


def leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something, with the words that call it."""
    inner: dict[str, Any] | None = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name, one in inner.items():
        if not one.hidden:
            yield from leaves(one, f"{path} {name}")


def section(path: str, command: Any) -> str:
    own = [param for param in command.params if is_own(param)]
    asks = any(getattr(param, "rich_help_panel", None) == PANEL for param in command.params)
    arguments = " ".join(argument_text(param) for param in own if param.param_type_name == "argument")
    lines = [f"### `{f'{path} {arguments}'.strip()}`", "", " ".join(command.help.split("\n\n")[0].split())]
    for paragraph in command.help.split("\n\n")[1:]:
        lines += ["", " ".join(paragraph.split())]
    if own:
        lines += ["", "| option | meaning |", "|---|---|", *(f"| {names(param)} | {meaning(param)} |" for param in own)]
    if asks:
        lines += ["", "Takes the options that name the [server](#which-server)."]
    if command.epilog:
        found = [
            line.strip().removeprefix("$ ") for line in command.epilog.splitlines() if line.strip().startswith("$")
        ]
        lines += ["", "```sh", *found, "```"]
    return "\n".join(lines) + "\n"


def is_own(param: Any) -> bool:
    """Not one of those that the page describes once."""
    return not (
        getattr(param, "hidden", False)
        or getattr(param, "rich_help_panel", None) == PANEL
        or "--help" in param.opts
        or "--format" in param.opts
    )


def argument_text(param: Any) -> str:
    name = (param.metavar or param.name).upper().removesuffix("...") + ("..." if param.nargs == -1 else "")
    return name if param.required else f"[{name}]"


def names(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{argument_text(param)}`".replace("|", "\\|")
    given = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    return (given + (f" `{param.metavar}`" if param.metavar else "")).replace("|", "\\|")


def meaning(param: Any) -> str:
    text = (param.help or "").replace("|", "\\|")
    default = param.default.value if isinstance(param.default, Enum) else param.default
    is_flag = isinstance(default, bool)
    shown = default is not None and not is_flag and not callable(default) and str(default) not in ("", ".")
    return text + (f" Default: `{default}`." if shown else "")


if __name__ == "__main__":
    if sys.argv[1:]:
        raise SystemExit("usage: python tools/cli_page.py")
    PAGE.write_text(cli_page(), "utf-8")
