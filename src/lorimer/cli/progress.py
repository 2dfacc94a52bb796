"""What a long command shows meanwhile, on stderr and only to a terminal: a line of text and a bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, float | None], None]
"""Called with what is being done and the fraction done, None where that is not known."""


@contextmanager
def progress_bar() -> Iterator[Report]:
    """The bar goes away with the block."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from lorimer.cli.output import printable

    console = Console(stderr=True, emoji=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("starting", total=None)

        def report(text: str, fraction: float | None) -> None:
            total = None if fraction is None else 1.0
            bars.update(task, description=printable(text), completed=fraction or 0.0, total=total)

        yield report
