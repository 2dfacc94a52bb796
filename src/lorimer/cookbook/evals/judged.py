"""Open questions in the manner of MT-bench, judged by a model: a rating from 1 to 10, or a comparison with another.

A rating sees one conversation alone, so nothing depends on a position. A comparison is judged in both orders, and only
a verdict that survives the exchange of places counts as a win or a loss. A judgement whose text has no verdict is
completed with the likeliest one, so that every item has a grade.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lorimer import ModelInput
from lorimer.chat.conversation import Message
from lorimer.cookbook.datasets import Row, check_fields, convert_rows
from lorimer.cookbook.evals.data_files import read_task_rows
from lorimer.cookbook.evals.eval_tasks import Item, Model, Outcome, SamplingSettings, make_items, sample_replies
from lorimer.errors import InvalidInput

RATING_PROMPT = """You are an impartial judge. Rate the answers of an assistant in the conversation below.
Consider whether they are helpful, relevant, accurate, deep and follow the instructions; do not reward length.
First write a short explanation. Then give one rating from 1 to 10 for the whole conversation, in this form:
Rating: [[5]]

{conversation}"""

PAIR_PROMPT = """You are an impartial judge. Two assistants answered the same questions. Decide which is better.
Consider whether they are helpful, relevant, accurate, deep and follow the instructions. Neither the order of the
assistants nor the length of their answers matters. First write a short explanation. Then give a verdict:
Verdict: [[A]] if assistant A is better, Verdict: [[B]] if assistant B is better, Verdict: [[C]] if they are as good.

[Assistant A]
{first}

[Assistant B]
{second}"""

RATINGS = {f"{number}": float(number) for number in range(1, 11)}
VERDICTS = {"A": 1.0, "B": 0.0, "C": 0.5}
"""What a verdict is worth to assistant A."""
JUDGE_TOKENS = 512


@dataclass(frozen=True)
class Judge:
    name: str
    model: Model
    max_tokens: int = JUDGE_TOKENS

    async def decide(self, prompt: str, word: str, worth: Mapping[str, float]) -> tuple[float, str]:
        """Return what the judge's verdict is worth, and its text: the last ``[[verdict]]`` that it wrote.

        Where it wrote none, the likeliest continuation of its text by ``word: [[verdict]]`` is taken.
        """
        messages: list[Message] = [{"role": "user", "content": prompt}]
        greedy = SamplingSettings(max_tokens=self.max_tokens)
        (text,) = await sample_replies(self.model, messages, greedy)
        if (verdict := read_verdict(text, worth)) is not None:
            return worth[verdict], text
        begun = f"{text.rstrip()}\n\n{word}: [["
        scores = await asyncio.gather(*(self._logprob(messages, begun, f"{verdict}]]") for verdict in worth))
        likeliest = max(zip(scores, worth, strict=True), key=lambda pair: pair[0])[1]
        return worth[likeliest], f"{begun}{likeliest}]]"

    async def _logprob(self, messages: Sequence[Message], begun: str, end: str) -> float:
        """Return the mean logprob of the tokens by which the whole reply is longer than its beginning."""
        renderer = self.model.renderer
        start = renderer.build_generation_prompt(messages, prefill=begun).to_ints()
        whole = renderer.build_generation_prompt(messages, prefill=begun + end).to_ints()
        same = next(
            (place for place, pair in enumerate(zip(start, whole, strict=False)) if pair[0] != pair[1]), len(start)
        )
        scored = await self.model.sampling_client.compute_logprobs_async(ModelInput.from_ints(whole))
        tail = [value for value in scored[same:] if value is not None]
        return sum(tail) / len(tail)


def read_verdict(text: str, worth: Mapping[str, float]) -> str | None:
    """Return the last verdict in double brackets that is one of ``worth``; None if there is none."""
    found = [verdict for verdict in re.findall(r"\[\[\s*(\w+)\s*\]\]", text) if verdict in worth]
    return found[-1] if found else None


async def converse(model: Model, turns: Sequence[str], sampling: SamplingSettings, item_id: str) -> list[Message]:
    """Return the conversation in which a model answers each turn in the light of those before it."""
    messages: list[Message] = []
    for number, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        (reply,) = await sample_replies(model, messages, sampling, item_id, number)
        messages.append({"role": "assistant", "content": reply})
    return messages


def written(messages: Sequence[Message]) -> str:
    names = {"user": "User", "assistant": "Assistant"}
    return "\n\n".join(f"{names[message['role']]}: {message['content']}" for message in messages)


@dataclass(frozen=True, kw_only=True)
class JudgedTask:
    """Without ``opponent`` a grade is a rating from 1 to 10; with one it is 1 for a win, 0 for a loss, else 0.5."""

    name: str
    items: Sequence[Item]
    judge: Judge
    opponent: Model | None = None
    opponent_name: str = ""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)

    @property
    def metric(self) -> str:
        return "win rate" if self.opponent else "rating"

    @property
    def settings(self) -> dict[str, Any]:
        given = {"judge": self.judge.name, "judge_max_tokens": self.judge.max_tokens, **self.sampling.as_dict()}
        return given | ({"against": self.opponent_name} if self.opponent else {})

    async def grade(self, model: Model, item: Item) -> Outcome:
        turns = [str(turn) for turn in item.row["turns"]]
        said = written(await converse(model, turns, self.sampling, item.item_id))
        if self.opponent is None:
            rating, text = await self.judge.decide(RATING_PROMPT.format(conversation=said), "Rating", RATINGS)
            return Outcome([rating], [{"conversation": said, "judgement": text}])
        other = written(await converse(self.opponent, turns, self.sampling, item.item_id))
        found = await asyncio.gather(*(self._verdict(*pair) for pair in ((said, other), (other, said))))
        (first, here), (second, there) = found
        grade = consistent(first, 1.0 - second)
        return Outcome([grade], [{"conversation": said, "opponent": other, "judgements": [here, there]}])

    async def _verdict(self, first: str, second: str) -> tuple[float, str]:
        return await self.judge.decide(PAIR_PROMPT.format(first=first, second=second), "Verdict", VERDICTS)


def consistent(in_first_place: float, in_second_place: float) -> float:
    """Return 1 or 0 for an answer that wins or loses in both places, and 0.5 where the place decides."""
    return in_first_place if in_first_place == in_second_place else 0.5


def check_turns(row: Row) -> None:
    turns = row["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise InvalidInput(f"turns is {turns!r}; a list of one text or more is accepted")


def mt_bench_task(
    data: str | None,
    judge: Judge,
    *,
    opponent: Model | None = None,
    opponent_name: str = "",
    limit: int | None = None,
    sampling: SamplingSettings | None = None,
) -> JudgedTask:
    """Questions of one or more turns (Zheng et al., 2023): rows with ``turns``."""
    chosen = sampling or SamplingSettings()
    if chosen.num_samples != 1:
        raise InvalidInput(f"samples is {chosen.num_samples}; a judged task takes one reply of each item")
    rows = check_fields(read_task_rows("mt_bench", data), "turns")
    convert_rows(rows, check_turns)
    return JudgedTask(
        name="mt_bench",
        items=make_items(rows, limit, chosen.seed),
        judge=judge,
        opponent=opponent,
        opponent_name=opponent_name,
        sampling=chosen,
    )
