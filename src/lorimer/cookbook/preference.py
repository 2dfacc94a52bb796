"""Learning from preferences: DPO, and pairwise training of a model whose verdict is a reward.

Both take pairs of examples of which one is better, and raise the margin between their scores through
``forward_backward_custom``. DPO scores an answer by how much likelier it has become than under the initial weights; a
reward model scores a conversation by the logprob of its verdict. A run that is killed goes on as in ``supervised.py``,
to the same bits: nothing is sampled, and the reference is computed step by step like the loss, by passes of its own.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from lorimer import APIFuture, Datum, SamplingClient, ServiceClient, TrainingClient, types
from lorimer.chat.conversation import Message, check_messages, text_of
from lorimer.cookbook.checkpoints import Checkpoint, archive_run
from lorimer.cookbook.datasets import Dataset
from lorimer.cookbook.datums import conversation_to_datum, num_tokens
from lorimer.cookbook.evaluation import target_logprobs
from lorimer.cookbook.loops import LoopConfig, Result, Training, optim_metrics, run_loop
from lorimer.cookbook.renderers import Renderer
from lorimer.errors import InvalidInput

Kind = Literal["dpo", "reward_model"]
ROUNDING = 1e-5
VERDICT = "Is this a good answer? Reply with Yes or No."


@dataclass(frozen=True, eq=False)
class Pair:
    """Two examples; the weights of their tokens are 1 where a token counts for the score, else 0."""

    chosen: Datum
    rejected: Datum


# ── pairs from rows ───────────────────────────────────────────────────────────────────────────────────


def read_preference(row: Mapping[str, Any]) -> tuple[list[Message], Message, Message]:
    """The conversation, the better and the worse answer of a row.

    It has ``chosen`` and ``rejected``, as texts or messages, and ``prompt`` or ``instruction`` (which an ``input`` may
    follow); without either, both hold a whole conversation whose last message is the answer.
    """
    if "chosen" not in row or "rejected" not in row:
        raise InvalidInput(f"a row has the fields {sorted(row)}; chosen and rejected are needed")
    answers = [_messages(row[name], "assistant") for name in ("chosen", "rejected")]
    if "prompt" in row:
        asked = _messages(row["prompt"], "user")
    elif "instruction" in row:
        asked = _messages(f"{row['instruction']}\n\n{row.get('input') or ''}".strip(), "user")
    else:
        asked = answers[0][:-1]
        if asked != answers[1][:-1]:
            raise InvalidInput("chosen and rejected begin with different conversations; the same one is accepted")
    check_messages(asked)
    return asked, answers[0][-1], answers[1][-1]


def _messages(said: Any, role: str) -> list[Message]:
    messages: list[Message] = [{"role": role, "content": said}] if isinstance(said, str) else list(said)
    check_messages(messages)
    return messages


def dpo_pair(row: Mapping[str, Any], renderer: Renderer, max_length: int | None = None) -> Pair:
    """Both answers to the same conversation; the tokens of the answers count."""
    asked, *answers = read_preference(row)
    return Pair(*(conversation_to_datum([*asked, one], renderer, max_length, reduction="sum") for one in answers))


def reward_pair(row: Mapping[str, Any], renderer: Renderer, max_length: int | None = None) -> Pair:
    """Both conversations with the verdict Yes, whose logprob is the reward."""
    asked, *answers = read_preference(row)
    return Pair(*(verdict_datum([*asked, one], renderer, max_length) for one in answers))


def verdict_datum(messages: Sequence[Message], renderer: Renderer, max_length: int | None = None) -> Datum:
    """A conversation as a text to judge, and the verdict Yes."""
    told = "\n\n".join(f"{message['role']}: {text_of(message)}" for message in messages)
    judged: list[Message] = [
        {"role": "user", "content": f"{told}\n\n{VERDICT}"},
        {"role": "assistant", "content": "Yes"},
    ]
    return conversation_to_datum(judged, renderer, max_length, reduction="sum")


async def reward_async(sampling_client: SamplingClient, messages: Sequence[Message], renderer: Renderer) -> float:
    """What a trained reward model gives a conversation."""
    return (await score_all(sampling_client, [verdict_datum(messages, renderer)]))[0]


async def score_all(sampling_client: SamplingClient, data: Sequence[Datum]) -> list[float]:
    """The weighted sum of each example's logprobs."""
    logprobs = await asyncio.gather(*(target_logprobs(sampling_client, datum) for datum in data))
    scores: list[float] = weighted_sums(data, logprobs).tolist()
    return scores


