"""``lorimer run``: the training runs of a server."""

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorimer.cli.commands import ServerOptions, cli_command
from lorimer.cli.connection import collect
from lorimer.cli.moments import ago, moment_text
from lorimer.cli.output import (
    Column,
    examples,
    metadata_text,
    note,
    print_facts,
    print_json,
    print_table,
    size_text,
)

if TYPE_CHECKING:
    from lorimer.types import Checkpoint, TrainingRun
    from lorimer.types.metrics import MetricSeries

app = typer.Typer(help="Look at training runs.", no_args_is_help=True)

RUNS_PER_PAGE = 100
RUN_COLUMNS: list[str | Column] = [
    Column("run", whole=True),
    "base model",
    "rank",
    "last request",
    "last checkpoint",
    "replica",
    "state",
]
CHECKPOINT_COLUMNS: list[str | Column] = [
    Column("path", whole=True),
    "type",
    Column("size", justify="right"),
    "saved",
    "expires",
    "published",
]

METRIC_COLUMNS: list[str | Column] = [
    Column("metric", whole=True),
    "of",
    *(Column(title, justify="right") for title in ("points", "last step", "first", "last", "least", "most")),
]

LimitOption = Annotated[int, typer.Option("--limit", "-n", min=0, help="How many at most; 0 is all.")]


@app.command(
    name="list",
    epilog=examples(
        "lorimer run list",
        "lorimer run list --limit 0 --accessible",
        "lorimer run list -f json | jq -r '.runs[].training_run_id'",
    ),
)
@cli_command
def list_(
    limit: LimitOption = 20,
    accessible: Annotated[
        bool, typer.Option("--accessible", help="Also runs of others that have a published checkpoint.")
    ] = False,
    project: Annotated[str | None, typer.Option("--project", help="Only runs of this project.")] = None,
    *,
    options: ServerOptions,
) -> None:
    """List training runs, newest first."""
    client = options.rest_client()

    def fetch(limit: int, offset: int) -> tuple[list["TrainingRun"], int]:
        scope: Any = "accessible" if accessible else "owned"
        page = client.list_training_runs(limit, offset, scope, project).result()
        return page.training_runs, page.cursor.total_count

    runs, total = collect(fetch, limit, RUNS_PER_PAGE)
    if options.is_json:
        print_json({"runs": [run.model_dump(mode="json") for run in runs], "total_count": total})
        return
    if runs:
        print_table(RUN_COLUMNS, [row(run) for run in runs])
    note_rest("runs", len(runs), total)


@app.command(
    epilog=examples(
        "lorimer run info RUN",
        "lorimer run info tinker://RUN/weights/final",
    )
)
@cli_command
def info(
    run: Annotated[str, typer.Argument(help="Id of the run, or the path of one of its checkpoints.")],
    *,
    options: ServerOptions,
) -> None:
    """Show one training run and its checkpoints."""
    client = options.rest_client()
    run_id = run_id_of(run)
    found = client.get_training_run(run_id, "accessible").result()
    checkpoints = client.list_checkpoints(run_id).result().checkpoints
    if options.is_json:
        listed = [checkpoint.model_dump(mode="json") for checkpoint in checkpoints]
        print_json(found.model_dump(mode="json") | {"checkpoints": listed})
        return
    print_facts(
        {
            "run": found.training_run_id,
            "base model": found.base_model,
            "rank": found.lora_rank,
            "owner": found.model_owner,
            "replica": found.replica,
            "state": state(found),
            "last request": moment_text(found.last_request_time),
            "metadata": metadata_text(found.user_metadata),
        }
    )
    if checkpoints:
        typer.echo()
        print_table(CHECKPOINT_COLUMNS, [checkpoint_row(checkpoint) for checkpoint in checkpoints])


@app.command(
    epilog=examples(
        "lorimer run metrics RUN",
        "lorimer run metrics RUN --name 'loss*' --name reward",
        "lorimer run metrics RUN -f json | jq '.series[] | select(.name == \"loss:sum\").points'",
    )
)
@cli_command
def metrics(
    run: Annotated[str, typer.Argument(help="Id of the run, or the path of one of its checkpoints.")],
    name: Annotated[
        list[str] | None, typer.Option("--name", help="Only metrics called like this; * stands for anything.")
    ] = None,
    *,
    options: ServerOptions,
) -> None:
    """Show what the engine measured in a run and what its programs reported; JSON has every point."""
    found = options.rest_client().get_metrics(run_id_of(run)).result()
    series = [one for one in found.series if name is None or any(fnmatchcase(one.name, like) for like in name)]
    if options.is_json:
        shown = [one.model_dump(mode="json", exclude_defaults=True) for one in series]
        print_json({"series": shown, "cursor": found.cursor})
        return
    if series:
        print_table(METRIC_COLUMNS, [metric_row(one) for one in series])
    else:
        note("no metrics")


def run_id_of(text: str) -> str:
    """The id in the path of a checkpoint, or the text itself."""
    return text.removeprefix("tinker://").partition("/")[0]


def row(run: "TrainingRun") -> list[object]:
    newest = max(
        filter(None, (run.last_checkpoint, run.last_sampler_checkpoint)), key=lambda one: one.time, default=None
    )
    saved = f"{newest.checkpoint_id} ({ago(newest.time)})" if newest else ""
    return [
        run.training_run_id,
        run.base_model,
        run.lora_rank or "",
        ago(run.last_request_time),
        saved,
        replica_number(run),
        state(run),
    ]


def replica_number(run: "TrainingRun") -> str:
    """The replica without the base model, which has a column of its own."""
    return (run.replica or "").removeprefix(run.base_model)


def state(run: "TrainingRun") -> str:
    return "corrupted" if run.corrupted else "ok"


def checkpoint_row(checkpoint: "Checkpoint") -> list[object]:
    return [
        checkpoint.tinker_path,
        checkpoint.checkpoint_type,
        size_text(checkpoint.size_bytes),
        ago(checkpoint.time),
        ago(checkpoint.expires_at) or "never",
        "yes" if checkpoint.public else "",
    ]


def metric_row(series: "MetricSeries") -> list[object]:
    """The values that are finite, in short."""
    values = [value for _, _, value in series.points if value is not None]
    edges = [values[0], values[-1], min(values), max(values)] if values else []
    shown = [f"{value:.4g}" for value in edges] or [""] * 4
    return [series.name, series.source, len(series.points), series.points[-1][0], *shown]


def note_rest(what: str, shown: int, total: int) -> None:
    """Say on stderr what a table left out."""
    if not total:
        note(f"no {what}")
    elif shown < total:
        note(f"{shown} of {total} {what}; --limit 0 shows all")
