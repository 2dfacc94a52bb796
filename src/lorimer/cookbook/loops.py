"""The frame of the training loops: open or resume a run, decide what is due at a step, evaluate, log and end.

``supervised.py``, ``preference.py``, ``distillation.py`` and ``rl/training.py`` hold what differs between them: the
steps. ``eval_every`` and ``save_every`` mean the same in all of them: evaluations come before a step, the end is always
evaluated and saved, and 0 does so at the end only.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

from lorimer import RestClient, SamplingClient, ServiceClient, TrainingClient, types
from lorimer.cookbook.checkpoints import Checkpoint, Checkpoints, Method, open_training_client, tell_complete
from lorimer.cookbook.evals.checkpoint_results import CheckpointResults
from lorimer.cookbook.evals.running import TaskEvaluator
from lorimer.cookbook.evaluation import Evaluator, SamplingEvaluator
from lorimer.cookbook.logs import DEFAULT_SINKS, MetricLog, open_log, read_metrics
from lorimer.cookbook.rollout_log import RolloutLog, check_options
from lorimer.cookbook.run_identity import reported_end, run_options
from lorimer.cookbook.schedules import Schedule, learning_rate
from lorimer.cookbook.service import open_service
from lorimer.errors import InvalidInput
from lorimer.types.optim import OPTIMIZERS, make_params


class Cadence(Protocol):
    """What a run needs of its configuration to know what is due."""

    @property
    def evaluators(self) -> Sequence[Evaluator]: ...
    @property
    def eval_every(self) -> int: ...
    @property
    def save_every(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class LoopConfig(ABC):
    """The settings that the loops over a dataset share."""

    log_dir: Path
    """Where metrics, configuration and the list of checkpoints go; a run found there is resumed."""
    base_model: str
    base_url: str | None = None
    """The server, as ``open_service`` finds it."""
    learning_rate: float
    """The largest; ``schedule`` and ``warmup_steps`` say how it is reached and left."""
    schedule: Schedule = "linear"
    warmup_steps: int = 0
    optimizer: str = "adamw"
    optimizer_params: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every step besides the learning rate, as `docs/optimizers.md` lists them."""
    method: Method = "lora"
    """``full`` trains the weights of the model itself; ``rank`` and ``seed`` then have no effect."""
    rank: int = 32
    seed: int = 0
    """Of the adapter; the dataset has its own."""
    load_from: str | None = None
    """A checkpoint whose weights the run begins with."""
    max_steps: int | None = None
    """Stop after so many steps, although the dataset has more."""
    evaluators: Sequence[Evaluator] = ()
    """Called with a sampling client of the current weights; their metrics are logged with the step."""
    eval_every: int = 0
    """Steps between evaluations, which come before the step; 0 evaluates at the end only."""
    save_every: int = 0
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int | None = 1
    """How many checkpoints stay on the server; ``None`` keeps all."""
    sinks: Sequence[str] = DEFAULT_SINKS
    rollout_fraction: float = 1.0
    """Of the groups that a step samples, and of the rows of an evaluation, which the server keeps for people to read.

    0 sends none, and so does a log without the sink ``server``.
    """
    rollout_bytes: int = 1_000_000
    """The most that is sent of a step, as JSON; what is beyond is left out."""
    notes: dict[str, Any] = field(default_factory=dict)
    """More of what must not change when the run is resumed: what the dataset was made from."""
    name: str | None = None
    """Of the run on the server; the name of the log directory if there is none."""
    tags: Sequence[str] = ()
    """Of the run on the server."""

    MAY_CHANGE: ClassVar[str] = (
        "log_dir base_url dataset evaluators sinks save_every keep notes name tags rollout_fraction rollout_bytes"
    )
    """Names of settings that a resumed run may have otherwise; they are not part of ``config.json``."""

    def __post_init__(self) -> None:
        for name in ("rank", "max_steps"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InvalidInput(f"{name} is {value}; 1 or more is accepted")
        check_options(self.rollout_fraction, self.rollout_bytes)
        if self.optimizer not in OPTIMIZERS:
            raise InvalidInput(f"optimizer is {self.optimizer!r}; accepted are {', '.join(OPTIMIZERS)}")
        make_params(self.optimizer, learning_rate=0.0, **self.step_fields())  # refuses unknown fields

    @property
    @abstractmethod
    def num_batches(self) -> int:
        """How many steps the dataset is enough for."""

    @property
    def num_steps(self) -> int:
        return self.num_batches if self.max_steps is None else min(self.num_batches, self.max_steps)

    def described(self) -> dict[str, Any]:
        """Return the settings that decide the result, for ``config.json``."""
        left_out = self.MAY_CHANGE.split()
        values = {name: getattr(self, name) for name in (item.name for item in fields(self)) if name not in left_out}
        if self.optimizer == "adamw" and not self.optimizer_params:
            del values["optimizer"], values["optimizer_params"]  # which older runs do not have
        if self.method == "lora":
            del values["method"]  # which older runs do not have
        return values | {"num_steps": self.num_steps} | self.notes

    def adapter_options(self) -> dict[str, Any]:
        """Return more arguments of ``open_training_client``."""
        return {}

    def step_fields(self) -> dict[str, Any]:
        """Return the fields of every step besides the learning rate."""
        return dict(self.optimizer_params)

    def step_params(self, step: int) -> types.OptimParams:
        """Return the parameters of the optimiser's step."""
        return make_params(self.optimizer, learning_rate=self.rate(step), **self.step_fields())

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return learning_rate(self.schedule, step, self.num_steps, self.learning_rate, self.warmup_steps)


@dataclass(frozen=True)
class Result:
    checkpoint: Checkpoint
    """Of the trained model."""
    metrics: dict[str, Any]
    """Of the last step, and of the evaluation after it."""


@dataclass(frozen=True)
class Training:
    """An open run: its client, its log, its checkpoints, and what is due at a step."""

    cadence: Cadence
    service: ServiceClient
    client: TrainingClient
    checkpoints: Checkpoints
    log: MetricLog
    total: int
    """How many steps the run has at its end."""
    rollouts: RolloutLog
    results: CheckpointResults = field(default_factory=CheckpointResults)

    def __post_init__(self) -> None:
        async def store_results(rest: RestClient, saved: Checkpoint) -> None:
            await self.results.add_saved(rest, saved.step, saved.sampler_path)

        self.checkpoints.on_saved = store_results

    def is_evaluated(self, step: int) -> bool:
        """Return whether the weights before this step, or at the end, are evaluated."""
        every = self.cadence.eval_every
        return step == self.total or (every > 0 and step % every == 0)

    def is_saved(self, step: int) -> bool:
        """Return whether a checkpoint is due after so many steps; the one at the end is not counted."""
        every = self.cadence.save_every
        return every > 0 and 0 < step < self.total and step % every == 0

    async def run_evaluators(self, sampling_client: SamplingClient, step: int) -> dict[str, float]:
        """Return the metrics of all evaluators, which run concurrently, of the weights after ``step`` steps.

        What they sampled is logged with the step. Results of tasks are stored beside the checkpoint of that step, if
        there is one.
        """
        found = await asyncio.gather(*(self._run(each, sampling_client, step) for each in self.cadence.evaluators))
        for number, evaluate in enumerate(self.cadence.evaluators):
            if isinstance(evaluate, SamplingEvaluator):
                self.rollouts.log(step, evaluate.take_samples(), f"evaluator {number}")
        return {name: value for metrics in found for name, value in metrics.items()}

    async def _run(self, evaluator: Evaluator, sampling_client: SamplingClient, step: int) -> dict[str, float]:
        if not isinstance(evaluator, TaskEvaluator):
            return await evaluator(sampling_client)
        measured = await evaluator.measure(sampling_client)
        path = next((saved.sampler_path for saved in self.checkpoints.all() if saved.step == step), None)
        await self.results.add_measured(RestClient(self.client.holder.connection), step, path, measured)
        return evaluator.metrics(measured)


Steps = Callable[[Training, int], Awaitable[Checkpoint]]
"""Trains an open run from a step on, and returns the checkpoint of its end."""


async def run_loop(config: LoopConfig, steps: Steps, service: ServiceClient | None) -> Result:
    """Open the run of ``config.log_dir``, new or at its last checkpoint, and train it with ``steps`` to its end."""
    if service is None:
        with open_service(config.base_model, config.base_url) as opened:
            return await run_loop(config, steps, opened)
    checkpoints = Checkpoints(config.log_dir, config.keep)
    last = checkpoints.last()
    start = last.step if last is not None else 0
    is_done = start >= config.num_steps
    run = run_options(
        config.log_dir,
        config.described(),
        num_steps=config.num_steps,
        resume_step=start,
        name=config.name,
        tags=config.tags,
    )
    with open_log(
        config.log_dir,
        config=config.described(),
        total_steps=config.num_steps,
        resume_step=start,
        sinks=() if is_done else config.sinks,
    ) as log:
        if last is not None and is_done:
            tell_complete(config.log_dir, config.num_steps)
        else:
            client, start = await open_training_client(
                service,
                base_model=config.base_model,
                method=config.method,
                rank=config.rank,
                checkpoints=checkpoints,
                load_from=config.load_from,
                seed=config.seed,
                optimizer=config.optimizer,
                run=run,
                **config.adapter_options(),
            )
            async with reported_end(client):
                log.follow(client)
                with open_rollouts(config, client) as rollouts:
                    training = Training(config, service, client, checkpoints, log, config.num_steps, rollouts)
                    last = await steps(training, start)
    lines = read_metrics(config.log_dir)[-2:]
    return Result(last, {name: value for line in lines for name, value in line.items()})


class _SentRollouts(Protocol):
    @property
    def sinks(self) -> Sequence[str]: ...
    @property
    def rollout_fraction(self) -> float: ...
    @property
    def rollout_bytes(self) -> int: ...
    @property
    def seed(self) -> int: ...


@contextmanager
def open_rollouts(config: _SentRollouts, client: TrainingClient) -> Iterator[RolloutLog]:
    """Yield where the rollouts of a loop go; what still waits at the end is sent, for a few seconds at most."""
    fraction = config.rollout_fraction if "server" in config.sinks else 0.0
    rollouts = RolloutLog(client, fraction, config.rollout_bytes, config.seed)
    try:
        yield rollouts
    finally:
        rollouts.close()


def optim_metrics(response: types.OptimStepResponse) -> dict[str, float]:
    """Return the metrics of an optimiser step under ``optim/``."""
    return {f"optim/{name}": value for name, value in (response.metrics or {}).items()}
