"""``lorimer train``: start or resume a training that a file of settings describes.

``cookbook/train`` reads the settings and builds the training; here are the flags, the server and what is printed.
"""

import contextlib
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorimer.cli.commands import cli_command
from lorimer.cli.connection import find_server, named_server, running_address
from lorimer.cli.output import Format, FormatOption, examples, note, print_facts, print_json, size_text

if TYPE_CHECKING:
    from lorimer.cookbook.train.kinds import Given, Name

app = typer.Typer(help="Train a model as a file of settings says.", no_args_is_help=True)


@dataclass(frozen=True)
class TrainOptions:
    """The file, and the settings that are changed most."""

    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML or TOML file with settings.")] = None
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; repeatable. `train schema` lists them."),
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count steps and tokens, measure two steps, and train nothing else.")
    ] = False
    output: FormatOption = Format.table
    model: Annotated[str | None, typer.Option("--model", "-m", help="base_model: a name that the server has.")] = None
    data: Annotated[str | None, typer.Option("--data", help="data: a file, or a Hugging Face dataset.")] = None
    log_dir: Annotated[
        Path | None, typer.Option("--log-dir", "--log-path", help="log_dir: a run found there is resumed.")
    ] = None
    learning_rate: Annotated[float | None, typer.Option(help="learning_rate; without it by a rule.")] = None
    rank: Annotated[int | None, typer.Option(help="rank of the adapter.")] = None
    batch_size: Annotated[int | None, typer.Option(help="batch_size: rows of a step.")] = None
    steps: Annotated[int | None, typer.Option(help="max_steps, in RL num_steps.")] = None
    seed: Annotated[int | None, typer.Option(help="seed of every random choice.")] = None
    base_url: Annotated[
        str | None,
        typer.Option("--base-url", "--url", help="base_url; local is a server in this process (LORIMER_BASE_URL)."),
    ] = None


@app.command(
    epilog=examples(
        "lorimer train sft --config run.yaml",
        "lorimer train sft --model lorimer/tiny --data chats.jsonl --dry-run",
        "lorimer train sft -c run.yaml --learning-rate 1e-3 --set reduction=sum --log-dir runs/second",
    )
)
@partial(cli_command, extra="server,cookbook")
def sft(*, options: TrainOptions) -> None:
    """Fine-tune on conversations: rows with messages, prompt and completion, or question and answer."""
    train("sft", options)


@app.command(
    epilog=examples(
        "lorimer train rl --model lorimer/tiny --task arithmetic --set max_tokens=8 --steps 20",
        "lorimer train rl -c run.yaml --task questions --data questions.jsonl --grader my_graders:grade",
    )
)
@partial(cli_command, extra="server,cookbook")
def rl(
    task: Annotated[str | None, typer.Option(help="task: arithmetic, word_problems or questions.")] = None,
    grader: Annotated[str | None, typer.Option(help="grader: module:function of (reply, answer).")] = None,
    *,
    options: TrainOptions,
) -> None:
    """Learn from graded answers: sums, word problems, or questions of a file with a grader of your own."""
    train("rl", options, task=task, grader=grader)


@app.command(
    epilog=examples(
        "lorimer train dpo --config run.yaml",
        "lorimer train dpo --model lorimer/tiny --data pairs.jsonl --learning-rate 1e-3 --set beta=0.2",
    )
)
@partial(cli_command, extra="server,cookbook")
def dpo(*, options: TrainOptions) -> None:
    """Prefer the better of two answers: rows with prompt, chosen and rejected."""
    train("dpo", options)


@app.command(
    epilog=examples(
        "lorimer train distill --model lorimer/tiny --data questions.jsonl --set max_tokens=32 "
        "--set teacher_path=tinker://RUN/sampler_weights/final",
    )
)
@partial(cli_command, extra="server,cookbook")
def distill(*, options: TrainOptions) -> None:
    """Become like a teacher, which scores each token that the student samples for the questions of a file."""
    train("distill", options)


@app.command(
    epilog=examples(
        "lorimer train full --config run.yaml",
        "lorimer train full --model lorimer/tiny --data chats.jsonl --set eval_tasks=gsm8k --set eval_limit=100",
    )
)
@partial(cli_command, extra="server,cookbook")
def full(*, options: TrainOptions) -> None:
    """Fine-tune all weights of the model, not an adapter, on conversations in the forms of sft."""
    train("full", options)


