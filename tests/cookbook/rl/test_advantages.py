"""Advantages against numbers worked out by hand."""

import numpy as np
import pytest

from lorimer.cookbook.rl.advantages import discounted_future_sum, group_advantages, has_signal
from lorimer.cookbook.rl.envs import Trajectory, TrajectoryGroup
from lorimer.errors import InvalidInput
from lorimer.types import ModelInput


def group(*rewards: float) -> TrajectoryGroup:
    trajectories = [Trajectory([], ModelInput.empty()) for _ in rewards]
    return TrajectoryGroup(trajectories, list(rewards), [{} for _ in rewards])


@pytest.mark.parametrize(
    ("baseline", "normalise", "expected"),
    [
        ("mean", False, [0.75, -0.25, -0.25, -0.25]),
        ("leave_one_out", False, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("none", False, [1.0, 0.0, 0.0, 0.0]),
        ("mean", True, np.array([0.75, -0.25, -0.25, -0.25]) / np.sqrt(3 / 16)),
        ("leave_one_out", True, np.array([1.0, -1 / 3, -1 / 3, -1 / 3]) / np.sqrt(3 / 16)),
    ],
)
def test_advantages_of_a_group(baseline, normalise, expected):
    np.testing.assert_allclose(group_advantages([1.0, 0.0, 0.0, 0.0], baseline, normalise), expected)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("rewards", [[0.3, 0.3, 0.3], [0.7], []])
def test_rewards_without_difference_give_no_advantage(baseline, normalise, rewards):
    np.testing.assert_allclose(group_advantages(rewards, baseline, normalise), np.zeros(len(rewards)), atol=1e-12)


def test_unknown_baseline_is_refused():
    with pytest.raises(InvalidInput, match="accepted are mean, leave_one_out, none"):
        group_advantages([1.0], "median")


def test_signal_is_a_difference_between_rewards():
    assert has_signal(group(0.0, 1.0))
    assert not has_signal(group(1.0, 1.0))
    assert not has_signal(group())


def test_discounted_future_sum():
    np.testing.assert_allclose(discounted_future_sum(np.array([1.0, 2.0, 4.0]), 0.5), [3.0, 4.0, 4.0])
