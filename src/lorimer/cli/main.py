"""``lorimer``: the commands, their flags and exit codes (``failures.py`` has them).

Modules of commands load what they work with when they run, so that ``lorimer --help`` and completion are quick.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorimer.cli import (
    backup,
    bench,
    chat,
    checkpoint,
    cluster,
    data,
    demo,
    doctor,
    evaluate,
    export,
    key,
    model,
    plot,
    recipe,
    replica,
    rollouts,
    session,
    train,
    trainings,
    usage,
)
from lorimer.cli.commands import ServerOptions, cli_command
from lorimer.cli.connection import PROBE_SECONDS, find_server
from lorimer.cli.failures import NoServer, sentence
from lorimer.cli.output import Format, FormatOption, examples, note, print_json
from lorimer.cli.settings import ConfigOption, DatabaseOption, DataOption, SetOption, effective_settings
from lorimer.errors import InvalidInput, LorimerError, ModelNotFound, ModelRefused, StorageError

if TYPE_CHECKING:
    from lorimer.server.settings import Settings

TRY, TRAINING, WEIGHTS, SERVICE = "Try it", "Training", "Runs and weights", "The service"

app = typer.Typer(
    name="lorimer",
    help="An open training API that you run yourself, speaking the Tinker protocol.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Commands find their server by --base-url, LORIMER_BASE_URL, or the data directory (--data); "
    "`lorimer COMMAND --help` has examples. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 data directory in use, "
    "4 not there or not allowed, 5 no server.",
)
app.command(rich_help_panel=TRY, epilog=examples("lorimer demo", "lorimer demo --steps 60 --log-dir ./demo"))(demo.demo)
app.command(
    rich_help_panel=TRY,
    epilog=examples(
        "lorimer chat",
        "lorimer chat tinker://RUN/sampler_weights/final --system 'Answer in verse.'",
        "lorimer chat lorimer/tiny --once 'What is 2 + 2?' --temperature 0",
    ),
)(chat.chat)
app.command(rich_help_panel=TRY, epilog=bench.EPILOG)(bench.bench)
app.add_typer(train.app, name="train", rich_help_panel=TRAINING)
app.add_typer(trainings.app, name="training", rich_help_panel=TRAINING)
app.add_typer(data.app, name="data", rich_help_panel=TRAINING)
app.add_typer(recipe.app, name="recipe", rich_help_panel=TRAINING)
app.add_typer(rollouts.app, name="run", rich_help_panel=WEIGHTS)
app.add_typer(checkpoint.app, name="checkpoint", rich_help_panel=WEIGHTS)
app.add_typer(evaluate.app, name="eval", rich_help_panel=WEIGHTS)
app.add_typer(session.app, name="session", rich_help_panel=WEIGHTS)
app.command(
    rich_help_panel=WEIGHTS,
    epilog=examples("lorimer usage", "lorimer usage --from 30d --by day", "lorimer usage --from 2026-01-01 -f json"),
)(usage.usage)
app.command(rich_help_panel=WEIGHTS, epilog=export.EPILOG)(export.export)
app.command(
    rich_help_panel=WEIGHTS,
    epilog=examples("lorimer plot ./demo", "lorimer plot run-a run-b --metric 'test/*' -o ./curves"),
)(plot.plot)


@app.command(
    rich_help_panel=SERVICE,
    epilog=examples(
        "lorimer serve",
        "lorimer serve --model ./my-model --port 9000",
        "lorimer serve --model Qwen/Qwen3-8B=smollm2-135m-instruct   # answer to the name that a script asks for",
        "lorimer serve --model Qwen/Qwen3-8B,quantize=int8",
        "lorimer serve --host 0.0.0.0 --set durability=power",
    ),
)
@cli_command
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="Base model: a name, directory or .gguf file; NAME=SOURCE renames it; ,quantize=nf4 quantises it.",
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; others than loopback need keys.")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="Port; 0 takes a free one.")] = None,
    data: DataOption = None,
    database: DatabaseOption = None,
    dtype: Annotated[str | None, typer.Option(help="Precision of the base: auto, float32 or bfloat16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or mps.")] = None,
    eager: Annotated[bool | None, typer.Option("--eager/--lazy", help="Load models at start, or on first use.")] = None,
    role: Annotated[str | None, typer.Option(help="all, or api: serve only, and leave computing to workers.")] = None,
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
        "role": role,
        "log_format": log_format,
        "log_level": log_level,
    }
    effective = effective_settings(flags, config, set_)

    settings = effective.settings
    if settings.role == "worker":
        raise InvalidInput("role is 'worker'; start it with `lorimer worker`")
    if settings.role == "all" and settings.cluster != "none":
        raise InvalidInput(f"cluster is {settings.cluster!r}; serve with --role api, and leave computing to workers")
    if settings.role == "all":
        check_models(settings)
    else:
        check_postgres_driver()

    from rich.console import Console

    from lorimer.server.banner import Banner
    from lorimer.server.log_format import configure_logs
    from lorimer.server.serve import run

    configure_logs(settings.log_format, settings.log_level)
    run(settings, Banner(Console(file=sys.stdout, emoji=False)))


@app.command(
    rich_help_panel=SERVICE,
    epilog=examples(
        "lorimer worker --database postgresql://lorimer@db/lorimer",
        "lorimer worker --config cluster.toml --set worker_replicas=2",
    ),
)
@cli_command
def worker(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="Base model: a name, directory or .gguf file; NAME=SOURCE renames it; ,quantize=nf4 quantises it.",
        ),
    ] = None,
    data: DataOption = None,
    database: DatabaseOption = None,
    replicas: Annotated[int | None, typer.Option(help="Most replicas to compute; 0 takes all that are free.")] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, pretty or json.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> None:
    """Compute base models for API replicas (`lorimer serve --role api`) over one PostgreSQL database, until Ctrl-C."""
    flags = {
        "role": "worker",
        "models": tuple(model) if model else None,
        "data": data,
        "database": database,
        "worker_replicas": replicas,
        "log_format": log_format,
        "log_level": log_level,
    }
    settings = effective_settings(flags, config, set_).settings
    check_postgres_driver()
    check_models(settings)

    from lorimer.server.log_format import configure_logs
    from lorimer.server.worker_process import run_worker

    def announce(owner_id: str) -> None:
        note(f"lorimer: worker {owner_id[:8]} is ready for replicas of {', '.join(settings.engine_configs())}")

    configure_logs(settings.log_format, settings.log_level)
    run_worker(settings, announce)


def check_postgres_driver() -> None:
    from importlib.util import find_spec

    if find_spec("psycopg") is None:
        raise InvalidInput('the PostgreSQL driver is missing; install it with `pip install "lorimer[server,postgres]"`')


def check_models(settings: "Settings") -> None:
    """Refuse to start with models that cannot be served. What only their weights show is left to the engine."""
    from lorimer.models.sources import check_available
    from lorimer.server.vllm_check import check_vllm

    for name, config in settings.engine_configs().items():
        try:
            check_available(config.model, progress=lambda text, _: note(f"lorimer: {text}"))
        except (InvalidInput, ModelNotFound, ModelRefused) as error:
            raise ModelRefused(f"model {name!r} cannot be served: {error}") from error
    check_vllm(settings)


app.add_typer(key.app, name="key", rich_help_panel=SERVICE)
app.add_typer(model.app, name="model", rich_help_panel=SERVICE)
app.add_typer(replica.app, name="replica", rich_help_panel=SERVICE)
app.add_typer(cluster.app, name="cluster", rich_help_panel=SERVICE)
app.command(rich_help_panel=SERVICE, epilog=backup.BACKUP_EPILOG)(backup.backup)
app.command(rich_help_panel=SERVICE, epilog=backup.RESTORE_EPILOG)(backup.restore)
app.command(rich_help_panel=SERVICE, epilog=doctor.EPILOG)(doctor.doctor)


@app.command(
    rich_help_panel=SERVICE, epilog=examples("lorimer config > lorimer.toml", "lorimer config --set port=9000")
)
@cli_command
def config(
    file: ConfigOption = None,
    data: DataOption = None,
    database: DatabaseOption = None,
    set_: SetOption = None,
    output: FormatOption = Format.table,
) -> None:
    """Print the effective configuration as TOML, and where each value comes from."""
    effective = effective_settings({"data": data, "database": database}, file, set_)

    from lorimer.server.setting_sources import as_toml, plain

    if output is Format.json:
        values = plain(effective.settings)
        print_json({name: {"value": values[name], "from": effective.origins[name]} for name in values})
    else:
        print(as_toml(effective), end="")


@app.command(rich_help_panel=SERVICE, epilog=examples("lorimer version", "lorimer version -f json"))
@cli_command
def version(
    *,
    options: ServerOptions,
) -> None:
    """Print the version, and that of the server if one can be reached."""
    from lorimer import __version__

    found = server_version(options.base_url, options.api_key, options.data)
    if options.is_json:
        print_json({"version": __version__, "server": found})
    else:
        print(__version__)
        if found:
            print(f"server at {found['url']}: {found['version'] or 'of an unknown version'}")


def server_version(base_url: str | None, api_key: str | None, data: Path | None) -> dict[str, str | None] | None:
    """The address of the server and the version it says it has; none without a server of an address."""
    try:
        url = find_server(base_url, data)
    except (NoServer, StorageError) as error:
        if base_url:
            note(f"lorimer: {sentence(error)}")
        return None
    if url == "local":
        return None
    from lorimer.client.connection import Connection
    from lorimer.client.transport import decoded, succeeded

    connection = Connection(url, api_key)
    try:
        asked = connection.run(connection.transport.send("GET", "/openapi.json", timeout=PROBE_SECONDS))
        described = decoded(succeeded(asked.result()))
    except LorimerError as error:
        note(f"lorimer: {sentence(error)}")
        described = None
    info = described.get("info") if isinstance(described, dict) else None
    return {"url": url, "version": str(info.get("version")) if isinstance(info, dict) else None}


def main() -> None:
    app()


if __name__ == "__main__":
    main()
