"""The progress of a run on the console: a live bar and table on a terminal, one line for each step elsewhere."""

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from lorimer.cookbook.logs import Metrics, Sink

MAX_IN_LINE = 8
MAX_IN_TABLE = 24


def open_console(total_steps: int | None, resume_step: int = 0) -> "Sink":
    from rich.console import Console

    console = Console(emoji=False)
    if console.is_terminal:
        return LiveConsole(console, total_steps, resume_step)
    return LineConsole(console, total_steps)


def say(text: str) -> None:
    """Print a line as it stands; above a live display, if there is one."""
    from rich.console import Console

    Console(emoji=False).print(text, markup=False, highlight=False, soft_wrap=True)


def format_metric(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class LineConsole:
    """The first metrics of each step, as loops give them in order of their importance.

    What is measured after the last step has the number of the step that would follow.
    """

    def __init__(self, console: Any, total_steps: int | None) -> None:
        self._console, self._total = console, total_steps

    def log(self, metrics: "Metrics", step: int) -> None:
        shown = list(metrics.items())[:MAX_IN_LINE]
        values = "  ".join(f"{name} {format_metric(value)}" for name, value in shown)
        total = f"/{self._total}" if self._total else ""
        begin = "end" if step == self._total else f"step {step + 1}{total}"
        self._console.print(f"{begin}  {values}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass


class LiveConsole:
    """A bar with the time that is left and tokens per second (from ``num_tokens``), above a table of metrics."""

    def __init__(self, console: Any, total_steps: int | None, resume_step: int) -> None:
        from rich.live import Live
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
            console=console,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=resume_step, speed="")
        self._total, self._num_tokens, self._begun = total_steps, 0, time.monotonic()
        self._live = Live(self._progress, console=console, refresh_per_second=4)
        self._live.start()

    def log(self, metrics: "Metrics", step: int) -> None:
        from rich.console import Group

        self._num_tokens += int(metrics.get("num_tokens", 0))
        seconds = time.monotonic() - self._begun
        speed = f"{self._num_tokens / seconds:.0f} tokens/s" if self._num_tokens and seconds else ""
        self._progress.update(self._task, completed=min(step + 1, self._total or step + 1), speed=speed)
        self._live.update(Group(self._progress, _table(metrics)))

    def close(self) -> None:
        self._live.stop()


def _table(metrics: "Metrics") -> "Table":
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name, value in list(metrics.items())[:MAX_IN_TABLE]:
        table.add_row(name, format_metric(value))
    return table
