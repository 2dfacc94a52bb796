"""Supervised training: a loop that keeps the server busy, measures on the way, and can be interrupted.

The next step is submitted before the last one's result is there. Everything of step ``n`` is decided by ``n`` and the
configuration, and checkpoints fall between steps, so a run that is killed and started again ends as if it had not been,
to the bit where nobody else trains on the server meanwhile: passes are shared, and rounding depends on their size.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from lorimer import APIFuture, Datum, ServiceClient, types
from lorimer.cookbook.checkpoints import Checkpoint
from lorimer.cookbook.datasets import Dataset
from lorimer.cookbook.datums import mean_nll, num_tokens
from lorimer.cookbook.evaluation import Evaluator
from lorimer.cookbook.loops import LoopConfig, Result, Training, optim_metrics, run_loop
from lorimer.errors import InvalidInput

__all__ = ["Config", "Evaluator", "Result", "train"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Config(LoopConfig):
    dataset: Dataset[Datum]
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    batches_per_step: int = 1
    """Batches whose gradients are added up before the optimiser's step; the server cuts them as its memory asks."""
    beta1: float = 0.9
    """This and the next three are fields of AdamW; other optimisers have theirs in ``optimizer_params``."""
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Largest norm of the gradient; 0 does not clip."""
    test_data: Sequence[Datum] = ()
    """Held out; ``test/nll`` is measured on them."""
    submit_ahead: int = 1
    """Steps that are submitted before the result of the one before them is there."""
    user_metadata: dict[str, str] | None = None

    MAY_CHANGE: ClassVar[str] = f"{LoopConfig.MAY_CHANGE} test_data submit_ahead"

    def __post_init__(self) -> None:
        if self.batches_per_step < 1:
            raise InvalidInput(f"batches_per_step is {self.batches_per_step}; 1 or more is accepted")
        super().__post_init__()
        if self.num_steps < 1:
            raise InvalidInput(f"the dataset has {len(self.dataset)} batches, not enough for one step")

    @property
    def num_batches(self) -> int:
        return len(self.dataset) // self.batches_per_step

    def step_fields(self) -> dict[str, Any]:
        given = {"grad_clip_norm": self.grad_clip_norm, **self.optimizer_params}
        adam = {name: getattr(self, name) for name in ("beta1", "beta2", "eps", "weight_decay")}
        if self.optimizer == "adamw":
            given = adam | given
        elif changed := [name for name, value in adam.items() if value != getattr(Config, name)]:
            raise InvalidInput(f"{changed[0]} is a field of adamw; give it to {self.optimizer} in optimizer_params")
        return given

    def adapter_options(self) -> dict[str, Any]:
        names = ("train_mlp", "train_attn", "train_unembed", "user_metadata")
        return {name: getattr(self, name) for name in names}


@dataclass
class _Step:
    """A step that was submitted: what is to be awaited before it is logged."""

    number: int
    begun: float
    data: list[Datum]
    fwd_bwd_future: APIFuture[types.ForwardBackwardOutput]
    optim_future: APIFuture[types.OptimStepResponse]
    save: Callable[[], Awaitable[Checkpoint]] | None
    evaluation: "asyncio.Task[dict[str, float]] | None"


async def train(config: Config, service: ServiceClient | None = None) -> Result:
    """Train, or resume training, until the dataset or ``max_steps`` ends."""

    async def steps(training: Training, start: int) -> Checkpoint:
        return await _Loop(config, training).run(start)

    return await run_loop(config, steps, service)


class _Loop:
    def __init__(self, config: Config, training: Training) -> None:
        self._config, self._training = config, training
        self._client, self._checkpoints, self._log = training.client, training.checkpoints, training.log
        self._logged = time.monotonic()
        self._tasks: list[asyncio.Task[Any]] = []

    async def run(self, start: int) -> Checkpoint:
        total = self._training.total
        submitted: deque[_Step] = deque()
        try:
            for number in range(start, total):
                submitted.append(await self._submit(number))
                if len(submitted) > self._config.submit_ahead:
                    await self._finish(submitted.popleft())
            save = self._checkpoints.begin_save(self._client, total)
            evaluation = await self._evaluate(total)
            while submitted:
                await self._finish(submitted.popleft())
            # Logged before the checkpoint that says the run is done.
            if metrics := await evaluation:
                self._log.log(metrics, total)
            return await save()
        finally:
            for task in self._tasks:
                task.cancel()

    async def _submit(self, number: int) -> _Step:
        """Send everything of one step; the server takes it in this order, whatever is awaited when."""
        config = self._config
        begun = time.monotonic()
        save = self._checkpoints.begin_save(self._client, number) if self._training.is_saved(number) else None
        evaluation = await self._evaluate(number) if self._training.is_evaluated(number) else None
        first = number * config.batches_per_step
        batches = range(first, first + config.batches_per_step)
        # One call: of several, those that wait together become one pass, and its size decides how it is rounded.
        data = [datum for index in batches for datum in config.dataset.get_batch(index)]
        fwd_bwd_future = self._client.forward_backward(data, "cross_entropy")
        optim_future = self._client.optim_step(config.step_params(number))
        return _Step(number, begun, data, fwd_bwd_future, optim_future, save, evaluation)

    async def _finish(self, step: _Step) -> None:
        if step.save is not None:
            await step.save()
        evaluated = await step.evaluation if step.evaluation is not None else {}
        logprobs = [item["logprobs"].to_numpy() for item in (await step.fwd_bwd_future).loss_fn_outputs]
        optimised = await step.optim_future
        now = time.monotonic()
        metrics: dict[str, float | int | str] = {
            "train/nll": mean_nll(step.data, logprobs),
            **evaluated,
            "learning_rate": self._config.rate(step.number),
            "num_tokens": num_tokens(step.data),
            "num_examples": len(step.data),
            **optim_metrics(optimised),
            "time/step_seconds": now - self._logged,
            "time/latency_seconds": now - step.begun,
        }
        self._logged = now
        self._log.log(metrics, step.number)

    async def _evaluate(self, step: int) -> "asyncio.Task[dict[str, float]]":
        """Begin to measure the weights as they are now; training goes on meanwhile."""
        test_data = list(self._config.test_data)
        output = self._client.forward(test_data, "cross_entropy") if test_data else None
        sampler = None
        if self._config.evaluators:
            sampler = self._begin(self._client.save_weights_and_get_sampling_client_async())
            await asyncio.sleep(0)  # the task submits what it waits for, in its place before the next step

        async def evaluate() -> dict[str, float]:
            metrics: dict[str, float] = {}
            if output is not None:
                logprobs = [item["logprobs"].to_numpy() for item in (await output).loss_fn_outputs]
                metrics["test/nll"] = mean_nll(test_data, logprobs)
            if sampler is not None:
                metrics |= await self._training.run_evaluators(await sampler, step)
            return metrics

        return self._begin(evaluate())

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """A task that ends with the loop at the latest."""
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.create_task(coroutine))
        return self._tasks[-1]
