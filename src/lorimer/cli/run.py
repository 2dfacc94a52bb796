"""``lorimer run``: the training runs of a server."""

import json
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
from lorimer.errors import InvalidInput

if TYPE_CHECKING:
    from lorimer.client.rest import RestClient
    from lorimer.types import Checkpoint, TrainingRun
    from lorimer.types.metrics import MetricSeries
    from lorimer.types.runs import MetricSummary, Run, RunPart

app = typer.Typer(help="Look at runs, name and tag them, archive and delete them.", no_args_is_help=True)

RUNS_PER_PAGE = 100
RUN_COLUMNS: list[str | Column] = [
    "run",
    Column("id", whole=True),
    "status",
    Column("steps", justify="right"),
    "base model",
    "last request",
    "tags",
]
SUMMARY_COLUMNS: list[str | Column] = [
    Column("metric", whole=True),
    *(Column(title, justify="right") for title in ("last", "smallest", "largest")),
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

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Id or name of the run, or the path of one of its checkpoints.")
]
LimitOption = Annotated[int, typer.Option("--limit", "-n", min=0, help="How many at most; 0 is all.")]


@app.command(
    name="list",
    epilog=examples(
        "lorimer run list",
        "lorimer run list status=failed 'config.rank>8' kettle",
        "lorimer run list tag=sweep --sort min.test/nll --show config.learning_rate --show min.test/nll",
        "lorimer run list -f json | jq -r '.runs[].run_id'",
    ),
)
@cli_command
def list_(
    query: Annotated[
        list[str] | None,
        typer.Argument(help="Words of the run, and conditions such as status=failed or config.rank>8."),
    ] = None,
    limit: LimitOption = 20,
    sort: Annotated[str, typer.Option("--sort", help="A field; -FIELD sorts descending.")] = "-created",
    show: Annotated[
        list[str] | None, typer.Option("--show", help="A field for a column: config.X, last.X, min.X, max.X.")
    ] = None,
    archived: Annotated[str, typer.Option("--archived", help="Archived runs: no, yes or any.")] = "no",
    *,
    options: ServerOptions,
) -> None:
    """List runs, newest first."""
    client = options.rest_client()

    def fetch(limit: int, offset: int) -> tuple[list["Run"], int]:
        chosen: Any = archived
        text = " ".join(query or [])
        page = client.list_runs(text, sort=sort, fields=show, archived=chosen, limit=limit, offset=offset).result()
        return page.runs, page.total_count

    runs, total = collect(fetch, limit, RUNS_PER_PAGE)
    if options.is_json:
        print_json({"runs": [run.model_dump(mode="json") for run in runs], "total_count": total})
        return
    if runs:
        print_table([*RUN_COLUMNS, *(show or [])], [[*row(run), *chosen_values(run, show)] for run in runs])
    note_rest("runs", len(runs), total)


@app.command(epilog=examples("lorimer run show RUN", "lorimer run show 'amber-heron-17'"))
@cli_command
def show(run: RunArgument, *, options: ServerOptions) -> None:
    """Show a run: status, progress, configuration, best and last metrics, lineage and parts."""
    client = options.rest_client()
    found = client.get_run(resolve(client, run)).result()
    if options.is_json:
        print_json(found.model_dump(mode="json"))
        return
    print_facts(
        {
            "run": found.name,
            "id": found.run_id,
            "status": found.status,
            "error": found.error,
            "steps": steps_text(found),
            "duration": duration_text(found.duration_seconds),
            "remaining": duration_text(found.eta_seconds) if found.eta_seconds else None,
            "base model": found.base_model,
            "tags": ", ".join(found.tags),
            "notes": found.notes,
            "started from": found.parent_path,
            "parts": [part_text(part) for part in found.parts] if len(found.parts) > 1 else None,
            "continued by": [f"{child.name} ({child.run_id})" for child in found.children],
            "metadata": metadata_text(found.user_metadata),
            "configuration": [f"{name} = {json.dumps(value)}" for name, value in sorted(found.config.items())],
        }
    )
    if found.metrics:
        typer.echo()
        print_table(SUMMARY_COLUMNS, [summary_row(one) for one in found.metrics])


@app.command(
    epilog=examples(
        "lorimer run info RUN",
        "lorimer run info tinker://RUN/weights/final",
    )
)
@cli_command
def info(
    run: Annotated[str, typer.Argument(help="Id of the training run, or the path of one of its checkpoints.")],
    *,
    options: ServerOptions,
) -> None:
    """Show one training run and its checkpoints; published ones of others too."""
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
            "method": found.method,
            "rank": found.lora_rank,
            "owner": found.model_owner,
            "replica": found.replica,
            "state": state(found),
            "snapshots": size_text(found.snapshot_bytes) if found.snapshot_bytes else None,
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
    run: RunArgument,
    name: Annotated[
        list[str] | None, typer.Option("--name", help="Only metrics called like this; * stands for anything.")
    ] = None,
    *,
    options: ServerOptions,
) -> None:
    """Show what the engine measured in a run and what its programs reported; JSON has every point."""
    client = options.rest_client()
    found = client.get_run_metrics(resolve(client, run)).result()
    series = [one for one in found.series if name is None or any(fnmatchcase(one.name, like) for like in name)]
    if options.is_json:
        shown = [one.model_dump(mode="json", exclude_defaults=True) for one in series]
        print_json({"series": shown})
        return
    if series:
        print_table(METRIC_COLUMNS, [metric_row(one) for one in series])
    else:
        note("no metrics")


def run_id_of(text: str) -> str:
    """The id in the path of a checkpoint, or the text itself."""
    return text.removeprefix("tinker://").partition("/")[0]


def row(run: "Run") -> list[object]:
    return [
        run.name,
        run.run_id,
        run.status,
        steps_text(run),
        run.base_model,
        ago(run.last_request_time),
        ", ".join(run.tags),
    ]


def chosen_values(run: "Run", names: list[str] | None) -> list[object]:
    values = run.values or {}
    found = [values.get(name) for name in names or []]
    return ["" if value is None else f"{value:.4g}" if isinstance(value, float) else value for value in found]


def steps_text(run: "Run") -> str:
    if run.steps_done is None:
        return "" if run.num_steps is None else f"0 of {run.num_steps}"
    return f"{run.steps_done}" if run.num_steps is None else f"{run.steps_done} of {run.num_steps}"


def duration_text(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {left} s" if minutes else f"{left} s"


def part_text(part: "RunPart") -> str:
    origin = f", from {part.loaded_from}" if part.loaded_from else ""
    return f"{part.training_run_id}, {ago(part.created_at)}{origin}"


def summary_row(one: "MetricSummary") -> list[object]:
    pairs = [(one.last, one.last_step), (one.min, one.min_step), (one.max, one.max_step)]
    return [one.name, *("" if value is None else f"{value:.4g} at {step}" for value, step in pairs)]


def resolve(client: "RestClient", text: str) -> str:
    """Return the id of a run by its id, the path of a checkpoint, or its name if only one run has it."""
    if ":train:" in text:
        return run_id_of(text)
    quoted = text.replace('"', "")
    found = client.list_runs(f'name="{quoted}"', archived="any", limit=2).result()
    if found.total_count == 1:
        return found.runs[0].run_id
    problem = f"{found.total_count} runs are" if found.total_count else "no run is"
    raise InvalidInput(f"{problem} called {text!r}; the id of a run, or a name that one run has, is accepted")


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
