"""``lorimer demo``: the recipe of that name with the flags people change, and a server whose console one can watch.

That is the server which runs on the user's data directory if it has the model, else one of its own: on the same data
directory if it is free, else on one in the demo's directory.
"""

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lorimer.cli.commands import cli_command
from lorimer.cli.connection import find_server, named_server, running_address
from lorimer.cli.output import note
from lorimer.errors import LorimerError
from lorimer.terminal import command

DEFAULT_MODEL = "lorimer/tiny"


@partial(cli_command, extra="server,cookbook")
def demo(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Base model: a name, a directory or a .gguf file.")
    ] = DEFAULT_MODEL,
    base_url: Annotated[
        str | None, typer.Option("--base-url", help="A server that runs; local is one in this process, without a port.")
    ] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Where the runs are kept; a new directory if not given.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of reinforcement learning.", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="Of every random choice.")] = 0,
    stay: Annotated[
        bool | None,
        typer.Option("--stay/--no-stay", help="Keep the console until Ctrl-C; so by default on a terminal."),
    ] = None,
) -> None:
    """Watch a model learn to add: supervised, then by reinforcement learning, in about a minute.

    It uses the server that runs on your data directory, if there is one with the model. Else it starts one of its own
    on a free port of this machine: its address is printed, and its console shows the curves as they grow. Kill that
    server if you like: it is started again, and the run goes on.
    """
    directory = log_dir or Path(tempfile.mkdtemp(prefix="lorimer-demo-"))
    with server_for(model, base_url, directory) as server:
        from rich.console import Console

        from lorimer.recipes.demo import SUPERVISED_STEPS, Demo, show_demo

        learner = Demo(Console(emoji=False), model, directory, seed=seed)
        show_demo(learner, server.url, SUPERVISED_STEPS, steps, server.chat_flags)
        if not server.is_own:
            return
        show_again = command(*server.again)
        if not (stay or (stay is None and sys.stdin.isatty() and sys.stdout.isatty())):
            print(f"\nThis server ends now. See everything again, and talk to it, after: {show_again}", flush=True)
            return
        print(f"\nThe console stays until Ctrl-C. See everything again later with: {show_again}", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print()


@dataclass(frozen=True)
class DemoServer:
    url: str
    """``local`` for the service in this process."""
    is_own: bool = False
    again: tuple[str, ...] = ()
    """The command that serves the same data afterwards."""
    chat_flags: tuple[str, ...] = ()
    """Where ``lorimer chat`` finds it."""


@contextmanager
def server_for(model: str, base_url: str | None, directory: Path) -> Iterator[DemoServer]:
    """The server that is named, or runs and has the model; else one that ends with this block."""
    named = named_server(base_url, None)
    if named is not None:
        found = named if named == "local" else find_server(base_url, None)
        yield DemoServer(found, chat_flags=("--base-url", found) if base_url and found != "local" else ())
        return
    from lorimer.cli.own_server import own_server
    from lorimer.cli.settings import effective_settings

    settings = effective_settings({}, None, None).settings
    data: Path | None = None
    flags: tuple[str, ...] = ("--model", model) if model != DEFAULT_MODEL else ()
    chat_flags: tuple[str, ...] = ()
    try:
        url = running_address(settings.data.expanduser().absolute())
    except LorimerError:  # a program has it, without an address
        url, data = None, directory / "data"
    if url is not None:
        if has_model(url, model):
            note(f"lorimer: using the server at {url}")
            yield DemoServer(url)
            return
        data = directory / "data"
    if data is not None:
        note(f"lorimer: the usual data directory is in use; the demo keeps its own in {data}")
        chat_flags = ("--data", str(data))
        flags = (*chat_flags, *flags)
    note(f"lorimer: starting a server, which loads {model}")
    with own_server(model, directory / "server.log", note, data) as address:
        yield DemoServer(address, is_own=True, again=("serve", *flags), chat_flags=chat_flags)


def has_model(url: str, model: str) -> bool:
    """Whether a server lets this user train the model."""
    from lorimer.cli.model import served_models

    try:
        return model in [one.model_name for one in served_models(url, None)]
    except LorimerError:
        return False
