"""What the command line and the recipes share at a terminal: errors become one line on stderr and an exit code, and
commands are printed so that they work as printed.

A traceback would be a fault of ours; ``LORIMER_DEBUG=1`` shows it nevertheless.
"""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import typer

from lorimer.errors import (
    Forbidden,
    Gone,
    InUse,
    InvalidInput,
    LorimerError,
    ModelNotFound,
    NoServer,
    NotFound,
    Unauthorized,
)

FAILED, USAGE, IN_USE, REFUSED, NO_SERVER = 1, 2, 3, 4, 5
REFUSALS = {401, 403, 404, 410}
WRONG_INPUT = {400, 413, 422}
DEBUG = "LORIMER_DEBUG"
EXPECTED = (LorimerError, OSError, ImportError)


@contextmanager
def exit_on_error(extra: str = "server", also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Print one line for an error that a user can do something about, and exit with its code.

    ``extra`` names what to install where a package is missing. Errors of the types ``also`` are the user's too.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except Exception as raised:
        error = first_of(raised)
        if os.environ.get(DEBUG) or not isinstance(error, (*EXPECTED, *also)) or is_ours(error):
            raise
        typer.echo(f"lorimer: {sentence(error, extra)}", err=True)
        raise typer.Exit(exit_code(error)) from error


def run_recipe(main: Callable[..., None]) -> None:
    """Start a recipe with the options of the command line."""
    recipe_app(main)()


def recipe_app(main: Callable[..., None]) -> typer.Typer:
    """A recipe as a command: what ``typer.run`` makes of it, and errors as commands have them."""

    @wraps(main)
    def guarded(*args: Any, **options: Any) -> None:
        with exit_on_error("server,cookbook", also=(ValueError,)):
            main(*args, **options)

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(guarded)
    return app


def first_of(error: BaseException) -> BaseException:
    """The error itself; of a group, the first one in it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def is_ours(error: BaseException) -> bool:
    """Whether a module of Lorimer is missing, which no user can repair."""
    return isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "lorimer"


def sentence(error: BaseException, extra: str = "server") -> str:
    """What went wrong, in one line; of a server's refusal only what the server says, and what to do about it."""
    body = getattr(error, "body", None)
    detail = body.get("detail") if isinstance(body, dict) else None
    text = detail if isinstance(detail, str) else str(error) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename!r}: {error.strerror}"
    elif isinstance(error, ImportError) and "pip install" not in text:
        text = f"a package is missing ({text}): {installation(extra)}"
    elif (errors := getattr(error, "errors", None)) and hasattr(error, "error_count"):  # pydantic's
        text = "; ".join(f"{'.'.join(map(str, each['loc']))} is {each['input']!r}: {each['msg']}" for each in errors())
    elif isinstance(error, ValueError) and not isinstance(error, LorimerError):
        text += f" ({DEBUG}=1 shows where)"
    if status_of(error) == 401:
        text += "; give a key with --api-key or LORIMER_API_KEY (`lorimer key create NAME` makes one)"
    return " ".join(line.strip() for line in text.splitlines())


def installation(extra: str) -> str:
    """Return the command that installs an extra; in an environment of uvx or ``pipx run``, the one to run instead."""
    place, wanted, again = Path(sys.prefix), f'"{wheel() or "lorimer"}[{extra}]"', shlex.join(sys.argv[1:])
    if "archive-v0" in place.parts:
        return f"uvx --torch-backend auto --from {wanted} lorimer {again}"
    if place.parent.name == "pipx":
        return f"pipx run --spec {wanted} lorimer {again}"
    if place.parts[-3:-1] == ("uv", "tools"):
        return f"uv tool install --torch-backend auto {wanted}"
    if place.parts[-3:-1] == ("pipx", "venvs"):
        return f"pipx install --force {wanted}"
    return f'pip install "lorimer[{extra}]"'


def wheel() -> str | None:
    """Return the path of the wheel that Lorimer was installed from, if it was a file."""
    text = metadata.distribution("lorimer").read_text("direct_url.json")
    url = json.loads(text).get("url", "") if text else ""
    return unquote(urlsplit(url).path) if url.startswith("file:") and url.endswith(".whl") else None


def exit_code(error: BaseException) -> int:
    if isinstance(error, InUse) or isinstance(error.__cause__, InUse):
        return IN_USE
    if isinstance(error, NoServer):
        return NO_SERVER
    refusals = (NotFound, Unauthorized, Forbidden, Gone, ModelNotFound)
    if isinstance(error, refusals) or status_of(error) in REFUSALS:
        return REFUSED
    return USAGE if isinstance(error, InvalidInput | ValueError) or status_of(error) in WRONG_INPUT else FAILED


def status_of(error: BaseException) -> int | None:
    """The status with which a server refused."""
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def command(*arguments: str) -> str:
    """A command of ``lorimer`` as the user has to type it here: by its path where the shell would not find it."""
    script = Path(sys.executable).with_name("lorimer")
    found = shutil.which("lorimer")
    if found and script.exists() and os.path.samefile(found, script):
        words = ["lorimer"]
    elif script.exists():
        words = [nearest(script)]
    else:
        words = [nearest(Path(sys.executable)), "-m", "lorimer.cli"]
    return shlex.join([*words, *arguments])


def nearest(path: Path) -> str:
    """The path from the current directory if it lies below it, else the whole path."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
