"""Distillation: a student learns to be like a teacher, which may be another model or the same one with a longer prompt.

On-policy, the student samples and every token's advantage is how much likelier the teacher finds it: the reverse KL
divergence. Off-policy, the student learns texts together with the teacher's K likeliest tokens at each place, or, in
prompt distillation, what the teacher answers when it reads more than the student; ``supervised.py`` trains on those.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lorimer import Datum, ModelInput, SamplingClient, SamplingParams, ServiceClient
from lorimer.cookbook.checkpoints import Checkpoint
from lorimer.cookbook.completers import StopCondition, derive_seed
from lorimer.cookbook.datasets import Dataset
from lorimer.cookbook.evaluation import Evaluator
from lorimer.cookbook.loops import LoopConfig, Result, Training, optim_metrics, run_loop
from lorimer.cookbook.rl.advantages import discounted_future_sum
from lorimer.cookbook.rl.datums import RolloutDatum
from lorimer.cookbook.rl.metrics import sampler_trainer_metrics
from lorimer.cookbook.schedules import Schedule
from lorimer.errors import InvalidInput


@dataclass(frozen=True)
class Prompt:
    """What the student reads, and what the teacher reads in its place: the same if nothing is said."""

    student: ModelInput
    teacher: ModelInput | None = None

    @property
    def of_teacher(self) -> ModelInput:
        return self.student if self.teacher is None else self.teacher


# ── off-policy ────────────────────────────────────────────────────────────────────────────────────────


async def soft_datum(teacher: SamplingClient, prompt: Prompt, answer: Sequence[int], k: int) -> Datum:
    """An answer with the teacher's ``k`` likeliest tokens at each of its places, as targets of shape ``(N, K)``.

    The weights of a place are the teacher's probabilities of these tokens, scaled to add up to one answer's share, so
    that an example counts 1 as with ``datum_from_tokens``. The prompt has none.
    """
    if k < 1 or not answer:
        raise InvalidInput(f"k is {k} and the answer has {len(answer)} tokens; 1 or more of each is accepted")
    read = ModelInput.from_ints([*prompt.of_teacher.to_ints(), *answer])
    scored = await teacher.sample_async(read, 1, SamplingParams(max_tokens=1), topk_prompt_logprobs=k)
    places = (scored.topk_prompt_logprobs or [])[-len(answer) :]
    tokens = [*prompt.student.to_ints(), *answer]
    first = prompt.student.length - 1  # predicts the first token of the answer
    targets = np.zeros((len(tokens) - 1, k), np.int64)
    weights = np.zeros((len(tokens) - 1, k), np.float32)
    for place, found in enumerate(places, first):
        likeliest = sorted(found or [], key=lambda pair: -pair[1])[:k]
        targets[place, : len(likeliest)] = [token for token, _ in likeliest]
        weights[place, : len(likeliest)] = np.exp([logprob for _, logprob in likeliest])
    weights /= weights.sum()
    text = ModelInput.from_ints(tokens[:-1])
    return Datum(text, {"target_tokens": targets, "weights": weights})  # type: ignore[dict-item]


async def write_answers(
    teacher: SamplingClient,
    prompts: Sequence[ModelInput],
    stop: StopCondition,
    *,
    max_tokens: int,
    temperature: float = 1.0,
    num_samples: int = 1,
    concurrency: int = 64,
    seed: int = 0,
) -> list[list[list[int]]]:
    """The teacher's answers to each prompt, as tokens; one that ``max_tokens`` cut is left out."""
    room = asyncio.Semaphore(concurrency)

    async def write(index: int, prompt: ModelInput) -> list[list[int]]:
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, stop=stop, seed=derive_seed(seed, index)
        )
        async with room:
            response = await teacher.sample_async(prompt, num_samples, params)
        return [one.tokens for one in response.sequences if one.stop_reason != "length" and one.tokens]

    return await asyncio.gather(*(write(index, prompt) for index, prompt in enumerate(prompts)))


# ── on-policy ─────────────────────────────────────────────────────────────────────────────────────────


async def teacher_logprobs(teacher: SamplingClient, prompt: ModelInput, answer: Sequence[int]) -> NDArray[np.float32]:
    """The logprob of each token of an answer."""
    read = ModelInput.from_ints([*prompt.to_ints(), *answer])
    scored = await teacher.compute_logprobs_async(read)
    return np.array(scored[-len(answer) :], np.float32)


def on_policy_datum(
    prompt: ModelInput,
    answer: Sequence[int],
    logprobs: Sequence[float],
    of_teacher: NDArray[np.float32],
    *,
    coef: float = 1.0,
    discount_factor: float = 0.0,
) -> RolloutDatum:
    """A sample of the student, each token with the advantage ``coef * (teacher's logprob - student's)``.

    With a discount factor a token also answers for those after it.
    """
    before = np.zeros(prompt.length - 1, np.float32)
    of_student = np.array(logprobs, np.float32)
    advantages = (coef * (of_teacher - of_student)).astype(np.float32)
    if discount_factor > 0:
        advantages = discounted_future_sum(advantages, discount_factor).astype(np.float32)
    return RolloutDatum(
        np.array([*prompt.to_ints(), *answer], np.int64),
        np.concatenate([before, of_student]),
        np.concatenate([before, advantages]),
        np.concatenate([before, np.ones(len(answer), np.float32)]),
    )


