"""``lorimer training``: trainings in processes of the server, as the console starts them; ``train`` runs one here."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorimer.cli.commands import ServerOptions, cli_command
from lorimer.cli.connection import collect
from lorimer.cli.moments import ago
from lorimer.cli.output import Column, examples, print_facts, print_json, print_table
from lorimer.cli.run import LimitOption, note_rest
from lorimer.errors import InvalidInput

if TYPE_CHECKING:
    from lorimer.types.trainings import Training

app = typer.Typer(help="Start and follow trainings in processes of the server.", no_args_is_help=True)

PER_PAGE = 100
IdArgument = Annotated[str, typer.Argument(metavar="TRAINING", help="Id of the training.")]
COLUMNS: list[str | Column] = [
    Column("id", whole=True),
    "kind",
    "model",
    "state",
    "started",
    Column("run", whole=True),
    "error",
]


@app.command(
    epilog=examples(
        "lorimer training start sft --config run.yaml --rows chats.jsonl",
        "lorimer training start rl --set base_model=lorimer/tiny --set task=arithmetic --set max_tokens=8",
        "lorimer training start recipe:arithmetic_rl --set base_model=lorimer/tiny --set steps=20",
    )
)
@partial(cli_command, extra="server,cookbook")
def start(
    kind: Annotated[str, typer.Argument(help="sft, full, rl, dpo, distill, or recipe:NAME.")],
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML or TOML file with settings.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting; repeatable.")
    ] = None,
    rows: Annotated[
        Path | None, typer.Option("--rows", metavar="FILE", help="JSONL file to train on, which is sent along.")
    ] = None,
    held_out: Annotated[Path | None, typer.Option(metavar="FILE", help="JSONL file to measure with, likewise.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count and measure; train two steps only.")] = False,
    *,
    options: ServerOptions,
) -> None:
    """Start a training on the server, where its operator allows that; data are sent, as it reads no files."""
    from lorimer.cookbook.train.config_file import merged, read_pairs, read_settings_file

    settings = merged(read_settings_file(config) if config else {}, read_pairs(set_ or []))
    made = (
        options.rest_client()
        .start_training(
            kind,
            settings,
            data=_text(rows),
            held_out_data=_text(held_out),
            dry_run=dry_run,
        )
        .result()
    )
    show_one(made, options)


def _text(path: Path | None) -> str | None:
    try:
        return None if path is None else path.expanduser().read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{str(path)!r} is not UTF-8: {error}") from None


@app.command(name="list", epilog=examples("lorimer training list", "lorimer training list -f json"))
@cli_command
def list_(limit: LimitOption = 20, *, options: ServerOptions) -> None:
    """List trainings, newest first."""
    client = options.rest_client()

    def fetch(limit: int, offset: int) -> tuple[list["Training"], int]:
        page = client.list_trainings(limit=limit, offset=offset).result()
        return page.trainings, page.total_count

    found, total = collect(fetch, limit, PER_PAGE)
    if options.is_json:
        print_json({"trainings": [one.model_dump(mode="json") for one in found], "total_count": total})
        return
    if found:
        print_table(COLUMNS, [_row(one) for one in found])
    note_rest("trainings", len(found), total)


def _row(one: "Training") -> list[object]:
    kind = f"{one.kind} (dry run)" if one.dry_run else one.kind
    return [
        one.training_id,
        kind,
        one.base_model,
        one.state,
        ago(one.started_at),
        one.run_name or one.run_id or "",
        one.error or "",
    ]


@app.command(epilog=examples("lorimer training show TRAINING", "lorimer training show TRAINING -f json | jq .result"))
@cli_command
def show(training: IdArgument, *, options: ServerOptions) -> None:
    """Show a training and the end of its output."""
    found = options.rest_client().get_training(training).result()
    show_one(found, options)
    if not options.is_json:
        print(f"\n{found.output}", end="")


def show_one(found: "Training", options: ServerOptions) -> None:
    if options.is_json:
        print_json(found.model_dump(mode="json"))
        return
    facts: dict[str, Any] = dict(
        zip((one.title if isinstance(one, Column) else one for one in COLUMNS), _row(found), strict=True)
    )
    result = found.result or {}
    kept = ("num_examples", "num_steps", "num_tokens", "seconds", "state_path", "sampler_path")
    print_facts(facts | {name: result[name] for name in kept if name in result})


@app.command(epilog=examples("lorimer training stop TRAINING"))
@cli_command
def stop(training: IdArgument, *, options: ServerOptions) -> None:
    """Stop a training so that it can be resumed."""
    show_one(options.rest_client().stop_training(training).result(), options)


@app.command(epilog=examples("lorimer training resume TRAINING"))
@cli_command
def resume(training: IdArgument, *, options: ServerOptions) -> None:
    """Resume a training that was stopped, interrupted or has failed, at its last checkpoint."""
    show_one(options.rest_client().resume_training(training).result(), options)


@app.command(epilog=examples("lorimer training delete TRAINING"))
@cli_command
def delete(training: IdArgument, *, options: ServerOptions) -> None:
    """Delete a training that does not run, with its data and output; its run and checkpoints stay."""
    options.rest_client().delete_training(training).result()
    if not options.is_json:
        print(f"deleted {training}")
