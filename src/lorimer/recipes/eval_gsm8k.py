"""Scores a file of answers to grade-school word problems. Needs no server and no model.

    python -m lorimer.recipes.eval_gsm8k --answers answers.jsonl

A line of the file, as `inference_gsm8k` writes it, has `question`, `answer` (what the model wrote) and `reference`
(what is right); where there is no reference, `--data` names the problems with theirs. The number after `####` counts;
with `--last-number` a reply without that mark is read by its last number. The scores come as a table and, with
`--output`, as JSON: those of 1,319 answers after 1 second of processor time on a machine of two cores.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lorimer.cookbook.datasets import load_rows, read_jsonl_rows
from lorimer.cookbook.gsm8k import extract_answer, score
from lorimer.cookbook.logs import write_atomically
from lorimer.errors import InvalidInput
from lorimer.terminal import run_recipe


def with_references(rows: list[dict[str, Any]], data: str | None) -> list[dict[str, Any]]:
    """Fill in missing references from the data. Raise ``InvalidInput`` if one is still missing."""
    right = {row["question"]: row["answer"] for row in load_rows(data)} if data else {}
    for number, row in enumerate(rows, 1):
        if "question" not in row or "answer" not in row:
            raise InvalidInput(f"line {number} has the fields {sorted(row)}; question and answer are needed")
        if row.get("reference") is None and row["question"] not in right:
            raise InvalidInput(f"line {number} has no reference, nor has the data: {row['question']!r}; give --data")
    return [row if row.get("reference") is not None else row | {"reference": right[row["question"]]} for row in rows]


def main(
    answers: Annotated[Path, typer.Option(help="JSONL of questions and a model's answers")],
    data: Annotated[str | None, typer.Option(help="problems with what is right, JSONL or Hugging Face")] = None,
    output: Annotated[Path | None, typer.Option(help="file for the scores as JSON")] = None,
    last_number: Annotated[bool, typer.Option(help="read a reply without #### by its last number")] = False,
    json_only: Annotated[bool, typer.Option("--json", help="print JSON and no table")] = False,
    show_wrong: Annotated[int, typer.Option(help="print so many wrong answers")] = 0,
) -> None:
    rows = with_references(read_jsonl_rows(answers), data)
    scores = score(rows, fallback=last_number).as_dict()
    if output is not None:
        write_atomically(output, json.dumps(scores, indent=2) + "\n")
    if json_only:
        print(json.dumps(scores))
        return
    table = Table(str(answers), "value", box=None)
    for name, value in scores.items():
        table.add_row(name, f"{value:.1%}" if isinstance(value, float) else str(value))
    console = Console(emoji=False)
    console.print(table)
    wrong = [row for row in rows if not score([row], fallback=last_number).accuracy]
    for row in wrong[:show_wrong]:
        said, right = (extract_answer(str(row[name]), fallback=True) for name in ("answer", "reference"))
        console.print(f"\n{row['question']}\n-> {row['answer']}\nread {said}, right {right}", markup=False)


if __name__ == "__main__":
    run_recipe(main)