@app.command(epilog=examples("lorimer train schema sft > sft.schema.json", "lorimer train schema | jq keys"))
@partial(cli_command, extra="server,cookbook")
def schema(
    kind: Annotated[str | None, typer.Argument(help="sft, rl, dpo, distill or full; without it all of them.")] = None,
) -> None:
    """Print the JSON schema of a file of settings, with which editors complete and check it."""
    from lorimer.cookbook.train.kinds import KINDS
    from lorimer.errors import InvalidInput

    if kind is not None and kind not in KINDS:
        raise InvalidInput(f"there is no training {kind!r}; accepted are {', '.join(KINDS)}")
    found = {name: one.schema(name) for name, one in KINDS.items()}
    print_json(found if kind is None else found[kind])


def train(name: "Name", options: TrainOptions, **flags: object) -> None:
    """Read the settings, find the server, and train."""
    import asyncio

    given = read_settings(name, options, **flags)
    is_json = options.output is Format.json
    with contextlib.redirect_stdout(sys.stderr) if is_json else contextlib.nullcontext():
        ended = asyncio.run(run(given, training_server(given.values.get("base_url")), options.dry_run))
    if is_json:
        print_json(ended)
    elif options.dry_run:
        print_facts(estimate_facts(ended))
    else:
        metrics = {key: f"{value:.4g}" for key, value in ended["metrics"].items() if key.startswith("test/")}
        print_facts(metrics | {key: ended[key] for key in ("log_dir", "state_path", "sampler_path")})


def read_settings(name: "Name", options: TrainOptions, **flags: object) -> "Given":
    """Return the settings of the file, of ``--set`` and of the flags, each of which replaces those before it."""
    from lorimer.cookbook.train.config_file import checked, merged, read_pairs, read_settings_file
    from lorimer.cookbook.train.kinds import KINDS, complete

    settings = KINDS[name].settings
    flags |= {field: getattr(options, field) for field in ("data", "log_dir", "learning_rate", "rank", "batch_size")}
    flags |= {"base_model": options.model, KINDS[name].steps: options.steps, "seed": options.seed}
    flags |= {"base_url": options.base_url}
    values: dict[str, Any] = {}
    for origin, found in (
        (str(options.config), read_settings_file(options.config) if options.config else {}),
        ("--set", read_pairs(options.set_ or [])),
        ("flag", {flag: _plain(value) for flag, value in flags.items() if value is not None}),
    ):
        checked(found, settings, origin)  # names the source of what is wrong
        values = merged(values, found)
    return complete(name, checked(values, settings, "settings"))


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def training_server(base_url: str | None) -> str:
    """Return the address that is given, that of the server on the user's data directory, or ``local``."""
    named = named_server(base_url, None)
    if named is not None:
        return named if named == "local" else find_server(named, None)
    from lorimer.cli.settings import effective_settings

    url = running_address(effective_settings({}, None, None).settings.data.expanduser().absolute())
    if url is None:
        return "local"
    note(f"lorimer: using the server at {url}")
    return url


def estimate_facts(found: dict[str, Any]) -> dict[str, object]:
    """Return the table of a dry run."""
    from datetime import timedelta

    problems = ", ".join(f"{count} {name}" for name, count in found["problems"].items())
    tasks = ", ".join(f"{count} items of {name}" for name, count in found["eval_items"].items())
    memory = f"{size_text(found['engine_bytes'])} of the engine at its peak, {size_text(found['available_bytes'])} free"
    return {
        "examples": f"{found['num_examples']}, and {found['num_held_out']} held out",
        "steps": found["num_steps"],
        "tokens": found["num_tokens"],
        "truncated": f"{found['num_truncated']} examples",
        "wrong": f"{problems}; `lorimer data check` shows them" if problems else "nothing",
        "a step": f"{found['seconds_per_step']:.2g} s",
        "time": f"{timedelta(seconds=round(found['seconds']))}, without evaluations and checkpoints",
        "evaluations": f"{found['num_evaluations']}{', each of ' + tasks if tasks else ''}",
        "memory": memory if found["engine_bytes"] else "",
        "learning rate": f"{found['learning_rate']:.3g}",
    }


async def run(given: "Given", url: str, is_dry: bool) -> dict[str, Any]:
    """Train to the end and return where the weights are, or in a dry run what it would take."""
    from lorimer.cookbook.program import recipe_service
    from lorimer.cookbook.train.kinds import open_job

    with recipe_service(given["base_model"], url, name=f"lorimer train {given.name}") as service:
        async with open_job(given, service) as job:
            if is_dry:
                from lorimer.cookbook.train.estimate import estimate

                return asdict(await estimate(given, job, service)) | {"learning_rate": job.config.learning_rate}
            result = await job.train(job.config, service)
    last = getattr(result, "checkpoint", result)
    return {
        "log_dir": str(given["log_dir"]),
        "state_path": last.state_path,
        "sampler_path": last.sampler_path,
        "metrics": result.metrics,
    }
