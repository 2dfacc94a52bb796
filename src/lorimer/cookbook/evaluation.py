"""Evaluators: functions that measure the weights behind a sampling client, and the numbers that they share.

An evaluator is any ``async (sampling_client) -> dict[str, float]``; the training loops call theirs on the way. Those
of other programs, ``inspect-ai`` and ``lm-eval``, ask a server at its OpenAI address: see ``docs/evaluation.md``.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lorimer import Datum, ModelInput, SamplingClient, SamplingParams
from lorimer.chat.conversation import Message, text_of
from lorimer.cookbook.completers import derive_seed
from lorimer.cookbook.datums import mean_nll
from lorimer.cookbook.renderers import Renderer
from lorimer.cookbook.transcripts import finite, label, message_turn, sampled_turn
from lorimer.errors import InvalidInput
from lorimer.types import Rollout, SampledSequence
from lorimer.types.estimates import pass_at_k as pass_at_k

Grader = Callable[[str, Any], float | bool | Awaitable[float | bool]]
"""How right a reply is, from 0 to 1, given the row that was asked."""


class Evaluator(Protocol):
    async def __call__(self, sampling_client: SamplingClient, /) -> dict[str, float]: ...


@runtime_checkable
class SamplingEvaluator(Evaluator, Protocol):
    """One that can tell what it sampled, for people to read."""

    def take_samples(self) -> list[Callable[[], Sequence[Rollout]]]:
        """Return the samples of the last evaluation, a function for those of each row, and forget them."""


def exact_match(field: str = "answer") -> Grader:
    """A reply is right if it is the row's field, whatever spaces are around it."""
    return lambda reply, row: reply.strip() == str(row[field]).strip()


def accuracy(
    rows: Sequence[Any],
    renderer: Renderer,
    grade: Grader,
    *,
    ask: Callable[[Any], Sequence[Message]] = lambda row: [{"role": "user", "content": str(row["question"])}],
    max_tokens: int = 256,
    temperature: float = 0.0,
    num_samples: int = 1,
    k: Sequence[int] = (),
    concurrency: int = 64,
    seed: int = 0,
    name: str = "test",
) -> Evaluator:
    """``name/accuracy``, the mean grade, and ``name/pass@k``, for which a grade of 0.5 or more is right."""
    if not rows:
        raise InvalidInput("there are no rows to evaluate on; at least one is needed")
    if any(each > num_samples for each in k):
        raise InvalidInput(f"k is {list(k)} with num_samples {num_samples}; at most that many is accepted")

    params = partial(SamplingParams, max_tokens=max_tokens, temperature=temperature, stop=renderer.get_stop_sequences())
    return _Accuracy(rows, renderer, grade, ask, params, num_samples, tuple(k), concurrency, seed, name)


@dataclass
class _Accuracy:
    """What ``accuracy`` returns: an evaluator that remembers what it sampled."""

    rows: Sequence[Any]
    renderer: Renderer
    grade: Grader
    ask: Callable[[Any], Sequence[Message]]
    params: Callable[..., SamplingParams]
    num_samples: int
    k: tuple[int, ...]
    concurrency: int
    seed: int
    name: str
    _samples: list[Callable[[], Sequence[Rollout]]] = field(default_factory=list)

    async def __call__(self, sampling_client: SamplingClient, /) -> dict[str, float]:
        room = asyncio.Semaphore(self.concurrency)

        async def grades_of(index: int, row: Any) -> tuple[list[SampledSequence], list[float]]:
            prompt = self.renderer.build_generation_prompt(self.ask(row))
            params = self.params(seed=derive_seed(self.seed, index))
            async with room:
                response = await sampling_client.sample_async(prompt, self.num_samples, params)
            replies = [text_of(self.renderer.parse_response(one.tokens)[0]) for one in response.sequences]
            return list(response.sequences), [await graded(self.grade, reply, row) for reply in replies]

        found = await asyncio.gather(*(grades_of(index, row) for index, row in enumerate(self.rows)))
        self._samples = [partial(self._rollouts, index, *one) for index, one in enumerate(found)]
        grades = [given for _, given in found]
        metrics = {f"{self.name}/accuracy": float(np.mean(grades))}
        for each in self.k:
            chances = [pass_at_k(self.num_samples, sum(one >= 0.5 for one in given), each) for given in grades]
            metrics[f"{self.name}/pass@{each}"] = float(np.mean(chances))
        return metrics

    def take_samples(self) -> list[Callable[[], Sequence[Rollout]]]:
        taken, self._samples = self._samples, []
        return taken

    def _rollouts(self, index: int, sequences: list[SampledSequence], grades: list[float]) -> list[Rollout]:
        asked = [message_turn(message) for message in self.ask(self.rows[index])]
        return [
            Rollout(
                step=0,
                kind="sample",
                split=label(self.name),
                group=str(index),
                number=number,
                turns=[*asked, sampled_turn(self.renderer.tokenizer, one.tokens, one.logprobs)],
                reward=finite(grade),
                stop_reason=one.stop_reason,
            )
            for number, (one, grade) in enumerate(zip(sequences, grades, strict=True))
        ]


async def graded(grade: Grader, reply: str, row: Any) -> float:
    """Return the grade of a reply, from a function that may be asynchronous."""
    found = grade(reply, row)
    return float(await found if inspect.isawaitable(found) else found)


def nll(data: Sequence[Datum], *, name: str = "test") -> Evaluator:
    """``name/nll``, the weighted mean of ``-logprob``, and ``name/perplexity``; by scoring prompts, not by a forward
    pass, so it measures any model that can be sampled."""
    if not data:
        raise InvalidInput("there are no examples to evaluate on; at least one is needed")

    async def evaluate(sampling_client: SamplingClient, /) -> dict[str, float]:
        logprobs = await asyncio.gather(*(target_logprobs(sampling_client, datum) for datum in data))
        value = mean_nll(data, logprobs)
        return {f"{name}/nll": value, f"{name}/perplexity": math.exp(value)}

    return evaluate


async def target_logprobs(sampling_client: SamplingClient, datum: Datum) -> list[float]:
    """The logprob of each target of an example whose targets are the next tokens."""
    targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
    tokens = [*datum.model_input.to_ints(), int(targets[-1])]
    if targets.ndim != 1 or tokens[1:] != targets.tolist():
        raise InvalidInput("the targets of an example are not its next tokens, so a sampler cannot score them")
    scored = await sampling_client.compute_logprobs_async(ModelInput.from_ints(tokens))
    return [value for value in scored[1:] if value is not None]


def together(*evaluators: Evaluator) -> Evaluator:
    """One evaluator of several, which run concurrently; a metric that two of them give is refused."""
    return _Together(evaluators)


@dataclass(frozen=True)
class _Together:
    evaluators: Sequence[Evaluator]

    async def __call__(self, sampling_client: SamplingClient, /) -> dict[str, float]:
        found: Sequence[Mapping[str, float]] = await asyncio.gather(*(run(sampling_client) for run in self.evaluators))
        metrics: dict[str, float] = {}
        for part in found:
            if twice := metrics.keys() & part.keys():
                raise InvalidInput(f"two evaluators give {sorted(twice)}; give them different names")
            metrics |= part
        return metrics

    def take_samples(self) -> list[Callable[[], Sequence[Rollout]]]:
        able = [one for one in self.evaluators if isinstance(one, SamplingEvaluator)]
        return [make for evaluator in able for make in evaluator.take_samples()]
