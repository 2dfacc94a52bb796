"""``lorimer eval``: evaluates checkpoints and base models on tasks, and stores the results beside them.

``cookbook/evals`` has the tasks and runs them; here are the flags, the server and what is printed. Results are looked
at by the commands of ``evaluations.py``.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorimer.cli.commands import cli_command
from lorimer.cli.connection import KeyOption, UrlOption
from lorimer.cli.evaluations import app as app
from lorimer.cli.evaluations import print_evaluations
from lorimer.cli.output import Format, FormatOption, examples, note, print_json
from lorimer.cli.progress import progress_bar
from lorimer.cli.train import training_server
from lorimer.errors import InvalidInput

if TYPE_CHECKING:
    from lorimer import ServiceClient
    from lorimer.cookbook.evals.eval_tasks import Task
    from lorimer.cookbook.evals.harnesses import Package
    from lorimer.cookbook.evals.named_models import NamedModel
    from lorimer.types.evaluations import Evaluation

TASK, SAMPLING, RUNNING = "Task", "Sampling", "Running"


@dataclass(frozen=True)
class EvalOptions:
    """What is asked, how replies are sampled, and how it is run."""

    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="TASK[,TASK]",
            help="gsm8k, svamp, mt_bench, multiple_choice or questions; with --with, tasks of that package.",
            rich_help_panel=TASK,
        ),
    ] = None
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FILE", help="JSONL or JSON file of the task's rows.", rich_help_panel=TASK),
    ] = None
    grader: Annotated[
        str | None,
        typer.Option(
            help="For questions: exact, numeric, contains, regex or python:FILE:FUNCTION.", rich_help_panel=TASK
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(help="What the results of a file are called; without it as the file.", rich_help_panel=TASK),
    ] = None
    suffix: Annotated[str, typer.Option(help="Added to each question.", rich_help_panel=TASK)] = ""
    choices: Annotated[
        str,
        typer.Option(help="For multiple_choice: compare the text or the letters of choices.", rich_help_panel=TASK),
    ] = "text"
    judge: Annotated[
        str | None, typer.Option(help="For mt_bench: the model or checkpoint that judges.", rich_help_panel=TASK)
    ] = None
    judge_tokens: Annotated[
        int, typer.Option(min=1, help="For mt_bench: most tokens of a judgement.", rich_help_panel=TASK)
    ] = 512
    against: Annotated[
        str | None,
        typer.Option(
            help="For mt_bench: compare with this model, in both orders, instead of rating.", rich_help_panel=TASK
        ),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option("--limit", "-n", min=1, help="So many items, chosen by the seed.", rich_help_panel=TASK),
    ] = None
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.", rich_help_panel=SAMPLING)] = 0.0
    samples: Annotated[
        int, typer.Option("--samples", "-k", min=1, help="Replies to each item, for pass@k.", rich_help_panel=SAMPLING)
    ] = 1
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a reply; 512 by default.", rich_help_panel=SAMPLING)
    ] = None
    seed: Annotated[int, typer.Option(help="Of samples, and of the items of --limit.", rich_help_panel=SAMPLING)] = 0
    renderer: Annotated[
        str, typer.Option(help="How messages become tokens, as docs/cookbook.md lists.", rich_help_panel=SAMPLING)
    ] = "auto"
    concurrency: Annotated[int, typer.Option(min=1, help="Items asked concurrently.", rich_help_panel=RUNNING)] = 32
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="DIR", help="Keep every reply, as JSONL files.", rich_help_panel=RUNNING),
    ] = None
    with_: Annotated[
        str | None,
        typer.Option("--with", metavar="PACKAGE", help="inspect or lm-eval, if installed.", rich_help_panel=RUNNING),
    ] = None
    with_arg: Annotated[
        list[str] | None,
        typer.Option(
            "--with-arg", metavar="ARG", help="One more argument of that package; repeatable.", rich_help_panel=RUNNING
        ),
    ] = None
    likelihood: Annotated[
        bool,
        typer.Option("--likelihood", help="With lm-eval: tasks that score likelihoods.", rich_help_panel=RUNNING),
    ] = False
    output: FormatOption = Format.table
    base_url: UrlOption = None
    api_key: KeyOption = None


@app.command(
    epilog=examples(
        "lorimer eval tinker://RUN/sampler_weights/final lorimer/tiny --on gsm8k,svamp",
        "lorimer eval kettle@20 kettle@last --on gsm8k --temperature 0.7 --samples 8 --limit 200",
        "lorimer eval kettle@last --data mine.jsonl --grader python:grade.py:grade",
        "lorimer eval kettle@last --on mt_bench --judge Qwen/Qwen3-8B",
        "lorimer eval kettle@last --on multiple_choice --data arc.jsonl",
        "lorimer eval run kettle@last --with inspect --on sums.py   # run can be left out",
        "lorimer eval kettle@last --with lm-eval --on arc_easy --likelihood",
    ),
)
@partial(cli_command, extra="server,cookbook")
def run(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT...",
            help="tinker:// paths, RUN@STEP, RUN@last, or base models.",
            show_default=False,
        ),
    ],
    *,
    options: EvalOptions,
) -> None:
    """Evaluate checkpoints and base models; `lorimer eval CHECKPOINT` means this command."""
    import asyncio

    tasks = check_options(options)
    if options.with_ is not None:
        from lorimer.cookbook.evals.harnesses import check_installed

        check_installed(options.with_)  # type: ignore[arg-type]
    found = asyncio.run(evaluate(models, tasks, options))
    if options.output is Format.json:
        print_json({"evaluations": [one.model_dump(mode="json") for one in found]})
    else:
        print_evaluations(found)


BUILT_IN = ("gsm8k", "svamp", "mt_bench", "multiple_choice", "questions")


def check_options(options: EvalOptions) -> list[str]:
    """Return the names of the tasks. Refuse options that do not fit together before a server is looked for."""
    tasks = [name.strip() for name in (options.on or "").split(",") if name.strip()]
    if not tasks and options.grader:
        tasks = ["questions"]
    if not tasks:
        raise InvalidInput(f"--on is missing; accepted are {', '.join(BUILT_IN)}, or --data with --grader")
    if options.with_ is not None:
        if options.with_ not in ("inspect", "lm-eval"):
            raise InvalidInput(f"--with is {options.with_!r}; accepted are inspect and lm-eval")
        given = [name for name in ("data", "grader", "judge", "against", "suffix") if getattr(options, name)]
        if given:
            raise InvalidInput(f"--{given[0]} is for built-in tasks; --with-arg passes arguments to {options.with_}")
        return tasks
    if unknown := [name for name in tasks if name not in BUILT_IN]:
        raise InvalidInput(f"there is no task {unknown[0]!r}; accepted are {', '.join(BUILT_IN)}")
    if options.data and len(tasks) > 1:
        raise InvalidInput(f"--data is the file of one task, and {len(tasks)} are given; evaluate them one by one")
    for name, task in (("grader", "questions"), ("judge", "mt_bench"), ("against", "mt_bench")):
        if getattr(options, name) and task not in tasks:
            raise InvalidInput(f"--{name} is for the task {task}")
    for task, name in (
        ("questions", "grader"),
        ("questions", "data"),
        ("multiple_choice", "data"),
        ("mt_bench", "judge"),
    ):
        if task in tasks and not getattr(options, name):
            raise InvalidInput(f"the task {task} needs --{name}")
    return tasks


async def evaluate(models: list[str], tasks: list[str], options: EvalOptions) -> list["Evaluation"]:
    """Evaluate each model on each task and store every result as soon as it is there."""
    from lorimer import ServiceClient
    from lorimer.cookbook.evals.named_models import find_model

    url = training_server(options.base_url)
    is_base = "@" not in models[0] and "://" not in models[0]
    model = models[0] if url == "local" and is_base else None
    with ServiceClient(base_url=url, api_key=options.api_key, display_name="lorimer eval", model=model) as service:
        named = [await find_model(service, text) for text in dict.fromkeys(models)]
        if options.with_ is not None:
            return await run_package(service, named, tasks, options)
        made = [await make_task(service, name, options) for name in tasks]
        return [await run_one(service, model, task, options) for model in named for task in made]


async def make_task(service: "ServiceClient", name: str, options: EvalOptions) -> "Task":
    from lorimer.cookbook.evals import eval_tasks, judged, multiple_choice
    from lorimer.cookbook.evals.named_models import find_model, open_model

    sampling = eval_tasks.SamplingSettings(
        max_tokens=options.max_tokens or 512,
        temperature=options.temperature,
        num_samples=options.samples,
        seed=options.seed,
    )
    common: dict[str, Any] = {"limit": options.limit, "sampling": sampling}
    match name:
        case "gsm8k":
            return eval_tasks.gsm8k_task(options.data, suffix=options.suffix, **common)
        case "svamp":
            return eval_tasks.svamp_task(options.data, suffix=options.suffix, **common)
        case "questions":
            grader, data = str(options.grader), str(options.data)
            return eval_tasks.file_task(data, grader, name=options.name, suffix=options.suffix, **common)
        case "multiple_choice":
            return multiple_choice.multiple_choice_task(
                options.data, name=options.name, limit=options.limit, seed=options.seed, choices=options.choices
            )
    judge = await find_model(service, str(options.judge))
    made = judged.Judge(judge.name, await open_model(service, judge), options.judge_tokens)
    opponent = None if options.against is None else await find_model(service, options.against)
    opened = None if opponent is None else await open_model(service, opponent, options.renderer)
    opponent_name = "" if opponent is None else opponent.name
    return judged.mt_bench_task(options.data, made, opponent=opened, opponent_name=opponent_name, **common)


async def run_one(service: "ServiceClient", named: "NamedModel", task: "Task", options: EvalOptions) -> "Evaluation":
    """Run or resume one task on one model, and store the result."""
    import asyncio

    from lorimer.cookbook.evals.data_files import cache_dir
    from lorimer.cookbook.evals.named_models import open_model
    from lorimer.cookbook.evals.running import Journal, journal_path, run_task

    rest = service.create_rest_client()
    model = await open_model(service, named, options.renderer)
    identity = f"{rest.holder.base_url} {named.identity} {options.renderer}"
    path = journal_path(options.save or cache_dir("evals"), task, identity)
    with Journal(path) as journal, progress_bar() as show:
        if journal.outcomes:
            note(f"resumed: {len(journal.outcomes)} of {len(task.items)} items of {task.name} are done")

        def report(done: int, total: int) -> None:
            show(f"{task.name}: {done} of {total} items, {named.name}", done / total)

        try:
            found = await run_task(task, model, journal=journal, concurrency=options.concurrency, report=report)
        except (KeyboardInterrupt, asyncio.CancelledError):
            note(f"{len(journal.outcomes)} of {len(task.items)} items of {task.name} are kept for the next attempt")
            raise
    stored = await found.store(rest, named.name)
    if options.save is None:
        path.unlink()
    return stored


async def run_package(
    service: "ServiceClient", named: list["NamedModel"], tasks: list[str], options: EvalOptions
) -> list["Evaluation"]:
    """Run inspect-ai or lm-eval over the server's OpenAI routes, and store its scores."""
    import tempfile

    from lorimer.client.auth import static_key
    from lorimer.cookbook.evals.harnesses import HarnessRun, run_harness
    from lorimer.cookbook.service import get_tokenizer

    package: Package = options.with_  # type: ignore[assignment]
    rest = service.create_rest_client()
    if rest.holder.is_local:
        raise InvalidInput(f"{package} asks a server over HTTP, and none runs; start one with `lorimer serve`")
    stored = []
    for model in named:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder) if options.save is None else options.save / model.name.replace("/", "_")
            base_model = model.name
            if model.is_checkpoint:
                base_model = (await rest.get_weights_info_by_tinker_path(model.name)).base_model
            run = HarnessRun(
                tasks=tasks,
                model=model.name,
                base_url=rest.holder.base_url,
                api_key=static_key(options.api_key) or "tml-local",
                log_dir=directory,
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                limit=options.limit,
                seed=options.seed,
                num_samples=options.samples,
                concurrency=options.concurrency,
                tokenizer=get_tokenizer(service, base_model).name_or_path if options.likelihood else None,
                arguments=options.with_arg or (),
            )
            for found in run_harness(package, run):
                stored.append(await found.store(rest, model.name, package))
    return stored
