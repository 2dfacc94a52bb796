"""Look at the rows of a training before it starts: their form, lengths, what is trained on, duplicates and leaks.

Rows become tokens as in training, so what is counted and shown here is what the loops will send. Two rows are the same
if their texts are, whatever their case and spaces.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from lorimer.chat.conversation import Message, TrainOn, text_of
from lorimer.chat.images import ids_of
from lorimer.cookbook.datasets import Row, check_fields, load_rows, read_conversation, read_question, split_off
from lorimer.cookbook.preference import read_preference
from lorimer.cookbook.renderers import Example, Renderer
from lorimer.errors import InvalidInput

Form = Literal["sft", "dpo", "rl", "distill"]
Problem = Literal["form", "nothing_trained", "truncated", "duplicate", "leak"]
PROBLEMS: tuple[str, ...] = get_args(Problem)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Finding:
    problem: Problem
    row: int
    """The line of a JSONL file, else the number of the row, from 1; of the held-out file in `file`."""
    text: str
    file: Literal["data", "held_out"] = "data"


@dataclass(frozen=True)
class Span:
    """Tokens next to each other, of which all or none are trained on."""

    text: str
    is_trained: bool
    pieces: tuple[str, ...]
    """The text of each token; tokens that only together are text are one piece."""


@dataclass(frozen=True, kw_only=True)
class Report:
    form: Form
    num_rows: int
    num_held_out: int
    num_examples: int
    num_tokens: int
    """That the model reads in one epoch, after the cut."""
    num_trained_tokens: int
    num_truncated: int
    lengths: dict[str, int]
    """Tokens of an example before the cut: shortest, median, 95th percentile, longest."""
    findings: list[Finding] = field(default_factory=list)
    previews: list[list[Span]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Read:
    """A row that has the right form."""

    number: int
    question: str
    whole: str
    examples: list[Example]


def check_data(
    data: Path | str,
    renderer: Renderer,
    *,
    form: Form | None = None,
    held_out_data: Path | str | None = None,
    num_held_out: int | None = None,
    max_length: int | None = 1024,
    train_on: TrainOn = TrainOn.ALL_ASSISTANT_MESSAGES,
    seed: int = 0,
    num_shown: int = 2,
) -> Report:
    """Return what a training on these rows would read, and everything that is wrong with them.

    Without a held-out file, leaks are looked for between the parts that ``lorimer train`` makes with the same seed.
    """
    findings: list[Finding] = []
    rows = read_lines(data, "data", findings)
    held_out = read_lines(held_out_data, "held_out", findings) if held_out_data is not None else []
    found_form: Form = form or ("dpo" if rows and "chosen" in rows[0][1] else "sft")
    read = _reader(found_form, renderer, train_on)
    learned, tested = (_read_all(part, read, name, findings) for part, name in ((rows, "data"), (held_out, "held_out")))
    if held_out_data is None and len(learned) > 1:
        most = 200 if found_form == "rl" else 64
        learned_part, tested = split_off(learned, num_held_out, seed, most=most)
    else:
        learned_part = learned
    cut = None if found_form in ("rl", "distill") else max_length
    findings += _of_lengths(learned, cut) if cut is not None else []
    findings += _duplicates(learned)
    findings += _leaks(learned_part, tested, is_split=held_out_data is None)
    examples = [example for one in learned_part for example in one.examples]
    lengths = [len(weights) for _, weights in examples]
    return Report(
        form=found_form,
        num_rows=len(rows),
        num_held_out=len(tested),
        num_examples=len(examples),
        num_tokens=sum(min(length, cut or length) for length in lengths),
        num_trained_tokens=sum(int(np.count_nonzero(weights[:cut])) for _, weights in examples),
        num_truncated=sum(cut is not None and length > cut for length in lengths),
        lengths=_quantiles(lengths),
        findings=sorted(findings, key=lambda one: (PROBLEMS.index(one.problem), one.file, one.row)),
        previews=[
            spans(ids_of(tokens)[:cut].tolist(), weights[:cut], renderer.tokenizer)
            for tokens, weights in examples[:num_shown]
        ],
    )


def read_lines(path: Path | str, file: Literal["data", "held_out"], findings: list[Finding]) -> list[tuple[int, Row]]:
    """Return the rows of a file with their numbers; a line of JSONL that is not an object becomes a finding."""
    path = Path(path)
    if path.suffix != ".jsonl":
        return list(enumerate(load_rows(str(path)), 1))
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{str(path)!r} cannot be read: {error}") from None
    found: list[tuple[int, Row]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else None
        except json.JSONDecodeError as error:
            findings.append(Finding("form", number, f"is not JSON: {error}", file))
            continue
        if isinstance(row, dict):
            found.append((number, row))
        elif line.strip():
            findings.append(Finding("form", number, f"is {row!r}; an object is accepted", file))
    if not found:
        raise InvalidInput(f"{str(path)!r} has no rows; at least one is needed")
    return found


Reader = Callable[[Row], tuple[Sequence[Message], str, list[Example]]]
"""Returns what is asked in a row, the text of the rest, and the row's examples."""


