"""Metrics of rollouts and updates against numbers worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from lorimer.cookbook.completers import TokensWithLogprobs
from lorimer.cookbook.rl.datums import RolloutDatum
from lorimer.cookbook.rl.envs import Trajectory, TrajectoryGroup, Transition
from lorimer.cookbook.rl.metrics import rollout_metrics, sampler_trainer_metrics, staleness_metrics
from lorimer.types import ModelInput


def trajectory(reward: float, num_tokens: int = 2, stop_reason: str = "stop", **metrics: float) -> Trajectory:
    action = TokensWithLogprobs([1] * num_tokens, [-0.5] * num_tokens, stop_reason)
    return Trajectory([Transition(ModelInput.from_ints([1, 2, 3]), action, reward, True, metrics)], ModelInput.empty())


def group(*trajectories: Trajectory, tags: tuple[str, ...] = (), errors: int = 0, step: int = 0) -> TrajectoryGroup:
    zeros = [0.0] * len(trajectories)
    lost = [ValueError()] * errors
    return TrajectoryGroup(list(trajectories), zeros, [{} for _ in zeros], list(tags), lost, step)


def test_metrics_of_rollouts():
    metrics = rollout_metrics(
        [
            group(trajectory(1.0, correct=1), trajectory(0.0, 4, "length", correct=0), tags=("a",)),
            group(trajectory(1.0, correct=1), trajectory(1.0, correct=1), tags=("b",)),
            group(trajectory(0.0), trajectory(0.0), tags=("b",), errors=1),
            group(errors=2, tags=("b",)),
        ]
    )
    assert metrics["env/all/reward/total"] == 0.5
    assert metrics["env/all/by_group/frac_mixed"] == pytest.approx(1 / 3)
    assert metrics["env/all/by_group/frac_all_good"] == pytest.approx(1 / 3)
    assert metrics["env/all/by_group/frac_all_bad"] == pytest.approx(1 / 3)
    assert metrics["env/all/ac_tokens_per_turn"] == pytest.approx(14 / 6)
    assert metrics["env/all/ob_tokens_per_turn"] == 3
    assert metrics["env/all/turns_per_episode"] == 1
    assert metrics["env/all/frac_truncated"] == pytest.approx(1 / 6)
    assert metrics["env/all/total_episodes"] == 6
    assert metrics["env/all/episodes_lost"] == 3
    assert metrics["env/all/correct"] == 0.75
    assert metrics["env/a/reward/total"] == 0.5
    assert metrics["env/b/episodes_lost"] == 3


def test_tag_of_every_group_is_not_told_twice():
    metrics = rollout_metrics([group(trajectory(1.0), tags=("math",)), group(trajectory(1.0), tags=("math",))])
    assert not [name for name in metrics if name.startswith("env/math")]


def test_difference_between_sampler_and_trainer_counts_sampled_tokens_only():
    def datum(logprobs: list[float], mask: list[float]) -> RolloutDatum:
        zeros = np.zeros(len(mask), np.float32)
        return RolloutDatum(np.zeros(len(mask) + 1, np.int64), np.array(logprobs), zeros, np.array(mask))

    data = [datum([0.0, -1.0], [0, 1]), datum([-3.0], [1])]
    metrics = sampler_trainer_metrics(data, [np.array([-9.0, -1.2]), np.array([-2.6])])
    assert metrics["optim/kl_sample_train_v1"] == pytest.approx((0.2 - 0.4) / 2)
    assert metrics["optim/kl_sample_train_v2"] == pytest.approx(0.5 * (0.04 + 0.16) / 2)
    assert metrics["optim/entropy"] == pytest.approx(2.0)
    data[1] = replace(data[1], count=3)
    metrics = sampler_trainer_metrics(data, [np.array([-9.0, -1.2]), np.array([-2.6])])
    assert metrics["optim/kl_sample_train_v1"] == pytest.approx((0.2 - 3 * 0.4) / 4)
    assert metrics["optim/entropy"] == pytest.approx((1 + 3 * 3) / 4)
    assert sampler_trainer_metrics([], []) == {}


def test_staleness_is_in_steps_of_training():
    metrics = staleness_metrics([group(step=3), group(step=5)], 5)
    assert metrics == {"async/staleness_mean": 1.0, "async/staleness_max": 2}
