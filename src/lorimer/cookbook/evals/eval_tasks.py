"""Tasks: named sets of items that a model is asked, and how each answer is graded.

A task knows its items and settings, and grades one item of one model. What runs tasks, resumes them and stores the
results is ``running.py``; judged and multiple-choice tasks have modules of their own.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lorimer import SamplingClient, SamplingParams
from lorimer.chat.conversation import Message, text_of
from lorimer.cookbook.completers import derive_seed
from lorimer.cookbook.datasets import Row, check_fields, convert_rows
from lorimer.cookbook.evals.data_files import read_task_rows
from lorimer.cookbook.evals.named_graders import grader_settings, named_grader
from lorimer.cookbook.evaluation import Grader, graded
from lorimer.cookbook.gsm8k import reference_number
from lorimer.cookbook.renderers import Renderer
from lorimer.errors import InvalidInput


@dataclass(frozen=True)
class Model:
    """What is evaluated: weights to sample from, and how messages become their tokens."""

    sampling_client: SamplingClient
    renderer: Renderer


@dataclass(frozen=True)
class Item:
    item_id: str
    """A digest of the row: the same question has the same id in every evaluation."""
    row: Row


@dataclass(frozen=True)
class Outcome:
    grades: list[float]
    """One for each sample."""
    replies: list[Any]
    """What was graded, for people to read."""


class Task(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def metric(self) -> str: ...
    @property
    def items(self) -> Sequence[Item]: ...
    @property
    def settings(self) -> Mapping[str, Any]:
        """What the result depends on besides the model and the items."""

    async def grade(self, model: Model, item: Item) -> Outcome: ...


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    max_tokens: int = 512
    temperature: float = 0.0
    num_samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.num_samples < 1:
            raise InvalidInput(
                f"max_tokens is {self.max_tokens} and samples {self.num_samples}; 1 or more is accepted of both"
            )
        if self.temperature < 0:
            raise InvalidInput(f"temperature is {self.temperature}; 0 or more is accepted")
        if self.num_samples > 1 and self.temperature == 0:
            raise InvalidInput(
                f"samples is {self.num_samples} at temperature 0, where all are the same; a temperature above 0 is "
                "accepted with several samples"
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the settings that have an effect: greedy decoding has no seed."""
        found = dict(vars(self))
        return found if self.temperature else {name: value for name, value in found.items() if name != "seed"}


async def sample_replies(
    model: Model, messages: Sequence[Message], sampling: SamplingSettings, *key: int | str
) -> list[str]:
    """Return the model's replies; their seed depends on ``key`` alone, so that the order of items has no effect."""
    renderer = model.renderer
    params = SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        stop=renderer.get_stop_sequences(),
        seed=derive_seed(sampling.seed, *key),
    )
    prompt = renderer.build_generation_prompt(messages)
    found = await model.sampling_client.sample_async(prompt, sampling.num_samples, params)
    return [text_of(renderer.parse_response(sequence.tokens)[0]) for sequence in found.sequences]


@dataclass(frozen=True, kw_only=True)
class QuestionTask:
    """Questions whose replies a function grades."""

    name: str
    items: Sequence[Item]
    grader: Grader
    grader_name: str
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    suffix: str = ""
    """Added to each question."""
    metric: str = "accuracy"

    @property
    def settings(self) -> dict[str, Any]:
        given = grader_settings(self.grader_name) | self.sampling.as_dict()
        return given | ({"suffix": self.suffix} if self.suffix else {})

    async def grade(self, model: Model, item: Item) -> Outcome:
        messages: list[Message] = [{"role": "user", "content": str(item.row["question"]) + self.suffix}]
        replies = await sample_replies(model, messages, self.sampling, item.item_id)
        return Outcome([await self._graded(reply, item) for reply in replies], list(replies))

    async def _graded(self, reply: str, item: Item) -> float:
        try:
            return await graded(self.grader, reply, item.row)
        except Exception as error:
            raise InvalidInput(
                f"the grader {self.grader_name} failed on item {item.item_id} with {type(error).__name__}: {error}"
            ) from error


def make_items(rows: Sequence[Row], limit: int | None = None, seed: int = 0) -> list[Item]:
    """Return the items of rows; with ``limit`` so many of them, chosen by the seed, in the order of the file.

    Rows that are the same get a number each, so that every item has an id of its own.
    """
    if limit is not None and limit < 1:
        raise InvalidInput(f"limit is {limit}; 1 or more is accepted")
    seen: Counter[str] = Counter()
    items = []
    for row in rows:
        text = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
        digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        seen[digest] += 1
        items.append(Item(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}", row))
    if limit is None or limit >= len(items):
        return items
    chosen = sorted(range(len(items)), key=lambda place: derive_seed(seed, items[place].item_id))[:limit]
    return [items[place] for place in sorted(chosen)]


def gsm8k_task(
    data: str | None = None, *, limit: int | None = None, sampling: SamplingSettings | None = None, suffix: str = ""
) -> QuestionTask:
    """Grade-school word problems (Cobbe et al., 2021), the 1,319 of the test set."""
    return _numeric_task(
        "gsm8k", check_fields(read_task_rows("gsm8k", data), "question", "answer"), limit, sampling, suffix
    )


def svamp_task(
    data: str | None = None, *, limit: int | None = None, sampling: SamplingSettings | None = None, suffix: str = ""
) -> QuestionTask:
    """Short word problems with varied wordings (Patel et al., 2021); body and question are joined."""
    rows = check_fields(read_task_rows("svamp", data), "Body", "Question", "Answer")
    return _numeric_task("svamp", convert_rows(rows, svamp_row), limit, sampling, suffix)


def svamp_row(row: Row) -> dict[str, str]:
    body = str(row["Body"]).strip()
    end = "" if body.endswith((".", "?", "!", ",")) else "."
    number = float(row["Answer"])
    return {
        "question": f"{body}{end} {str(row['Question']).strip()}",
        "answer": str(int(number)) if number.is_integer() else str(number),
    }


def _numeric_task(
    name: str, rows: Sequence[Row], limit: int | None, sampling: SamplingSettings | None, suffix: str
) -> QuestionTask:
    chosen = sampling or SamplingSettings()
    convert_rows(rows, lambda row: reference_number(str(row["answer"])))
    items = make_items(rows, limit, chosen.seed)
    grader = named_grader("numeric")
    return QuestionTask(name=name, items=items, grader=grader, grader_name="numeric", sampling=chosen, suffix=suffix)


def file_task(
    data: str,
    grader: str,
    *,
    name: str | None = None,
    limit: int | None = None,
    sampling: SamplingSettings | None = None,
    suffix: str = "",
) -> QuestionTask:
    """Questions of one's own: rows with ``question`` and ``answer``, graded by a grader of ``named_graders.py``."""
    chosen = sampling or SamplingSettings()
    is_own = grader.startswith("python:")
    rows = check_fields(read_task_rows("questions", data), "question", *([] if is_own else ["answer"]))
    grade = named_grader(grader)
    if grader == "numeric":
        convert_rows(rows, lambda row: reference_number(str(row["answer"])))
    return QuestionTask(
        name=name or Path(data).stem,
        items=make_items(rows, limit, chosen.seed),
        grader=grade,
        grader_name=grader,
        sampling=chosen,
        suffix=suffix,
    )