def weighted_sums(data: Sequence[Datum], logprobs: Sequence[Any]) -> Any:
    """A tensor with the weighted sum of each example's logprobs."""
    import torch

    weights = [torch.as_tensor(datum.loss_fn_inputs["weights"].to_numpy()) for datum in data]
    return torch.stack([(weight * torch.as_tensor(one)).sum() for weight, one in zip(weights, logprobs, strict=True)])


# ── the loss ──────────────────────────────────────────────────────────────────────────────────────────


def pairwise_loss(beta: float, reference: Sequence[float]) -> Callable[[list[Datum], list[Any]], tuple[Any, Any]]:
    """``-mean log sigmoid`` of the margins, for data in which a chosen example and its rejected one alternate.

    A reward is ``beta`` times the weighted sum of an example's logprobs less its ``reference``.
    """

    def loss_fn(data: list[Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        import torch

        sums = weighted_sums(data, logprobs)
        rewards = beta * (sums - torch.tensor(reference, dtype=sums.dtype))
        margins = rewards[0::2] - rewards[1::2]
        loss = -torch.nn.functional.logsigmoid(margins).mean()
        return loss, _metrics(loss.item(), rewards.detach().tolist())

    return loss_fn


def _metrics(loss: float, rewards: Sequence[float]) -> dict[str, float]:
    pairs = list(zip(rewards[0::2], rewards[1::2], strict=True))
    return {
        "loss": loss,
        "accuracy": sum(_is_preferred(chosen - rejected) for chosen, rejected in pairs) / len(pairs),
        "margin": sum(chosen - rejected for chosen, rejected in pairs) / len(pairs),
        "chosen_reward": sum(chosen for chosen, _ in pairs) / len(pairs),
        "rejected_reward": sum(rejected for _, rejected in pairs) / len(pairs),
    }


def _is_preferred(margin: float) -> float:
    """1 or 0; half where the rewards differ by no more than rounding, as all do before the first step of DPO."""
    return 0.5 if abs(margin) < ROUNDING else float(margin > 0)


# ── the loop ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Config(LoopConfig):
    dataset: Dataset[Pair]
    kind: Kind = "dpo"
    beta: float = 0.1
    """How strongly DPO holds on to the initial weights; of a reward model it scales the reward, and 1 is usual."""
    learning_rate: float = 1e-5
    load_from: str | None = None
    """A checkpoint whose weights the run begins with, and which DPO's reference then has."""
    test_pairs: Sequence[Pair] = ()
    """Held out; ``test/accuracy``, ``test/margin`` and the rest are measured on them."""

    MAY_CHANGE: ClassVar[str] = f"{LoopConfig.MAY_CHANGE} test_pairs"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in get_args(Kind):
            raise InvalidInput(f"kind is {self.kind!r}; accepted are {', '.join(get_args(Kind))}")
        if not self.beta > 0:
            raise InvalidInput(f"beta is {self.beta}; more than 0 is accepted")

    @property
    def num_batches(self) -> int:
        return len(self.dataset)


async def train(config: Config, service: ServiceClient | None = None) -> Result:
    """Train, or resume training, until the dataset or ``max_steps`` ends."""

    async def steps(training: Training, start: int) -> Checkpoint:
        reference = await _open_reference(config, training.service) if config.kind == "dpo" else None
        return await _Loop(config, training, reference).run(start)

    return await run_loop(config, steps, service)


async def _open_reference(config: Config, service: ServiceClient) -> TrainingClient:
    """The weights that the run begins with, as a run that nobody trains.

    A sampler would do, but it computes what has just arrived together, so its rounding depends on when that was.
    """
    metadata = {"role": "reference of DPO"}
    name = f"{config.name or config.log_dir.resolve().name} (reference)"
    if config.load_from is not None:
        client = await service.create_training_client_from_state_async(
            config.load_from, user_metadata=metadata, name=name
        )
    else:  # a new adapter changes nothing, whatever its rank
        client = await service.create_lora_training_client_async(
            config.base_model, rank=1, user_metadata=metadata, name=name
        )
    await archive_run(service, client.model_id)
    return client


StepFutures = tuple[APIFuture[types.ForwardBackwardOutput], APIFuture[types.OptimStepResponse]]


class _Loop:
    def __init__(self, config: Config, training: Training, reference: TrainingClient | None) -> None:
        self._config, self._training = config, training
        self._client, self._checkpoints, self._log = training.client, training.checkpoints, training.log
        self._reference = reference
        self._of_test_pairs: list[float] | None = None

    async def run(self, start: int) -> Checkpoint:
        """A step is logged after the next one's forward pass was submitted; the server does not wait for this side.

        The reference of the next step is computed beside a backward pass, never beside a forward pass, which would
        become one pass with it or not, by chance, and be rounded otherwise.
        """
        config, total = self._config, self._training.total
        finish: Callable[[], Awaitable[None]] | None = None
        scored = asyncio.create_task(self._score(start))
        try:
            for number in range(start, total):
                begun = time.monotonic()
                save = self._checkpoints.begin_save(self._client, number) if self._training.is_saved(number) else None
                pairs, reference = await scored
                evaluated = await self._evaluate(number) if self._training.is_evaluated(number) else {}
                loss = pairwise_loss(config.beta, reference)
                fwd_bwd_future = await self._client.forward_backward_custom_async(_flat(pairs), loss)
                optim_future = self._client.optim_step(config.step_params(number))
                scored = asyncio.create_task(self._score(number + 1))
                if finish is not None:
                    await finish()
                if save is not None:
                    await save()
                finish = self._finisher(number, begun, pairs, evaluated, (fwd_bwd_future, optim_future))
            save = self._checkpoints.begin_save(self._client, total)
            if finish is not None:
                await finish()
            if metrics := await self._evaluate(total):
                self._log.log(metrics, total)
            return await save()
        finally:
            scored.cancel()

    async def _score(self, number: int) -> tuple[list[Pair], list[float]]:
        """The pairs of a step, and what the initial weights give each of their examples."""
        if number >= self._config.num_steps:
            return [], []
        pairs = self._config.dataset.get_batch(number)
        return pairs, await self._reference_of(_flat(pairs))

    async def _reference_of(self, data: list[Datum]) -> list[float]:
        if self._reference is None:
            return [0.0] * len(data)
        output = await self._reference.forward(data, "cross_entropy")
        scores: list[float] = weighted_sums(data, _logprobs(output)).tolist()
        return scores

    def _finisher(
        self, number: int, begun: float, pairs: Sequence[Pair], evaluated: dict[str, float], futures: StepFutures
    ) -> Callable[[], Awaitable[None]]:
        async def finish() -> None:
            output, optimised = await futures[0], await futures[1]
            names = _metrics(0.0, [0.0, 0.0])
            data = _flat(pairs)
            self._log.log(
                {f"train/{name}": output.metrics[name] for name in names}
                | evaluated
                | {"learning_rate": self._config.rate(number), "num_tokens": num_tokens(data), "num_pairs": len(pairs)}
                | optim_metrics(optimised)
                | {"time/latency_seconds": time.monotonic() - begun},
                number,
            )

        return finish

    async def _evaluate(self, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if pairs := list(self._config.test_pairs):
            data = _flat(pairs)
            if self._of_test_pairs is None:
                self._of_test_pairs = await self._reference_of(data)
            output = await self._client.forward(data, "cross_entropy")
            found = pairwise_loss(self._config.beta, self._of_test_pairs)(data, _logprobs(output))[1]
            metrics = {f"test/{name}": value for name, value in found.items()}
        if self._config.evaluators:
            client = await self._client.save_weights_and_get_sampling_client_async()
            metrics |= await self._training.run_evaluators(client, step)
        return metrics


def _flat(pairs: Sequence[Pair]) -> list[Datum]:
    return [datum for pair in pairs for datum in (pair.chosen, pair.rejected)]


def _logprobs(output: types.ForwardBackwardOutput) -> list[Any]:
    return [one["logprobs"].to_numpy() for one in output.loss_fn_outputs]
