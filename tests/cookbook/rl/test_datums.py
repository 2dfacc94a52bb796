"""From turns to training data: what is merged, and which token gets what."""

import numpy as np
import pytest

from lorimer.cookbook.completers import TokensWithLogprobs
from lorimer.cookbook.rl.datums import assemble_training_data, trajectory_to_data
from lorimer.cookbook.rl.envs import Trajectory, TrajectoryGroup, Transition
from lorimer.types import ModelInput


def turn(prompt: list[int], tokens: list[int], reward: float = 0.0) -> Transition:
    logprobs = [-token / 10 for token in tokens]
    return Transition(ModelInput.from_ints(prompt), TokensWithLogprobs(tokens, logprobs), reward, False)


def trajectory(*turns: Transition) -> Trajectory:
    return Trajectory(list(turns), ModelInput.empty())


def test_one_turn_is_one_datum():
    (datum,) = trajectory_to_data(trajectory(turn([1, 2, 3], [4, 5])), 0.5)
    assert datum.tokens.tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(datum.logprobs, [0, 0, -0.4, -0.5])
    np.testing.assert_allclose(datum.advantages, [0, 0, 0.5, 0.5])
    np.testing.assert_allclose(datum.mask, [0, 0, 1, 1])


def test_turns_that_extend_each_other_are_one_datum():
    (datum,) = trajectory_to_data(trajectory(turn([1, 2], [3]), turn([1, 2, 3, 7, 8], [4, 5])), -1.0)
    assert datum.tokens.tolist() == [1, 2, 3, 7, 8, 4, 5]
    np.testing.assert_allclose(datum.logprobs, [0, -0.3, 0, 0, -0.4, -0.5])
    np.testing.assert_allclose(datum.advantages, [0, -1, 0, 0, -1, -1])
    np.testing.assert_allclose(datum.mask, [0, 1, 0, 0, 1, 1])


def test_prompt_that_is_no_extension_begins_a_new_datum():
    turns = trajectory(turn([1, 2], [3]), turn([1, 2, 9], [4]), turn([1, 2, 9, 4, 6], [5]))
    first, second = trajectory_to_data(turns, 1.0)
    assert first.tokens.tolist() == [1, 2, 3]
    assert second.tokens.tolist() == [1, 2, 9, 4, 6, 5]
    np.testing.assert_allclose(second.mask, [0, 0, 1, 0, 1])


def test_turns_without_tokens_leave_nothing():
    assert trajectory_to_data(trajectory(), 1.0) == []
    assert trajectory_to_data(trajectory(turn([1, 2], [])), 1.0) == []


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_datum_has_the_inputs_of_its_loss(loss_fn):
    (datum,) = trajectory_to_data(trajectory(turn([1, 2], [3, 4])), 2.0)
    sent = datum.to_datum(loss_fn)
    assert sent.model_input.to_ints() == [1, 2, 3]
    inputs = {name: value.tolist() for name, value in sent.loss_fn_inputs.items()}
    mask = inputs.pop("sequence_ratio_mask", None)
    assert mask == ([0, 1, 1] if loss_fn == "gspo" else None)
    assert inputs["target_tokens"] == [2, 3, 4]
    assert inputs["advantages"] == [0, 2, 2]
    assert inputs.keys() == {"target_tokens", "advantages", "logprobs"}


def test_each_trajectory_has_the_advantage_of_its_own():
    group = TrajectoryGroup([trajectory(turn([1], [2])), trajectory(turn([1], [3]))], [1.0, 0.0], [{}, {}])
    data = assemble_training_data([group], [np.array([0.5, -0.5])])
    assert [datum.advantages.tolist() for datum in data] == [[0.5], [-0.5]]
