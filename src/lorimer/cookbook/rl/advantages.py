"""Advantages: how much better a trajectory did than its group, and the penalty for leaving a reference.

The default is the reward less the group's mean, as in the official cookbook: dividing by the standard deviation gives
groups that are nearly all right or all wrong the same say as the others, and is an option here.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lorimer import SamplingClient
from lorimer.cookbook.rl.datums import RolloutDatum
from lorimer.cookbook.rl.envs import TrajectoryGroup
from lorimer.errors import InvalidInput
from lorimer.types import ModelInput

Baseline = Literal["mean", "leave_one_out", "none"]

_MIN_DEVIATION = 1e-6


def group_advantages(
    rewards_G: Sequence[float], baseline: Baseline = "mean", normalise: bool = False
) -> NDArray[np.float64]:
    """Advantages of the trajectories of one group.

    ``mean`` subtracts the mean of the group, ``leave_one_out`` the mean of the others, which is unbiased and larger by
    G / (G - 1), ``none`` nothing. ``normalise`` divides by the group's standard deviation.
    """
    if baseline not in get_args(Baseline):
        raise InvalidInput(f"baseline is {baseline!r}; accepted are {', '.join(get_args(Baseline))}")
    rewards = np.asarray(rewards_G, np.float64)
    advantages = rewards if baseline == "none" or not rewards.size else rewards - rewards.mean()
    if baseline == "leave_one_out" and len(rewards) > 1:
        advantages = advantages * len(rewards) / (len(rewards) - 1)
    if normalise and rewards.size:
        deviation = rewards.std()
        # Rewards that are the same but for rounding carry no signal, and must not be blown up into one.
        advantages = advantages / deviation if deviation > _MIN_DEVIATION else np.zeros_like(rewards)
    return advantages


def has_signal(group: TrajectoryGroup) -> bool:
    """Whether the rewards differ; if not, a group says nothing about which trajectory is better."""
    rewards = group.get_total_rewards()
    return bool(rewards) and max(rewards) - min(rewards) > _MIN_DEVIATION


async def incorporate_kl_penalty(
    data: Sequence[RolloutDatum], reference: SamplingClient, coef: float, discount_factor: float = 0.0
) -> tuple[list[RolloutDatum], dict[str, float]]:
    """The data with ``coef * (mean difference - difference)`` added to the advantage of every sampled token.

    The difference is the logprob under the policy less that under the reference; its mean is over all sampled tokens of
    the data, and is reported. With a discount factor a token also pays for those that follow it.
    """
    scored = await asyncio.gather(
        *(reference.compute_logprobs_async(ModelInput.from_ints(datum.tokens.tolist())) for datum in data)
    )
    differences = [
        (datum.logprobs - np.array(logprobs[1:], np.float32)) * datum.mask
        for datum, logprobs in zip(data, scored, strict=True)
    ]
    num_tokens = sum(datum.count * float(datum.mask.sum()) for datum in data)
    total = sum(datum.count * float(difference.sum()) for datum, difference in zip(data, differences, strict=True))
    mean = total / num_tokens if num_tokens else 0.0
    penalised = []
    for datum, difference in zip(data, differences, strict=True):
        bonus = coef * datum.count * datum.mask * (mean - difference)
        if discount_factor > 0:
            bonus = discounted_future_sum(bonus, discount_factor) * datum.mask
        penalised.append(replace(datum, advantages=(datum.advantages + bonus).astype(np.float32)))
    return penalised, {"kl_policy_reference": mean}


def discounted_future_sum(values: NDArray[np.floating], discount_factor: float) -> NDArray[np.float64]:
    """At each position the sum of ``discount_factor**k * values[position + k]``."""
    sums = np.zeros(len(values), np.float64)
    running = 0.0
    for position in range(len(values) - 1, -1, -1):
        running = float(values[position]) + discount_factor * running
        sums[position] = running
    return sums
