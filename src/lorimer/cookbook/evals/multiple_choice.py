"""Multiple choice by likelihood: the choice that the model would most likely reply with is its answer.

Nothing is sampled, so the result has no temperature and no parsing. Rows have ``question``, ``choices`` and ``answer``:
the number of the right choice counted from 0, its letter, or its text.
"""

import asyncio
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lorimer.chat.conversation import Message
from lorimer.cookbook.datasets import Row, check_fields, convert_rows
from lorimer.cookbook.datums import conversation_to_datum
from lorimer.cookbook.evals.data_files import read_task_rows
from lorimer.cookbook.evals.eval_tasks import Item, Model, Outcome, make_items
from lorimer.cookbook.evaluation import target_logprobs
from lorimer.errors import InvalidInput

Choices = Literal["text", "letters"]
MAX_CHOICES = len(string.ascii_uppercase)


@dataclass(frozen=True, kw_only=True)
class ChoiceTask:
    name: str
    items: Sequence[Item]
    choices: Choices = "text"
    """``text`` compares the likelihood of each choice as the reply, for each byte of it. ``letters`` lists the choices
    below the question and compares the likelihood of their letters."""
    metric: str = "accuracy"

    @property
    def settings(self) -> dict[str, Any]:
        return {"choices": self.choices}

    async def grade(self, model: Model, item: Item) -> Outcome:
        texts = [str(choice) for choice in item.row["choices"]]
        question, replies = str(item.row["question"]), texts
        if self.choices == "letters":
            replies = list(string.ascii_uppercase[: len(texts)])
            listed = "\n".join(f"{letter}. {text}" for letter, text in zip(replies, texts, strict=True))
            question = f"{question}\n{listed}\nAnswer with the letter of the right choice."
        scores = await asyncio.gather(*(reply_logprob(model, question, reply) for reply in replies))
        rates = [score / len(reply.encode()) for score, reply in zip(scores, replies, strict=True)]
        best = max(range(len(rates)), key=rates.__getitem__)
        return Outcome([float(best == right_choice(item.row))], [{"choice": best, "logprobs": scores}])


async def reply_logprob(model: Model, question: str, reply: str) -> float:
    """Return the logprob of replying exactly this, the end of the reply included."""
    messages: list[Message] = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    datum = conversation_to_datum(messages, model.renderer, reduction="sum")
    logprobs = await target_logprobs(model.sampling_client, datum)
    weights: list[float] = datum.loss_fn_inputs["weights"].to_numpy().tolist()
    return sum(logprob * weight for logprob, weight in zip(logprobs, weights, strict=True))


def right_choice(row: Row) -> int:
    """Return the number of the right choice. Refuse a row whose answer is not one of its choices."""
    choices, answer = row["choices"], row["answer"]
    if not isinstance(choices, list) or not 2 <= len(choices) <= MAX_CHOICES or not all(map(str, choices)):
        raise InvalidInput(f"choices is {choices!r}; a list of 2 to {MAX_CHOICES} texts is accepted")
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    texts = [str(choice) for choice in choices]
    if texts.count(str(answer)) == 1:
        return texts.index(str(answer))
    letters = string.ascii_uppercase[: len(texts)]
    if isinstance(answer, str) and len(answer.strip()) == 1 and answer.strip().upper() in letters:
        return letters.index(answer.strip().upper())
    raise InvalidInput(f"answer is {answer!r}; the number of a choice from 0, its letter or its text is accepted")


def multiple_choice_task(
    data: str | None, *, name: str | None = None, limit: int | None = None, seed: int = 0, choices: str = "text"
) -> ChoiceTask:
    """Return the task of a file."""
    if choices not in get_args(Choices):
        raise InvalidInput(f"choices is {choices!r}; accepted are {', '.join(get_args(Choices))}")
    rows = check_fields(read_task_rows("multiple_choice", data), "question", "choices", "answer")
    convert_rows(rows, right_choice)
    title = name or Path(str(data)).stem
    return ChoiceTask(name=title, items=make_items(rows, limit, seed), choices=choices)  # type: ignore[arg-type]
