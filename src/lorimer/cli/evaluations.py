"""``lorimer eval list``, ``show``, ``compare`` and ``delete``: results of evaluations that a server has."""

from concurrent.futures import Future
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from lorimer.cli.commands import ServerOptions, cli_command
from lorimer.cli.connection import collect
from lorimer.cli.moments import ago, moment_text
from lorimer.cli.output import Column, examples, note, print_facts, print_json, print_table
from lorimer.cli.run import LimitOption, note_rest, resolve
from lorimer.cli.selection import change, path_of

if TYPE_CHECKING:
    from lorimer.types.evaluations import Estimate, Evaluation, EvaluationComparison

RUN_COMMAND = "run"
PER_PAGE = 1000
COLUMNS: list[str | Column] = [
    Column("model", whole=True),
    "task",
    "metric",
    Column("value", justify="right"),
    "95 % interval",
    Column("items", justify="right"),
]
COMPARED: list[str | Column] = [
    "task",
    "metric",
    *(Column(title, justify="right") for title in ("A", "B", "B - A")),
    "95 % interval",
    Column("p", justify="right"),
    "verdict",
    Column("items", justify="right"),
    "test",
]
MAX_ITEMS_SHOWN = 20


class EvalGroup(TyperGroup):
    """Takes words that are not a command as those of ``run``: ``lorimer eval CHECKPOINT --on gsm8k``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [RUN_COMMAND, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=EvalGroup,
    help="Evaluate checkpoints on tasks, and compare the results: `lorimer eval CHECKPOINT --on gsm8k`.",
    no_args_is_help=True,
)

ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="Only those of this tinker:// path or base model.")
]
TaskOption = Annotated[str | None, typer.Option("--on", metavar="TASK", help="Only those of this task.")]


@app.command(
    name="list",
    epilog=examples("lorimer eval list", "lorimer eval list --run kettle --on gsm8k", "lorimer eval list -f json"),
)
@cli_command
def list_(
    model: ModelOption = None,
    on: TaskOption = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only those of this run.")] = None,
    limit: LimitOption = 20,
    *,
    options: ServerOptions,
) -> None:
    """List results, newest first."""
    client = options.rest_client()
    run_id = None if run is None else resolve(client, run)

    def fetch(limit: int, offset: int) -> tuple[list["Evaluation"], int]:
        page = client.list_evaluations(model=model, task=on, run_id=run_id, limit=limit, offset=offset).result()
        return page.evaluations, page.total_count

    found, total = collect(fetch, limit, PER_PAGE)
    if options.is_json:
        print_json({"evaluations": [one.model_dump(mode="json") for one in found], "total_count": total})
        return
    if found:
        print_evaluations(found)
    note_rest("evaluations", len(found), total)


@app.command(epilog=examples("lorimer eval show 3f2a…", "lorimer eval show EVALUATION -f json | jq .grades"))
@cli_command
def show(
    evaluation: Annotated[str, typer.Argument(metavar="EVALUATION", help="Id of the evaluation.")],
    *,
    options: ServerOptions,
) -> None:
    """Show one result with its settings and the items that were graded worst."""
    found = options.rest_client().get_evaluation(evaluation).result()
    if options.is_json:
        print_json(found.model_dump(mode="json"))
        return
    print_facts(
        {
            "evaluation": found.evaluation_id,
            "model": found.model,
            "run": place_text(found),
            "task": f"{found.task}, {found.num_items} items, {found.num_samples} samples each",
            found.metric: f"{number(found.value)}  {interval_text(found)}",
            **{name: f"{number(one.value)}  {interval_text(one)}" for name, one in found.metrics.items()},
            "standard error": number(found.std_error),
            "interval": {"wilson": "Wilson's", "t": "Student's"}[found.method],
            "settings": [f"{name} = {value}" for name, value in found.settings.items()],
            "by": found.harness,
            "stored": moment_text(found.created_at),
        }
    )
    size = found.num_samples
    means = [sum(found.grades[place : place + size]) / size for place in range(0, len(found.grades), size)]
    worst = sorted(zip(means, found.items, strict=True))[:MAX_ITEMS_SHOWN]
    print_table(["item", Column("grade", justify="right")], [[item, number(mean)] for mean, item in worst])
    if len(means) > MAX_ITEMS_SHOWN:
        note(f"{MAX_ITEMS_SHOWN} of {len(means)} items, the worst; -f json has all")


@app.command(
    epilog=examples(
        "lorimer eval compare tinker://RUN/sampler_weights/000020 tinker://RUN/sampler_weights/final",
        "lorimer eval compare kettle@20 kettle@last --on gsm8k",
        "lorimer eval compare lorimer/tiny kettle@last",
    )
)
@cli_command
def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, a base model, or the id of an evaluation.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    on: TaskOption = None,
    *,
    options: ServerOptions,
) -> None:
    """Compare two checkpoints on the items that both were asked, by a paired test."""
    client = options.rest_client()
    names = [path_of(client, text) for text in (first, second)]
    found = client.compare_evaluations(*names, task=on).result()
    if options.is_json:
        print_json(found.model_dump(mode="json"))
        return
    print_table(COMPARED, [comparison_row(one) for one in found.comparisons])
    for one in found.comparisons:
        if one.differing_settings:
            note(f"{one.task}: {', '.join(one.differing_settings)} differ between the two")


@app.command(epilog=examples("lorimer eval delete 3f2a…"))
@cli_command
def delete(
    evaluations: Annotated[list[str], typer.Argument(metavar="EVALUATION...", help="Ids of evaluations.")],
    *,
    options: ServerOptions,
) -> None:
    """Delete results."""
    client = options.rest_client()

    def start(evaluation_id: str) -> "Future[None]":
        return client.delete_evaluation(evaluation_id)

    change(list(dict.fromkeys(evaluations)), start, options.output, "deleted")


def print_evaluations(found: list["Evaluation"]) -> None:
    rows = [[*row(one), place_text(one), ago(one.created_at), one.evaluation_id] for one in found]
    print_table([*COLUMNS, "run", "when", Column("id", whole=True)], rows)


def row(one: "Evaluation") -> list[object]:
    metrics = "".join(f", {name} {number(each.value)}" for name, each in one.metrics.items() if name != "pass@1")
    return [one.model, one.task, f"{one.metric}{metrics}", number(one.value), interval_text(one), one.num_items]


def comparison_row(one: "EvaluationComparison") -> list[object]:
    better = "B" if one.difference.value > 0 else "A"
    return [
        one.task,
        one.metric,
        number(one.first.value),
        number(one.second.value),
        f"{one.difference.value:+.3g}",
        interval_text(one.difference),
        f"{one.p_value:.2g}",
        f"{better} is better" if one.is_significant else "no significant difference",
        one.num_items,
        one.test,
    ]


def place_text(one: "Evaluation") -> str:
    name = one.run_name or ""
    return name if one.step is None else f"{name} @{one.step}".strip()


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def interval_text(one: "Estimate") -> str:
    return "" if one.low is None or one.high is None else f"{one.low:.3g} to {one.high:.3g}"
