"""``lorimer plot``: curves of runs from their log directories."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lorimer.cli.commands import cli_command
from lorimer.cli.output import Format, FormatOption, print_json


@partial(cli_command, extra="cookbook")
def plot(
    directories: Annotated[list[Path], typer.Argument(help="Log directories; several are drawn in the same charts.")],
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", "-m", help="A metric, or a pattern such as 'test/*'; repeatable."),
    ] = None,
    smooth: Annotated[float, typer.Option(help="Smoothing from 0 (none) to almost 1.")] = 0.0,
    output_directory: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write; the first log directory if not given.")
    ] = None,
    title: Annotated[str, typer.Option(help="A heading for the page and the picture.")] = "",
    output: FormatOption = Format.table,
) -> None:
    """Draw the curves of one or more runs: curves.png, and curves.html for a browser."""
    from lorimer.cookbook.plots import draw_png, read_charts, write_html

    charts = read_charts(directories, metric or ())
    target = output_directory or directories[0]
    heading = title or ", ".join(path.resolve().name for path in directories)
    files = [
        write_html(charts, target / "curves.html", smoothing=smooth, title=heading),
        draw_png(charts, target / "curves.png", smoothing=smooth, title=title),
    ]
    if output is Format.json:
        print_json({"files": [str(path) for path in files], "metrics": [chart.metric for chart in charts]})
    else:
        for path in files:
            print(path)
