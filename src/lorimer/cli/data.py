"""``lorimer data``: look at training data before a training."""

import os
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from lorimer.cli.commands import cli_command
from lorimer.cli.output import (
    Column,
    Format,
    FormatOption,
    examples,
    note,
    print_facts,
    print_json,
    print_table,
    printable,
    stdout_console,
)
from lorimer.errors import InvalidInput
from lorimer.terminal import FAILED

if TYPE_CHECKING:
    from lorimer import ServiceClient
    from lorimer.cookbook.data_check import Report, Span

app = typer.Typer(help="Look at training data.", no_args_is_help=True)

MAX_FINDINGS = 20


class Form(StrEnum):
    sft = "sft"
    dpo = "dpo"
    rl = "rl"
    distill = "distill"


@app.command(
    epilog=examples(
        "lorimer data check chats.jsonl --model lorimer/tiny",
        "lorimer data check train.jsonl --model lorimer/tiny --held-out test.jsonl --max-length 512 --show 5",
        "lorimer data check pairs.jsonl --model lorimer/tiny --allow truncated --json | jq '.findings[]'",
    )
)
@partial(cli_command, extra="server,cookbook")
def check(
    file: Annotated[str, typer.Argument(help="A .jsonl or .json file, or a Hugging Face dataset.")],
    model: Annotated[str, typer.Option("--model", "-m", help="Base model, whose tokenizer and template are used.")],
    form: Annotated[
        Form | None, typer.Option("--for", help="The training; without it dpo if rows have chosen, else sft.")
    ] = None,
    held_out: Annotated[str | None, typer.Option(help="Held-out rows; without it a part as in training.")] = None,
    num_held_out: Annotated[int | None, typer.Option(min=0, help="Rows that training holds out.")] = None,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of an example; the rest is cut off.")] = 1024,
    train_on: Annotated[str, typer.Option(help="Which messages are learned.")] = "all_assistant_messages",
    renderer: Annotated[str, typer.Option(help="How messages become tokens.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of the part that is held out.")] = 0,
    show: Annotated[int, typer.Option(min=0, help="Examples to show with what is trained on.")] = 2,
    allow: Annotated[
        list[str] | None, typer.Option(help="A problem that is no failure: truncated, duplicate, ...; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as -f json.")] = False,
    base_url: Annotated[str | None, typer.Option("--base-url", "--url", help="Server with the model.")] = None,
    output: FormatOption = Format.table,
) -> None:
    """Check the rows of a training: form, lengths, truncation, duplicates, leaks into the held-out part.

    Shows examples with the tokens that are trained on. Exits with 1 if something is wrong.
    """
    from lorimer.cookbook.data_check import PROBLEMS, check_data
    from lorimer.cookbook.renderers import TrainOn, get_renderer
    from lorimer.cookbook.service import get_tokenizer

    if unknown := [one for one in allow or [] if one not in PROBLEMS]:
        raise InvalidInput(f"--allow is {unknown[0]!r}; accepted are {', '.join(PROBLEMS)}")
    if train_on not in [str(one) for one in TrainOn]:
        raise InvalidInput(f"--train-on is {train_on!r}; accepted are {', '.join(map(str, TrainOn))}")
    with tokenizer_service(model, base_url) as service:
        built = get_renderer(renderer, get_tokenizer(service, model))
    report = check_data(
        file,
        built,
        form=None if form is None else form.value,
        held_out_data=held_out,
        num_held_out=num_held_out,
        max_length=max_length,
        train_on=TrainOn(train_on),
        seed=seed,
        num_shown=show,
    )
    if as_json or output is Format.json:
        print_json(report.as_dict())
    else:
        print_report(report)
    if any(finding.problem not in (allow or ()) for finding in report.findings):
        raise typer.Exit(FAILED)


def tokenizer_service(model: str, base_url: str | None) -> "ServiceClient":
    """Return a client that hands out the tokenizer; in this process no engine is started for that."""
    from lorimer.cli.train import training_server
    from lorimer.cookbook.service import open_service

    os.environ.setdefault("LORIMER_START_ENGINES", "lazy")
    return open_service(model, training_server(base_url))


def print_report(report: "Report") -> None:
    from lorimer.cookbook.data_check import count_problems

    lengths = ", ".join(f"{name} {value}" for name, value in report.lengths.items())
    print_facts(
        {
            "form": report.form,
            "rows": f"{report.num_rows}, of which {report.num_held_out} are held out",
            "examples": report.num_examples,
            "tokens": f"{report.num_tokens}, of which {report.num_trained_tokens} are trained on",
            "lengths": lengths,
            "truncated": report.num_truncated,
            "wrong": ", ".join(f"{count} {name}" for name, count in count_problems(report.findings).items())
            or "nothing",
        }
    )
    if report.findings:
        print()
        rows = [(one.problem, one.file, one.row, one.text) for one in report.findings[:MAX_FINDINGS]]
        columns: list[str | Column] = ["problem", "file", Column("row", justify="right"), Column("what", whole=True)]
        print_table(columns, rows)
        if len(report.findings) > MAX_FINDINGS:
            note(f"{MAX_FINDINGS} of {len(report.findings)} findings; --json has all")
    for number, preview in enumerate(report.previews, 1):
        print(f"\nexample {number} (trained on: {'green' if has_colours() else 'between [[ and ]]'})")
        print_spans(preview)


def has_colours() -> bool:
    return stdout_console().color_system is not None


def print_spans(preview: "list[Span]") -> None:
    """Print the text of an example; trained tokens alternate between two greens, so that their borders show."""
    from rich.text import Text

    text = Text()
    for span in preview:
        pieces = [printable_lines(piece) for piece in span.pieces]
        if not span.is_trained:
            text.append("".join(pieces), "dim")
        elif has_colours():
            for place, piece in enumerate(pieces):
                text.append(piece, "bold green" if place % 2 else "bold bright_green underline")
        else:
            text.append(f"[[{''.join(pieces)}]]")
    stdout_console().print(text, soft_wrap=True)


def printable_lines(text: str) -> str:
    return "\n".join(printable(line) for line in text.split("\n"))
