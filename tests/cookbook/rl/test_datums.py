"""From turns to training data: what is merged, and which token gets what."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorimer.cookbook.completers import TokensWithLogprobs
from lorimer.cookbook.rl.datums import assemble_training_data, merge_equal, trajectory_to_data
from lorimer.cookbook.rl.envs import Trajectory, TrajectoryGroup, Transition
from lorimer.types import AdamParams, ModelInput
from tests.cookbook.rl.episodes import MODEL


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


def test_what_a_group_said_alike_is_one_datum_of_the_same_weight():
    said = [[2, 4], [3, 4], [2, 4], [2, 4], [3, 4]]
    group = TrajectoryGroup([trajectory(turn([1], tokens)) for tokens in said], [0.0] * 5, [{}] * 5)
    data = assemble_training_data([group, group], [np.array([0.5, -1.0, 0.5, -0.25, -1.0])] * 2)
    found = [(datum.tokens.tolist(), datum.advantages.tolist(), datum.count) for datum in data]
    assert found == 2 * [([1, 2, 4], [1.0, 1.0], 2), ([1, 3, 4], [-2.0, -2.0], 2), ([1, 2, 4], [-0.25, -0.25], 1)]


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_one_datum_for_equal_ones_has_their_gradient(loss_fn, service):
    """Off-policy by a tenth of a nat: within the bounds of the losses, and not where every ratio is 1."""
    (often,) = trajectory_to_data(trajectory(turn([1, 30], [20, 21])), 0.5)
    (once,) = trajectory_to_data(trajectory(turn([1, 30], [22, 23])), -1.5)
    changed = []
    for merge in (list, merge_equal):
        client = service.create_lora_training_client(MODEL, rank=4, seed=1)

        def logprobs(data, of=client):
            output = of.forward([datum.to_datum("importance_sampling") for datum in data], "importance_sampling")
            return [found["logprobs"].to_numpy() for found in output.result().loss_fn_outputs]

        before = logprobs([often, once])
        sampled = [
            replace(datum, logprobs=(found - 0.1) * datum.mask)
            for datum, found in zip([often, once], before, strict=True)
        ]
        data = merge([sampled[0], sampled[1], sampled[0], sampled[0]])
        client.forward_backward([datum.to_datum(loss_fn) for datum in data], loss_fn)
        # With so large an epsilon a step is as long as the gradient.
        client.optim_step(AdamParams(learning_rate=1.0, eps=10.0)).result()
        changed.append(np.concatenate(logprobs([often, once])) - np.concatenate(before))
    assert np.abs(changed[0]).max() > 0.01
    np.testing.assert_allclose(changed[0], changed[1], rtol=1e-3, atol=1e-5)


# ── branches: parallel calls and rewritten histories ──────────────────────────────────────────────────


def test_parallel_conversations_are_one_datum_each():
    turns = trajectory(turn([1], [2]), turn([9], [8]), turn([1, 2, 3], [4]), turn([9, 8, 7], [6]))
    first, second = trajectory_to_data(turns, 1.0)
    assert first.tokens.tolist() == [1, 2, 3, 4] and first.mask.tolist() == [1, 0, 1]
    assert second.tokens.tolist() == [9, 8, 7, 6] and second.mask.tolist() == [1, 0, 1]


def test_the_second_branch_has_the_common_turn_as_context():
    first, second = trajectory_to_data(trajectory(turn([1], [2]), turn([1, 2, 3], [4]), turn([1, 2, 5], [6])), 1.0)
    assert first.tokens.tolist() == [1, 2, 3, 4] and first.mask.tolist() == [1, 0, 1]
    assert second.tokens.tolist() == [1, 2, 5, 6] and second.mask.tolist() == [0, 0, 1]


@st.composite
def conversations(draw: st.DrawFn) -> list[Transition]:
    """Turns of an episode: each goes on from some earlier one, changes a token of it, or begins anew."""
    small = st.integers(0, 2)
    turns: list[Transition] = []
    for number in range(draw(st.integers(1, 8))):
        base = draw(st.sampled_from([[], *([*one.ob.to_ints(), *one.ac.tokens] for one in turns)]))
        prompt = [*base, *draw(st.lists(small, max_size=3))] or [0]
        if draw(st.integers(0, 4)) == 0:
            place = draw(st.integers(0, len(prompt) - 1))
            prompt[place] = draw(small)
        tokens = draw(st.lists(small, max_size=3))
        logprobs = [-(number + 1) - place / 10 for place in range(len(tokens))]
        turns.append(Transition(ModelInput.from_ints(prompt), TokensWithLogprobs(tokens, logprobs), 0.0, False))
    return turns


def model_of_chains(turns: list[Transition]) -> list[list[Transition]]:
    """Turns by datum, told with strings: a turn joins the longest text that its prompt begins with, else begins one."""
    texts: dict[int, str] = {}
    chains: dict[int, list[Transition]] = {}
    for number, one in enumerate(turns):
        prompt = "".join(map(str, one.ob.to_ints()))
        fitting = [key for key in texts if prompt.startswith(texts[key])]
        key = max(fitting, key=lambda key: (len(texts[key]), -key), default=number)
        texts[key] = prompt + "".join(map(str, one.ac.tokens))
        chains.setdefault(key, []).append(one)
    return list(chains.values())


@settings(max_examples=300, deadline=None)
@given(conversations())
def test_every_sampled_token_is_trained_once_behind_its_own_prompt(turns):
    data = trajectory_to_data(trajectory(*turns), 2.0)
    chains = [chain for chain in model_of_chains(turns) if any(one.ac.tokens for one in chain)]
    assert len(data) == len(chains)
    for datum, chain in zip(data, chains, strict=True):
        logprobs = np.zeros(len(datum.tokens), np.float32)
        mask = np.zeros(len(datum.tokens), np.float32)
        for one in chain:
            prompt, num_tokens = one.ob.to_ints(), len(one.ac.tokens)
            end = len(prompt) + num_tokens
            assert datum.tokens[:end].tolist() == prompt + one.ac.tokens  # it was sampled after exactly this
            assert not mask[len(prompt) : end].any()
            mask[len(prompt) : end] = 1
            logprobs[len(prompt) : end] = one.ac.logprobs
        assert datum.mask.tolist() == mask[1:].tolist()
        assert datum.logprobs.tolist() == logprobs[1:].tolist()
        assert datum.advantages.tolist() == (2 * mask[1:]).tolist()