@dataclass(frozen=True, kw_only=True)
class Config(LoopConfig):
    """On-policy distillation."""

    dataset: Dataset[Prompt]
    teacher_path: str | None = None
    """Saved weights of the teacher; ``None`` is ``teacher_model`` as it is."""
    teacher_model: str | None = None
    """A base model of the same vocabulary; ``None`` is the student's own."""
    stop: StopCondition
    max_tokens: int
    num_samples: int = 4
    """Of the student, to each prompt."""
    temperature: float = 1.0
    kl_coef: float = 1.0
    kl_discount_factor: float = 0.0
    learning_rate: float = 1e-4
    schedule: Schedule = "constant"
    save_every: int = 20

    MAY_CHANGE: ClassVar[str] = f"{LoopConfig.MAY_CHANGE} eval_every"

    @property
    def num_batches(self) -> int:
        return len(self.dataset)

    def described(self) -> dict[str, Any]:
        values = super().described()
        if not self.warmup_steps:
            del values["warmup_steps"]  # which older runs do not have
        return values


async def train(config: Config, service: ServiceClient | None = None) -> Result:
    """Distil, or resume distilling, until the dataset or ``max_steps`` ends."""

    async def steps(training: Training, start: int) -> Checkpoint:
        teacher_model = None if config.teacher_path else config.teacher_model or config.base_model
        teacher = await training.service.create_sampling_client_async(config.teacher_path, base_model=teacher_model)
        return await _Loop(config, training, teacher).run(start)

    return await run_loop(config, steps, service)


@dataclass(frozen=True)
class _Loop:
    config: Config
    training: Training
    teacher: SamplingClient

    async def run(self, start: int) -> Checkpoint:
        config, training, client = self.config, self.training, self.training.client
        student = await client.save_weights_and_get_sampling_client_async()
        for number in range(start, training.total):
            begun = time.monotonic()
            evaluated = await training.run_evaluators(student, number) if training.is_evaluated(number) else {}
            data = await self._sample(student, number)
            sent = [datum.to_datum("importance_sampling") for datum in data]
            fwd_bwd_future = client.forward_backward(sent, "importance_sampling")
            optim_future = client.optim_step(config.step_params(number))
            student = await client.save_weights_and_get_sampling_client_async()
            trained = [one["logprobs"].to_numpy() for one in (await fwd_bwd_future).loss_fn_outputs]
            training.log.log(
                _sample_metrics(data, config)
                | evaluated
                | {"learning_rate": config.rate(number), "num_tokens": sum(int(datum.mask.sum()) for datum in data)}
                | sampler_trainer_metrics(data, trained)
                | optim_metrics(await optim_future)
                | {"time/step_seconds": time.monotonic() - begun},
                number,
            )
            if training.is_saved(number + 1):
                await training.checkpoints.save_async(client, number + 1)
        if metrics := await training.run_evaluators(student, training.total):
            training.log.log(metrics, training.total)
        return await training.checkpoints.save_async(client, training.total)

    async def _sample(self, student: SamplingClient, number: int) -> list[RolloutDatum]:
        config = self.config
        prompts = config.dataset.get_batch(number)

        async def play(index: int, prompt: Prompt) -> list[RolloutDatum]:
            params = SamplingParams(
                max_tokens=config.max_tokens,
                temperature=config.temperature,
                stop=config.stop,
                seed=derive_seed(config.seed, number, index),
            )
            response = await student.sample_async(prompt.student, config.num_samples, params)
            samples = [one for one in response.sequences if one.tokens]
            scored = await asyncio.gather(
                *(teacher_logprobs(self.teacher, prompt.of_teacher, one.tokens) for one in samples)
            )
            return [
                on_policy_datum(
                    prompt.student,
                    one.tokens,
                    one.logprobs or [],
                    found,
                    coef=config.kl_coef,
                    discount_factor=config.kl_discount_factor,
                )
                for one, found in zip(samples, scored, strict=True)
            ]

        played = await asyncio.gather(*(play(index, prompt) for index, prompt in enumerate(prompts)))
        return [datum for data in played for datum in data]


def _sample_metrics(data: Sequence[RolloutDatum], config: Config) -> dict[str, float]:
    num_sampled = sum(float(datum.mask.sum()) for datum in data)
    length = {"tokens_per_sample": num_sampled / len(data)}
    if config.kl_discount_factor:
        return length  # advantages then are sums over later tokens
    return {"reverse_kl": -sum(float(datum.advantages.sum()) for datum in data) / num_sampled / config.kl_coef} | length


def reverse_kl(
    teacher: SamplingClient, prompts: Sequence[Prompt], stop: StopCondition, max_tokens: int, *, name: str = "test"
) -> Evaluator:
    """``name/reverse_kl``: how far a student's samples are from the teacher, in nats per token."""

    async def evaluate(student: SamplingClient, /) -> dict[str, float]:
        async def differences(index: int, prompt: Prompt) -> NDArray[np.float32]:
            params = SamplingParams(max_tokens=max_tokens, stop=stop, seed=derive_seed(name, index))
            sampled = (await student.sample_async(prompt.student, 1, params)).sequences[0]
            found = await teacher_logprobs(teacher, prompt.of_teacher, sampled.tokens)
            return np.array(sampled.logprobs, np.float32) - found

        found = await asyncio.gather(*(differences(index, prompt) for index, prompt in enumerate(prompts)))
        return {f"{name}/reverse_kl": float(np.concatenate(found).mean())}

    return evaluate