def _reader(form: Form, renderer: Renderer, train_on: TrainOn) -> Reader:
    def read_sft(row: Row) -> tuple[Sequence[Message], str, list[Example]]:
        messages, tools = read_conversation(row)
        asked = list(messages)
        while asked and asked[-1]["role"] == "assistant":
            asked.pop()
        return asked, _text(messages), renderer.build_supervised_examples(messages, train_on, tools)

    def read_dpo(row: Row) -> tuple[Sequence[Message], str, list[Example]]:
        asked, *answers = read_preference(row)
        if _text(answers[:1]) == _text(answers[1:]):
            raise InvalidInput("chosen and rejected are the same; two different answers are needed")
        built = [renderer.build_supervised_example([*asked, one], TrainOn.LAST_ASSISTANT_MESSAGE) for one in answers]
        return asked, _text([*asked, *answers]), built

    def read_prompt(row: Row) -> tuple[Sequence[Message], str, list[Example]]:
        if form == "rl":
            (row,) = check_fields([row], "question", "answer")
        asked = read_question(row)
        prompt = renderer.build_generation_prompt(asked)
        return asked, _text(asked) + str(row.get("answer", "")), [(prompt, np.zeros(prompt.length, np.float32))]

    return {"sft": read_sft, "dpo": read_dpo}.get(form, read_prompt)


def _read_all(rows: Sequence[tuple[int, Row]], read: Reader, file: Any, findings: list[Finding]) -> list[_Read]:
    found = []
    for number, row in rows:
        try:
            asked, whole, examples = read(row)
        except InvalidInput as error:
            findings.append(Finding("form", number, str(error).removeprefix("row 1 of the data "), file))
            continue
        found.append(_Read(number, _same(_text(asked)), _same(whole), examples))
    return found


def _text(messages: Sequence[Message]) -> str:
    """Return the roles and texts of messages, with the calls of tools."""
    return "\n".join(f"{one['role']}: {text_of(one)} {json.dumps(one.get('tool_calls', ''))}" for one in messages)


def _same(text: str) -> str:
    return " ".join(text.casefold().split())


# ── what is wrong ─────────────────────────────────────────────────────────────────────────────────────


def _of_lengths(rows: Sequence[_Read], max_length: int) -> list[Finding]:
    found = []
    for row in rows:
        for _, weights in row.examples:
            num_kept, num_trained = np.count_nonzero(weights[1:max_length]), np.count_nonzero(weights)
            if not num_kept:
                told = f"nothing within the first {max_length} of {len(weights)} tokens is trained on"
                found.append(Finding("nothing_trained", row.number, told))
            elif np.any(weights[max_length:]):
                told = f"{num_trained - num_kept} of {num_trained} trained tokens are cut off: it has {len(weights)}"
                found.append(Finding("truncated", row.number, told))
    return found


def _duplicates(rows: Sequence[_Read]) -> list[Finding]:
    first: dict[str, int] = {}
    found = []
    for row in rows:
        if row.whole in first:
            found.append(Finding("duplicate", row.number, f"is the same as row {first[row.whole]}"))
        first.setdefault(row.whole, row.number)
    return found


def _leaks(learned: Sequence[_Read], tested: Sequence[_Read], is_split: bool) -> list[Finding]:
    """Find held-out rows whose question is trained on; those of a split are rows of the same file."""
    asked = {row.question: row.number for row in reversed(learned)}
    return [
        Finding(
            "leak",
            row.number,
            f"is held out, but row {asked[row.question]}, which is trained on, asks the same",
            "data" if is_split else "held_out",
        )
        for row in tested
        if row.question in asked
    ]


def _quantiles(lengths: Sequence[int]) -> dict[str, int]:
    if not lengths:
        return {}
    at = {"min": 0, "median": 50, "p95": 95, "max": 100}
    return {name: int(np.percentile(lengths, share, method="nearest")) for name, share in at.items()}


# ── what is trained on ────────────────────────────────────────────────────────────────────────────────


def spans(tokens: Sequence[int], weights: Sequence[float] | Any, tokenizer: Any) -> list[Span]:
    """Return the text of an example, cut where training on it begins and ends."""
    found: list[Span] = []
    start = 0
    for place in range(1, len(tokens) + 1):
        if place == len(tokens) or bool(weights[place]) != bool(weights[start]):
            part = tokens[start:place]
            found.append(Span(tokenizer.decode(part), bool(weights[start]), _pieces(part, tokenizer)))
            start = place
    return found


def _pieces(tokens: Sequence[int], tokenizer: Any) -> tuple[str, ...]:
    pieces: list[str] = []
    waiting: list[int] = []
    for token in tokens:
        waiting.append(token)
        text = tokenizer.decode(waiting)
        if REPLACEMENT not in text:
            pieces.append(text)
            waiting = []
    return (*pieces, tokenizer.decode(waiting)) if waiting else tuple(pieces)


def count_problems(findings: Sequence[Finding]) -> Mapping[str, int]:
    """Return how many findings there are of each problem that was found."""
    counts = {problem: sum(one.problem == problem for one in findings) for problem in PROBLEMS}
    return {problem: count for problem, count in counts.items() if count}
