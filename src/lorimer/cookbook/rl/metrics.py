"""What to watch while a policy learns. Names are those of the official cookbook where it has them.

Rollouts: rewards, groups without signal, lengths, truncation, losses of episodes. Training: the KL divergence between
sampler and trainer, entropy. ``docs/rl.md`` says which value means what, and ``run_health.py`` looks at them.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lorimer.cookbook.rl.advantages import has_signal
from lorimer.cookbook.rl.datums import RolloutDatum
from lorimer.cookbook.rl.envs import TrajectoryGroup

ALL = "all"
GOOD = 0.5
"""A group whose rewards are all the same is called good from here on."""


def rollout_metrics(groups_P: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """``env/all/...`` over all groups, and ``env/<tag>/...`` where a tag names only some of them."""
    by_tag: dict[str, list[TrajectoryGroup]] = defaultdict(list)
    for group in groups_P:
        for tag in group.tags:
            by_tag[tag].append(group)
    selections = {tag: groups for tag, groups in by_tag.items() if len(groups) < len(groups_P)} | {ALL: list(groups_P)}
    return {
        f"env/{tag}/{name}": value for tag, groups in selections.items() for name, value in _of_groups(groups).items()
    }


def _of_groups(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories_G]
    steps = [step for trajectory in trajectories for step in trajectory.transitions]
    ended = [group for group in groups if group.trajectories_G]
    constant = [_mean(group.get_total_rewards()) for group in ended if not has_signal(group)]
    rewards = [reward for group in groups for reward in group.get_total_rewards()]
    metrics = {
        "reward/total": _mean(rewards),
        "reward/std": float(np.std(rewards)) if rewards else 0.0,
        "by_group/frac_mixed": _share(len(ended) - len(constant), len(ended)),
        "by_group/frac_all_good": _share(sum(mean >= GOOD for mean in constant), len(ended)),
        "by_group/frac_all_bad": _share(sum(mean < GOOD for mean in constant), len(ended)),
        "by_group/size": _mean([len(group.trajectories_G) for group in ended]),
        "ac_tokens_per_turn": _mean([len(step.ac.tokens) for step in steps]),
        "ob_tokens_per_turn": _mean([step.ob.length for step in steps]),
        "turns_per_episode": _share(len(steps), len(trajectories)),
        "frac_truncated": _mean([trajectory.is_truncated for trajectory in trajectories]),
        "total_episodes": len(trajectories),
        "total_ac_tokens": sum(len(step.ac.tokens) for step in steps),
        "episodes_lost": sum(len(group.rollout_errors) for group in groups),
    }
    own = [step.metrics for step in steps] + [own for group in groups for own in group.metrics_G]
    return metrics | _averaged(own)


def _averaged(dictionaries: Sequence[dict[str, float | int]]) -> dict[str, float]:
    """Each metric of the environments, averaged over the steps that report it."""
    values: dict[str, list[float]] = defaultdict(list)
    for dictionary in dictionaries:
        for name, value in dictionary.items():
            values[name].append(float(value))
    return {name: _mean(found) for name, found in values.items()}


def sampler_trainer_metrics(
    data: Sequence[RolloutDatum], training_logprobs: Sequence[NDArray[np.floating]]
) -> dict[str, float]:
    """How far the trainer's logprobs are from those the tokens were sampled with.

    v1 is the mean difference, v2 half the mean square of it; entropy is estimated by the sampler's own logprobs.
    """
    is_sampled = [datum.mask > 0 for datum in data]
    if not any(mask.any() for mask in is_sampled):
        return {}
    sampled = np.concatenate([datum.logprobs[mask] for datum, mask in zip(data, is_sampled, strict=True)])
    trained = np.concatenate([found[mask] for found, mask in zip(training_logprobs, is_sampled, strict=True)])
    counts = np.concatenate([np.full(mask.sum(), datum.count) for datum, mask in zip(data, is_sampled, strict=True)])
    difference = sampled.astype(np.float64) - trained
    return {
        "optim/kl_sample_train_v1": float(np.average(difference, weights=counts)),
        "optim/kl_sample_train_v2": float(0.5 * np.average(np.square(difference), weights=counts)),
        "optim/entropy": float(-np.average(sampled.astype(np.float64), weights=counts)),
    }


def staleness_metrics(groups_P: Sequence[TrajectoryGroup], step: int) -> dict[str, float]:
    """How many steps of training lie between sampling a group and learning from it."""
    ages = [step - group.sampler_step for group in groups_P]
    return {"async/staleness_mean": _mean(ages), "async/staleness_max": max(ages, default=0)}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
