"""``lorimer demo``: the recipe of that name, with the flags people change."""

from pathlib import Path
from typing import Annotated

import typer

from lorimer.cli.failures import exit_on_error


def demo(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Base model: a name, a directory or a .gguf file.")
    ] = "lorimer/tiny",
    base_url: Annotated[
        str | None, typer.Option("--base-url", help="A server; without one it runs in this process.")
    ] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Where the runs are kept; a new directory if not given.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of reinforcement learning.")] = 40,
    seed: Annotated[int, typer.Option(help="Of every random choice.")] = 0,
) -> None:
    """Watch a model learn to add: supervised, then by reinforcement learning, in less than three minutes."""
    with exit_on_error():
        from lorimer.recipes.demo import main

        main(model=model, base_url=base_url, log_dir=log_dir, rl_steps=steps, seed=seed)
