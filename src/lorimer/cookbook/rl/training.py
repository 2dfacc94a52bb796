"""Training loops: synchronous, streamed in minibatches, and, in ``asynchronous.py``, bounded off-policy.

A step samples groups from the current weights, turns rewards into advantages, and updates. With several minibatches
their passes begin while later groups are still being sampled; the update is the same. A run that was interrupted goes
on at its last checkpoint: every draw derives from (seed, batch, group, trajectory, turn), so it ends as it would have.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from lorimer import SamplingClient, ServiceClient, TrainingClient
from lorimer.cookbook.checkpoints import Checkpoint, Checkpoints, Method, open_training_client, tell_complete
from lorimer.cookbook.evaluation import Evaluator
from lorimer.cookbook.logs import DEFAULT_SINKS, JsonlSink, open_log
from lorimer.cookbook.loops import Training, open_rollouts
from lorimer.cookbook.renderers import Renderer, get_renderer
from lorimer.cookbook.rl.advantages import group_advantages
from lorimer.cookbook.rl.envs import RLDataset, TrajectoryGroup
from lorimer.cookbook.rl.metrics import rollout_metrics, staleness_metrics
from lorimer.cookbook.rl.rollouts import Policy, do_group_rollout, raise_if_all_lost
from lorimer.cookbook.rl.transcripts import group_rollouts
from lorimer.cookbook.rl.updates import Update, UpdateConfig
from lorimer.cookbook.rollout_log import check_options
from lorimer.cookbook.run_identity import reported_end, run_options
from lorimer.cookbook.service import get_tokenizer, open_service
from lorimer.errors import InvalidInput

T = TypeVar("T")

TRANSCRIPTS_FILE = "rollouts.jsonl"
FIRST = ("reward/total", "correct", "by_group/frac_mixed", "ac_tokens_per_turn", "frac_truncated")
"""Metrics of ``env/all`` that come first in the log, for displays with little room."""

DatasetBuilder = Callable[[Renderer], tuple[RLDataset, RLDataset | None]]


@dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """Sampling goes on while an update is computed, from weights that are some updates old."""

    max_steps_off_policy: int = 1
    """A group sampled from weights older than this many steps is not learned from."""
    groups_per_batch: int | None = None
    """Of one step; ``None`` is as many as the first batch of the dataset has."""
    stale: Literal["requeue", "drop"] = "requeue"
    """Whether a group that is too old is sampled again."""

    def __post_init__(self) -> None:
        if self.max_steps_off_policy < 1:
            raise InvalidInput(
                f"max_steps_off_policy is {self.max_steps_off_policy}; 1 or more is accepted, and training without "
                "AsyncConfig is on-policy"
            )
        if self.stale not in ("requeue", "drop"):
            raise InvalidInput(f"stale is {self.stale!r}; 'requeue' and 'drop' are accepted")


@dataclass(frozen=True, kw_only=True)
class Config(UpdateConfig):
    """A run of RL."""

    base_model: str
    dataset_builder: DatasetBuilder
    """Makes the training set, and a test set or ``None``, with the renderer of the model."""
    log_dir: Path
    max_tokens: int
    """Of one turn."""
    base_url: str | None = None
    method: Method = "lora"
    """``full`` trains the weights of the model itself; ``rank`` then has no effect."""
    rank: int = 32
    load_from: str | None = None
    """A saved state to begin with, for instance of supervised training."""
    renderer_name: str = "auto"
    num_steps: int | None = None
    """``None`` is one for each batch of the dataset."""
    temperature: float = 1.0
    max_trajectory_tokens: int | None = None
    """Of prompt and turns together; give the model's context for episodes of many turns."""
    num_substeps: int = 1
    """Updates for each batch; the second and later ones are off-policy by so many updates."""
    num_minibatches: int = 1
    """Passes for each update; with more than one, training begins before all groups of a batch are sampled."""
    asynchronous: AsyncConfig | None = None
    kl_reference: str | None = None
    """Saved sampler weights; ``None`` is the base model."""
    evaluators: Sequence[Evaluator] = ()
    eval_every: int = 0
    """Steps between evaluations, which come before the step; 0 evaluates at the end only."""
    eval_temperature: float = 0.0
    save_every: int = 20
    keep: int | None = 2
    extra_metrics: Sequence[Callable[[], dict[str, float]]] = ()
    """Asked after each step, for instance ``GraderPool.take_metrics``."""
    num_groups_to_log: int = 1
    """Groups of each step whose transcripts go to ``rollouts.jsonl``."""
    rollout_fraction: float = 1.0
    """Of the groups of a step, and of an evaluation, which the server keeps for people to read.

    0 sends none, and so does a log without the sink ``server``.
    """
    rollout_bytes: int = 1_000_000
    """The most that is sent of a step, as JSON; groups beyond it are left out."""
    seed: int = 0
    sinks: Sequence[str] = DEFAULT_SINKS
    notes: dict[str, Any] = field(default_factory=dict)
    """More of what must not change when the run goes on: what the dataset was made from."""
    name: str | None = None
    """Of the run on the server; the name of the log directory if there is none."""
    tags: Sequence[str] = ()
    """Of the run on the server."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self.rollout_fraction, self.rollout_bytes)
        for name in ("num_substeps", "num_minibatches", "max_tokens", "save_every", "rank", "num_steps"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; 1 or more is accepted")

    def recorded(self) -> dict[str, Any]:
        """What must be the same when the run goes on."""
        free = (
            "dataset_builder evaluators extra_metrics log_dir base_url sinks keep save_every eval_every notes".split()
        )
        free += ["eval_temperature", "num_groups_to_log", "name", "tags", "rollout_fraction", "rollout_bytes"] + [
            "num_steps"
        ] * (self.lr_schedule == "constant")
        free += ["method"] * (self.method == "lora")  # which older runs do not have
        values = {name: value for name, value in vars(self).items() if name not in free}
        return values | {"asynchronous": self.asynchronous and asdict(self.asynchronous)} | self.notes


@dataclass(frozen=True, kw_only=True)
class Result:
    """Where the trained weights are, and how good they were at the end."""

    state_path: str
    sampler_path: str
    num_steps: int
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""


async def train(config: Config, service: ServiceClient | None = None) -> Result:
    """Train, or go on training, in ``config.log_dir``."""
    if service is None:
        with open_service(config.base_model, config.base_url) as service:
            return await train(config, service)
    tokenizer = await asyncio.to_thread(get_tokenizer, service, config.base_model)
    dataset, test_set = config.dataset_builder(get_renderer(config.renderer_name, tokenizer))
    total = len(dataset) if config.num_steps is None else config.num_steps
    checkpoints = Checkpoints(config.log_dir, config.keep)
    last = checkpoints.last()
    client, start = await open_training_client(
        service,
        base_model=config.base_model,
        method=config.method,
        rank=config.rank,
        checkpoints=checkpoints,
        load_from=config.load_from,
        seed=config.seed,
        run=run_options(
            config.log_dir,
            config.recorded(),
            num_steps=total,
            resume_step=last.step if last else 0,
            name=config.name,
            tags=config.tags,
        ),
    )
    async with reported_end(client):
        return await train_run(config, service, client, checkpoints, start, total, tokenizer, dataset, test_set)


async def train_run(
    config: Config,
    service: ServiceClient,
    client: TrainingClient,
    checkpoints: Checkpoints,
    start: int,
    total: int,
    tokenizer: Any,
    dataset: RLDataset,
    test_set: RLDataset | None,
) -> Result:
    """Train an open run from a step on."""
    if start >= total:
        tell_complete(config.log_dir, total)
    reference = None
    if config.kl_penalty_coef:
        base_model = None if config.kl_reference else config.base_model
        reference = await service.create_sampling_client_async(model_path=config.kl_reference, base_model=base_model)
    log = open_log(config.log_dir, config=config.recorded(), total_steps=total, resume_step=start, sinks=config.sinks)
    log.follow(client)
    transcripts = JsonlSink(Path(config.log_dir) / TRANSCRIPTS_FILE, start)
    with log, open_rollouts(config, client) as rollouts:
        training = Training(config, service, client, checkpoints, log, total, rollouts)
        run = Run(config, training, transcripts, tokenizer, dataset, test_set, reference)
        try:
            return await run.train(start)
        finally:
            transcripts.close()


@dataclass(frozen=True)
class Run:
    """What the loops share: clients and logs of one run, and the parts of a step."""

    config: Config
    training: Training
    transcripts: JsonlSink
    tokenizer: Any
    dataset: RLDataset
    test_set: RLDataset | None
    reference: SamplingClient | None

    @property
    def total(self) -> int:
        return self.training.total

    async def train(self, start: int) -> Result:
        from lorimer.cookbook.rl.asynchronous import train_off_policy

        loop = train_on_policy if self.config.asynchronous is None else train_off_policy
        policy, extra = await loop(self, start)
        last = self.training.checkpoints.last()
        if last is None or last.step < self.total:
            last = await self.save(self.total, extra)
        metrics = await self.evaluate(policy, self.total)
        if metrics:
            self.training.log.log(metrics, self.total)
        return Result(state_path=last.state_path, sampler_path=last.sampler_path, num_steps=self.total, metrics=metrics)

    async def policy(self, step: int) -> Policy:
        """The weights as they are after ``step`` steps, to sample from."""
        return Policy(
            sampling_client=await self.training.client.save_weights_and_get_sampling_client_async(),
            max_tokens=self.config.max_tokens,
            temperature=self.config.temperature,
            seed=self.config.seed,
            max_trajectory_tokens=self.config.max_trajectory_tokens,
            step=step,
            run_id=self.training.client.model_id,
        )

    def update(self, step: int) -> Update:
        return Update(self.training.client, self.config, step, self.total, self.reference)

    async def evaluate(self, policy: Policy, step: int) -> dict[str, float]:
        """Metrics of the test set and the evaluators, where the step is one to evaluate at."""
        if not self.training.is_evaluated(step):
            return {}
        metrics: dict[str, float] = {}
        if self.test_set:
            log = partial(self.log_test, step)
            metrics = await evaluate_on(self.test_set, policy, self.config.eval_temperature, log=log)
        return metrics | await self.training.run_evaluators(policy.sampling_client, policy.step)

    def log_test(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Have the server keep what the policy answered to the test set."""
        rollouts = [
            partial(group_rollouts, group, str(index), self.tokenizer, step=step, kind="sample", split="test")
            for index, group in enumerate(groups)
        ]
        self.training.rollouts.log(step, rollouts, "test")

    def log_rollouts(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Have the server keep what the policy was trained on."""
        rollouts = [
            partial(
                group_rollouts,
                group,
                str(index),
                self.tokenizer,
                step=step,
                advantages=self._advantages(group),
            )
            for index, group in enumerate(groups)
        ]
        self.training.rollouts.log(step, rollouts)

    def _advantages(self, group: TrajectoryGroup) -> list[float]:
        rewards, config = group.get_total_rewards(), self.config
        found: list[float] = group_advantages(rewards, config.baseline, config.normalise_advantages).tolist()
        return found

    def report(self, step: int, groups: Sequence[TrajectoryGroup], metrics: dict[str, float], begun: float) -> None:
        """Log a step. Metrics of rollouts come first."""
        found = rollout_metrics(groups) | staleness_metrics(groups, step)
        first = {f"env/all/{name}": found[f"env/all/{name}"] for name in FIRST if f"env/all/{name}" in found}
        seconds = time.monotonic() - begun
        num_tokens = found["env/all/total_ac_tokens"]
        speed = {"num_tokens": num_tokens, "tokens_per_second": num_tokens / seconds, "time/total": seconds}
        for extra in self.config.extra_metrics:
            metrics |= extra()
        self.training.log.log(first | metrics | speed | found, step)
        self.log_rollouts(step, groups)
        for index, group in enumerate(groups[: self.config.num_groups_to_log]):
            self._write_transcripts(step, index, group)

    def _write_transcripts(self, step: int, index: int, group: TrajectoryGroup) -> None:
        rewards = group.get_total_rewards()
        for number, (trajectory, reward) in enumerate(zip(group.trajectories_G, rewards, strict=True)):
            if trajectory.transitions:
                last = trajectory.transitions[-1]
                text = self.tokenizer.decode(last.ob.to_ints() + last.ac.tokens)
                place = {"group": index, "trajectory": number, "reward": reward, "text": text}
                self.transcripts.log(place | last.logs, step)

    async def save(self, step: int, extra: dict[str, Any]) -> Checkpoint:
        return await self.training.checkpoints.save_async(self.training.client, step, extra)

    async def save_if_due(self, step: int, extra: dict[str, Any]) -> None:
        if self.training.is_saved(step):
            await self.save(step, extra)


async def train_on_policy(run: Run, start: int) -> tuple[Policy, dict[str, Any]]:
    """Every group is sampled from the weights that it updates. Answers the last weights, and nothing to remember."""
    config = run.config
    policy = await run.policy(start)
    for step in range(start, run.total):
        begun = time.monotonic()
        metrics = await run.evaluate(policy, step)
        builders = run.dataset.get_batch(step % len(run.dataset))
        tasks = [
            asyncio.create_task(do_group_rollout(builder, policy.seeded(step, index)))
            for index, builder in enumerate(builders)
        ]
        update = run.update(step)
        try:
            groups = await learn(update, tasks, config.num_substeps, config.num_minibatches)
        finally:
            for task in tasks:
                task.cancel()
        update_metrics, policy = await asyncio.gather(update.finish(), run.policy(step + 1))
        run.report(step, groups, metrics | update_metrics, begun)
        await run.save_if_due(step + 1, {})
    return policy, {}


async def learn(
    update: Update, tasks: Sequence[Awaitable[TrajectoryGroup]], num_substeps: int, num_minibatches: int
) -> list[TrajectoryGroup]:
    """Give groups to an update in their order, each minibatch as soon as it is complete."""
    groups: list[TrajectoryGroup] = []
    begun = time.monotonic()
    for part in split(tasks, num_substeps):
        for minibatch in split(part, num_minibatches):
            found = await asyncio.gather(*minibatch)
            update.metrics["time/sampling"] = time.monotonic() - begun
            groups += found
            await update.add(found)
        await update.step_optimizer()
    raise_if_all_lost(groups)
    return groups


def split(items: Sequence[T], num_parts: int) -> list[Sequence[T]]:
    """Parts of nearly the same size, in order; none is empty."""
    num_parts = max(1, min(num_parts, len(items)))
    bounds = [len(items) * part // num_parts for part in range(num_parts + 1)]
    return [items[begin:end] for begin, end in pairwise(bounds)]


async def evaluate_on(
    dataset: RLDataset,
    policy: Policy,
    temperature: float = 0.0,
    name: str = "test",
    *,
    log: Callable[[Sequence[TrajectoryGroup]], None] | None = None,
) -> dict[str, float]:
    """The metrics of ``env/all`` over every group of a dataset, under ``name/``. Seeds do not depend on the step.

    ``log`` is called with the groups.
    """
    policy = replace(policy, temperature=temperature)
    builders = [builder for index in range(len(dataset)) for builder in dataset.get_batch(index)]
    groups = await asyncio.gather(
        *(do_group_rollout(builder, policy.seeded(name, index)) for index, builder in enumerate(builders))
    )
    raise_if_all_lost(groups)
    if log is not None:
        log(groups)
    found = rollout_metrics(groups)
    return {key.replace("env/all", name): value for key, value in found.items() if key.startswith("env/all/")}
