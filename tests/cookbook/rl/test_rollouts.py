"""Rollouts of a real model: seeds, turns, limits, and episodes that fail."""

from collections.abc import Iterator

import pytest

import lorimer
from lorimer.cookbook.completers import TinkerMessageCompleter, TinkerTokenCompleter, derive_seed
from lorimer.cookbook.rl.datums import trajectory_to_data
from lorimer.cookbook.rl.problems import ProblemGroupBuilder
from lorimer.cookbook.rl.rollouts import Policy, do_group_rollout, do_single_rollout, raise_if_all_lost
from lorimer.errors import InvalidInput
from tests.cookbook.rl.episodes import MODEL, SumEnv, TalkEnv, TalkGroup, tiny_renderer

RENDERER = tiny_renderer()


@pytest.fixture(scope="module")
def sampler(base_url) -> Iterator[lorimer.SamplingClient]:
    with lorimer.ServiceClient(base_url=base_url) as service:
        yield service.create_sampling_client(base_model=MODEL)


def policy(sampler: lorimer.SamplingClient, **options: object) -> Policy:
    return Policy(**{"sampling_client": sampler, "max_tokens": 12, "seed": 5, **options})


def actions(group) -> list[list[list[int]]]:
    return [[step.ac.tokens for step in trajectory.transitions] for trajectory in group.trajectories_G]


async def test_episode_is_played_to_its_end(sampler):
    complete = TinkerTokenCompleter(sampler, max_tokens=12, seed=3)
    trajectory = await do_single_rollout(complete, TalkEnv(RENDERER, 3))
    assert [step.metrics["turn"] for step in trajectory.transitions] == [1, 2, 3]
    assert [step.episode_done for step in trajectory.transitions] == [False, False, True]
    assert all(len(step.ac.tokens) == len(step.ac.logprobs) == step.reward for step in trajectory.transitions)
    (datum,) = trajectory_to_data(trajectory, 1.0)
    last = trajectory.transitions[-1]
    assert datum.tokens.tolist() == last.ob.to_ints() + last.ac.tokens
    assert datum.mask.sum() == sum(step.reward for step in trajectory.transitions)


@pytest.mark.parametrize("shares_start", [False, True])
async def test_same_seed_plays_the_same_and_trajectories_differ(sampler, shares_start):
    first = await do_group_rollout(TalkGroup(RENDERER, 2, [None] * 4, shares_start), policy(sampler))
    second = await do_group_rollout(TalkGroup(RENDERER, 2, [None] * 4, shares_start), policy(sampler))
    other = await do_group_rollout(TalkGroup(RENDERER, 2, [None] * 4, shares_start), policy(sampler).seeded(1))
    assert actions(first) == actions(second) != actions(other)
    assert len({str(found) for found in actions(first)}) > 1


async def test_rewards_of_the_group_are_added_to_those_of_the_steps(sampler):
    builder = TalkGroup(RENDERER, 2, [None, None])
    group = await do_group_rollout(builder, policy(sampler, step=7))
    steps = [sum(step.reward for step in trajectory.transitions) for trajectory in group.trajectories_G]
    assert group.get_total_rewards() == [20.0 + reward for reward in steps]
    assert group.metrics_G == [{"rank": 0}, {"rank": 1}]
    assert (group.tags, group.sampler_step, builder.num_cleanups) == (["talk"], 7, 1)


async def test_episode_that_raises_is_left_out_and_counted(sampler, caplog):
    builder = TalkGroup(RENDERER, 2, [None, 1, None])
    group = await do_group_rollout(builder, policy(sampler))
    assert len(group.trajectories_G) == len(group.metrics_G) == 2
    assert [str(error) for error in group.rollout_errors] == ["the talk was interrupted"]
    assert "the talk was interrupted" in caplog.text
    assert builder.num_cleanups == 1
    raise_if_all_lost([group])


async def test_batch_without_any_episode_raises_the_first_error(sampler):
    group = await do_group_rollout(TalkGroup(RENDERER, 2, [0, 0]), policy(sampler))
    with pytest.raises(ValueError, match="the talk was interrupted"):
        raise_if_all_lost([group])


async def test_prompt_that_the_server_refuses_loses_the_episode_only(sampler):
    group = await do_group_rollout(TalkGroup(RENDERER, 1, [None]), policy(sampler, max_tokens=100_000))
    assert group.trajectories_G == []
    assert isinstance(group.rollout_errors[0], lorimer.BadRequestError | lorimer.RequestFailedError)


@pytest.mark.parametrize("shares_start", [False, True])
async def test_trajectory_ends_at_its_limit(sampler, shares_start):
    builder = TalkGroup(RENDERER, 50, [None, None], shares_start)
    group = await do_group_rollout(builder, policy(sampler, max_trajectory_tokens=40))
    for trajectory in group.trajectories_G:
        last = trajectory.transitions[-1]
        assert trajectory.is_truncated
        assert last.ob.length + len(last.ac.tokens) <= 40
    nothing = await do_group_rollout(builder, policy(sampler, max_trajectory_tokens=3))
    assert [trajectory.transitions for trajectory in nothing.trajectories_G] == [[], []]
    assert all(trajectory.is_truncated for trajectory in nothing.trajectories_G)


async def test_shared_start_with_different_prompts_is_refused(sampler):
    numbers = iter([(1, 2), (3, 4)])
    builder = ProblemGroupBuilder(lambda: SumEnv(RENDERER, next(numbers)), 2)
    group = await do_group_rollout(builder, policy(sampler))
    with pytest.raises(InvalidInput, match="different prompts"):
        raise_if_all_lost([group])


async def test_message_completer_answers(sampler):
    complete = TinkerMessageCompleter(sampler, RENDERER, max_tokens=12, temperature=0)
    message = await complete([{"role": "user", "content": "What is your name?"}])
    assert message["role"] == "assistant"
    assert "Tiny" in message["content"]


def test_derived_seeds_differ_and_stay():
    assert derive_seed(0, 1, 2) == derive_seed(0, 1, 2)
    assert len({derive_seed(0, 1, 2), derive_seed(0, 12), derive_seed(1, 2), derive_seed(0, "1", 2)}) == 4
    assert 0 <= derive_seed(7) < 2**63
