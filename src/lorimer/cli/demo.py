"""``lorimer demo``: the recipe of that name with the flags people change, and a server whose console one can watch."""

import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Annotated

import typer

from lorimer.cli.failures import exit_on_error
from lorimer.cli.output import note


def demo(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Base model: a name, a directory or a .gguf file.")
    ] = "lorimer/tiny",
    base_url: Annotated[
        str | None, typer.Option("--base-url", help="A server that runs; local is one in this process, without a port.")
    ] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Where the runs are kept; a new directory if not given.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of reinforcement learning.")] = 40,
    seed: Annotated[int, typer.Option(help="Of every random choice.")] = 0,
    stay: Annotated[
        bool | None,
        typer.Option("--stay/--no-stay", help="Keep the console until Ctrl-C; so by default on a terminal."),
    ] = None,
) -> None:
    """Watch a model learn to add: supervised, then by reinforcement learning, in less than three minutes.

    A server of its own runs meanwhile, on a free port of this machine; its address is printed, and its console shows
    the curves as they grow. Kill that server if you like: it is started again, and the run goes on.
    """
    directory = log_dir or Path(tempfile.mkdtemp(prefix="lorimer-demo-"))
    with exit_on_error():
        from lorimer.cli.own_server import own_server
        from lorimer.recipes.demo import main

        def run(address: str | None) -> None:
            main(model=model, base_url=address, log_dir=directory, rl_steps=steps, seed=seed)

        if base_url or os.environ.get("LORIMER_BASE_URL") or os.environ.get("TINKER_BASE_URL"):
            run(base_url)
            return
        with own_server(model, directory / "server.log", note) as address:
            run(address)
            if not (stay or (stay is None and sys.stdin.isatty() and sys.stdout.isatty())):
                print("\nThe console ends here; `lorimer serve` has it again.")
                return
            print("\nThe console stays until Ctrl-C.", flush=True)
            try:
                threading.Event().wait()
            except KeyboardInterrupt:
                print()
