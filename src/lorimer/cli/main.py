"""``lorimer``: the commands, their flags and exit codes.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 another server has the data directory.
"""

import sys
from typing import Annotated

import typer

from lorimer.cli import key
from lorimer.cli.failures import exit_on_error
from lorimer.cli.output import Format, FormatOption, print_json
from lorimer.cli.settings import ConfigOption, DatabaseOption, DataOption, SetOption, effective_settings

app = typer.Typer(
    name="lorimer",
    help="An open training API that you run yourself, speaking the Tinker protocol.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(key.app, name="key")


@app.command()
def version(output: FormatOption = Format.table) -> None:
    """Print the version."""
    from lorimer import __version__

    if output is Format.json:
        print_json({"version": __version__})
    else:
        print(__version__)


@app.command()
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="Base model: a name, a directory or a .gguf file; NAME=SOURCE renames it."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; others than loopback need keys.")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="Port; 0 takes a free one.")] = None,
    data: DataOption = None,
    database: DatabaseOption = None,
    dtype: Annotated[str | None, typer.Option(help="Precision of the base: auto, float32 or bfloat16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or mps.")] = None,
    eager: Annotated[bool | None, typer.Option("--eager/--lazy", help="Load models at start, or on first use.")] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, pretty or json.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> None:
    """Serve base models over HTTP until Ctrl-C."""
    flags = {
        "models": tuple(model) if model else None,
        "host": host,
        "port": port,
        "data": data,
        "database": database,
        "dtype": dtype,
        "device": device,
        "start_engines": None if eager is None else "eager" if eager else "lazy",
        "log_format": log_format,
        "log_level": log_level,
    }
    with exit_on_error():
        effective = effective_settings(flags, config, set_)

        import asyncio

        from rich.console import Console

        from lorimer.server.banner import Banner
        from lorimer.server.logs import configure_logs
        from lorimer.server.serve import serve as serve_until_stopped

        settings = effective.settings
        configure_logs(settings.log_format, settings.log_level)
        asyncio.run(serve_until_stopped(settings, Banner(Console(file=sys.stdout))))


@app.command()
def config(
    file: ConfigOption = None,
    data: DataOption = None,
    database: DatabaseOption = None,
    set_: SetOption = None,
    output: FormatOption = Format.table,
) -> None:
    """Print the effective configuration as TOML, and where each value comes from."""
    with exit_on_error():
        effective = effective_settings({"data": data, "database": database}, file, set_)

        from lorimer.server.sources import as_toml, plain

        if output is Format.json:
            values = plain(effective.settings)
            print_json({name: {"value": values[name], "from": effective.origins[name]} for name in values})
        else:
            print(as_toml(effective), end="")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
