"""Supervised training: a loop that keeps the server busy, measures on the way, and can be interrupted.

The next step is submitted before the last one's result is there. Everything of step ``n`` is decided by ``n`` and the
configuration, and checkpoints fall between steps, so a run that is killed and started again ends as if it had not been,
to the bit where nobody else trains on the server meanwhile: passes are shared, and rounding depends on their size.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lorimer import APIFuture, Datum, SamplingClient, ServiceClient, TrainingClient, types
from lorimer.cookbook.checkpoints import Checkpoint, Checkpoints, open_training_client, tell_complete
from lorimer.cookbook.datasets import Dataset
from lorimer.cookbook.datums import mean_nll, num_tokens
from lorimer.cookbook.logs import DEFAULT_SINKS, MetricLog, open_log, read_metrics
from lorimer.cookbook.schedules import Schedule, learning_rate
from lorimer.cookbook.service import open_service
from lorimer.errors import InvalidInput

T = TypeVar("T")
Evaluator = Callable[[SamplingClient], Awaitable[dict[str, float]]]
"""Measures the weights of a sampling client; ``evaluation.py`` has some."""


@dataclass(frozen=True, kw_only=True)
class Config:
    log_dir: Path
    """Where metrics, configuration and the list of checkpoints go; a run found there is resumed."""
    base_model: str
    base_url: str | None = None
    """The server, as ``open_service`` finds it."""
    dataset: Dataset[Datum]
    learning_rate: float
    """The largest; ``schedule`` and ``warmup_steps`` say how it is reached and left."""
    schedule: Schedule = "linear"
    warmup_steps: int = 0
    rank: int = 32
    seed: int = 0
    """Of the adapter; the dataset has its own."""
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    load_from: str | None = None
    """A checkpoint whose weights the run begins with."""
    batches_per_step: int = 1
    """Batches whose gradients are added up before the optimiser's step; the server cuts them as its memory asks."""
    max_steps: int | None = None
    """Stop after so many steps, although the dataset has more."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Largest norm of the gradient; 0 does not clip."""
    test_data: Sequence[Datum] = ()
    """Held out; ``test/nll`` is measured on them."""
    evaluators: Sequence[Evaluator] = ()
    """Given a sampling client of the present weights; their metrics are logged with the step."""
    eval_every: int = 0
    """Steps between evaluations, which come before the step; 0 evaluates at the end only."""
    save_every: int = 0
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int | None = 1
    """How many checkpoints stay on the server; ``None`` keeps all."""
    submit_ahead: int = 1
    """Steps that are submitted before the result of the one before them is there."""
    sinks: Sequence[str] = DEFAULT_SINKS
    user_metadata: dict[str, str] | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    """More of what must not change when the run is resumed: what the dataset was made from."""

    def __post_init__(self) -> None:
        for name in ("batches_per_step", "rank"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; 1 or more is accepted")
        if self.max_steps is not None and self.max_steps < 1:
            raise InvalidInput(f"max_steps is {self.max_steps}; 1 or more is accepted")
        if self.num_steps < 1:
            raise InvalidInput(f"the dataset has {len(self.dataset)} batches, not enough for one step")

    @property
    def num_steps(self) -> int:
        steps = len(self.dataset) // self.batches_per_step
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def described(self) -> dict[str, Any]:
        """What decides the result, for ``config.json``."""
        left_out = "log_dir base_url dataset test_data evaluators sinks submit_ahead save_every keep notes".split()
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in left_out}
        return values | {"num_steps": self.num_steps} | self.notes


@dataclass(frozen=True)
class Result:
    checkpoint: Checkpoint
    """Of the trained model."""
    metrics: dict[str, Any]
    """Of the last step, and of the evaluation after it."""


@dataclass
class _Step:
    """A step that was submitted: what is to be awaited before it is logged."""

    number: int
    begun: float
    data: list[Datum]
    passed: APIFuture[types.ForwardBackwardOutput]
    optimised: APIFuture[types.OptimStepResponse]
    save: Callable[[], Awaitable[Checkpoint]] | None
    evaluation: "asyncio.Task[dict[str, float]] | None"


