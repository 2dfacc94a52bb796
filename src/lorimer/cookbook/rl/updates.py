"""One update of the weights: advantages, the KL penalty, passes as groups come in, and the metrics of the trainer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from lorimer import APIFuture, SamplingClient, TrainingClient
from lorimer.cookbook.rl.advantages import Baseline, group_advantages, has_signal, incorporate_kl_penalty
from lorimer.cookbook.rl.datums import RolloutDatum, assemble_training_data
from lorimer.cookbook.rl.envs import TrajectoryGroup
from lorimer.cookbook.rl.metrics import sampler_trainer_metrics
from lorimer.cookbook.schedules import Schedule, learning_rate
from lorimer.errors import InvalidInput
from lorimer.types import AdamParams, ForwardBackwardOutput, OptimStepResponse

LossFn = Literal["importance_sampling", "ppo", "cispo", "gspo"]

_MIN_ADVANTAGE = 1e-5


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """How groups become an update."""

    learning_rate: float
    lr_schedule: Schedule = "constant"
    warmup_steps: int = 0
    """In which the rate rises: the first updates have seen little, and go far if they may."""
    loss_fn: LossFn = "importance_sampling"
    loss_fn_config: dict[str, float] | None = None
    baseline: Baseline = "mean"
    """What a reward is compared with: see ``advantages.py``."""
    normalise_advantages: bool = False
    kl_penalty_coef: float = 0.0
    """Of the difference to a reference's logprobs."""
    kl_discount_factor: float = 0.0

    def __post_init__(self) -> None:
        if self.loss_fn not in get_args(LossFn):
            raise InvalidInput(f"loss_fn is {self.loss_fn!r}; accepted are {', '.join(get_args(LossFn))}")
        if self.baseline not in get_args(Baseline):
            raise InvalidInput(f"baseline is {self.baseline!r}; accepted are {', '.join(get_args(Baseline))}")


@dataclass
class Update:
    """Submits passes and optimiser steps without waiting for them; ``finish`` waits for all."""

    client: TrainingClient
    config: UpdateConfig
    step: int
    total_steps: int
    """Of the run, for the schedule of the learning rate."""
    reference: SamplingClient | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    _passes: list[tuple[list[RolloutDatum], APIFuture[ForwardBackwardOutput]]] = field(default_factory=list)
    _optimizer_steps: list[APIFuture[OptimStepResponse]] = field(default_factory=list)
    _num_unapplied: int = 0

    async def add(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Begin the pass over the groups' data. Groups whose rewards are all the same have none."""
        config = self.config
        # A penalty against a reference teaches something even where the rewards do not.
        kept = [group for group in groups if has_signal(group) or (self.reference and group.trajectories_G)]
        advantages = [
            group_advantages(group.get_total_rewards(), config.baseline, config.normalise_advantages) for group in kept
        ]
        data = assemble_training_data(kept, advantages)
        if self.reference is not None and data:
            data, penalty = await incorporate_kl_penalty(
                data, self.reference, config.kl_penalty_coef, config.kl_discount_factor
            )
            self.metrics |= penalty
            # Where the policy is still its reference the penalty is rounding, which Adam would make a whole step of.
            data = [datum for datum in data if abs(datum.advantages).max() > _MIN_ADVANTAGE]
        if data:
            sent = [datum.to_datum(config.loss_fn) for datum in data]
            future = await self.client.forward_backward_async(sent, config.loss_fn, config.loss_fn_config)
            self._passes.append((data, future))
            self._num_unapplied += 1

    async def step_optimizer(self) -> None:
        """Apply what was added since the last time. Nothing happens where no group had a signal."""
        config = self.config
        rate = learning_rate(config.lr_schedule, self.step, self.total_steps, config.learning_rate, config.warmup_steps)
        self.metrics["optim/lr"] = rate
        if self._num_unapplied:
            self._optimizer_steps.append(await self.client.optim_step_async(AdamParams(learning_rate=rate, eps=1e-8)))
            self._num_unapplied = 0

    async def finish(self) -> dict[str, float]:
        """The metrics of the update, once it is done."""
        outputs = [await future for _, future in self._passes]
        steps = [await future for future in self._optimizer_steps]
        data = [datum for part, _ in self._passes for datum in part]
        logprobs = [found["logprobs"].to_numpy() for output in outputs for found in output.loss_fn_outputs]
        metrics = sampler_trainer_metrics(data, logprobs) | {
            "optim/num_data": len(data),
            "optim/num_tokens": sum(len(datum.mask) for datum in data),
            "optim/num_updates": len(steps),
        }
        for name in ("clip_fraction:mean", "ratio:mean"):
            found = [output.metrics[name] for output in outputs if name in output.metrics]
            if found:
                metrics[f"optim/{name.partition(':')[0]}"] = sum(found) / len(found)
        for response in steps:
            metrics |= {f"optim/{name}": value for name, value in (response.metrics or {}).items()}
        return metrics | self.metrics