async def train(config: Config, service: ServiceClient | None = None) -> Result:
    """Train, or go on training, until the dataset or ``max_steps`` ends."""
    if service is None:
        with open_service(config.base_model, config.base_url) as opened:
            return await train(config, opened)
    checkpoints = Checkpoints(config.log_dir, config.keep)
    last = checkpoints.last()
    start = last.step if last is not None else 0
    is_done = start >= config.num_steps
    with open_log(
        config.log_dir,
        config=config.described(),
        total_steps=config.num_steps,
        resume_step=start,
        sinks=() if is_done else config.sinks,
    ) as log:
        if last is not None and is_done:
            tell_complete(config.log_dir, config.num_steps)
            return Result(last, _last_metrics(config))
        client, start = await open_training_client(
            service,
            base_model=config.base_model,
            rank=config.rank,
            checkpoints=checkpoints,
            load_from=config.load_from,
            seed=config.seed,
            train_mlp=config.train_mlp,
            train_attn=config.train_attn,
            train_unembed=config.train_unembed,
            user_metadata=config.user_metadata,
        )
        log.follow(client)
        checkpoint = await _Loop(config, client, checkpoints, log).run(start)
    return Result(checkpoint, _last_metrics(config))


def _last_metrics(config: Config) -> dict[str, Any]:
    lines = read_metrics(config.log_dir)[-2:]
    return {name: value for line in lines for name, value in line.items()}


class _Loop:
    def __init__(self, config: Config, client: TrainingClient, checkpoints: Checkpoints, log: MetricLog) -> None:
        self._config, self._client, self._checkpoints, self._log = config, client, checkpoints, log
        self._logged = time.monotonic()
        self._tasks: list[asyncio.Task[Any]] = []

    async def run(self, start: int) -> Checkpoint:
        total = self._config.num_steps
        submitted: deque[_Step] = deque()
        try:
            for number in range(start, total):
                submitted.append(await self._submit(number, start))
                if len(submitted) > self._config.submit_ahead:
                    await self._finish(submitted.popleft())
            save = self._checkpoints.begin_save(self._client, total)
            evaluation = await self._evaluate()
            while submitted:
                await self._finish(submitted.popleft())
            # On record before the checkpoint that says the run is done.
            if metrics := await evaluation:
                self._log.log(metrics, total)
            return await save()
        finally:
            for task in self._tasks:
                task.cancel()

    async def _submit(self, number: int, start: int) -> _Step:
        """Send everything of one step; the server takes it in this order, whatever is awaited when."""
        config = self._config
        begun = time.monotonic()
        saves = config.save_every and number > start and number % config.save_every == 0
        save = self._checkpoints.begin_save(self._client, number) if saves else None
        evaluates = config.eval_every and number % config.eval_every == 0
        evaluation = await self._evaluate() if evaluates else None
        first = number * config.batches_per_step
        batches = range(first, first + config.batches_per_step)
        # One call: of several, those that wait together become one pass, and its size decides how it is rounded.
        data = [datum for index in batches for datum in config.dataset.get_batch(index)]
        passed = self._client.forward_backward(data, "cross_entropy")
        optimised = self._client.optim_step(
            types.AdamParams(
                learning_rate=self._rate(number),
                beta1=config.beta1,
                beta2=config.beta2,
                eps=config.eps,
                weight_decay=config.weight_decay,
                grad_clip_norm=config.grad_clip_norm,
            )
        )
        return _Step(number, begun, data, passed, optimised, save, evaluation)

    async def _finish(self, step: _Step) -> None:
        if step.save is not None:
            await step.save()
        evaluated = await step.evaluation if step.evaluation is not None else {}
        logprobs = [item["logprobs"].to_numpy() for item in (await step.passed).loss_fn_outputs]
        optimised = await step.optimised
        now = time.monotonic()
        metrics: dict[str, float | int | str] = {
            "train/nll": mean_nll(step.data, logprobs),
            **evaluated,
            "learning_rate": self._rate(step.number),
            "num_tokens": num_tokens(step.data),
            "num_examples": len(step.data),
            **{f"optim/{name}": value for name, value in (optimised.metrics or {}).items()},
            "time/step_seconds": now - self._logged,
            "time/latency_seconds": now - step.begun,
        }
        self._logged = now
        self._log.log(metrics, step.number)

    def _rate(self, number: int) -> float:
        config = self._config
        return learning_rate(config.schedule, number, config.num_steps, config.learning_rate, config.warmup_steps)

    async def _evaluate(self) -> "asyncio.Task[dict[str, float]]":
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
                client = await sampler
                for found in await asyncio.gather(*(run(client) for run in self._config.evaluators)):
                    metrics |= found
            return metrics

        return self._begin(evaluate())

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """A task that ends with the loop at the latest."""
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.create_task(coroutine))
        return self._tasks[-1]
