"""Trajectories as rollouts: turns without repetition, rewards and their parts, calls, errors and lost episodes."""

import pytest

from lorimer.cookbook.completers import TokensWithLogprobs
from lorimer.cookbook.rl.envs import Trajectory, TrajectoryGroup, Transition
from lorimer.cookbook.rl.rollouts import do_single_rollout
from lorimer.cookbook.rl.tools import ToolEnv, tool
from lorimer.cookbook.rl.transcripts import group_rollouts, turns_of
from lorimer.types import ModelInput, RolloutToolCall
from tests.cookbook.rl.episodes import TalkEnv, tiny_renderer

RENDERER = tiny_renderer()
TOKENIZER = RENDERER.tokenizer


def tokens(text):
    return TOKENIZER.encode(text)


def action(text, reason="stop"):
    found = tokens(text)
    return TokensWithLogprobs(found, [-0.5] * len(found), reason)


def observed(text):
    return ModelInput.from_ints(tokens(text))


def texts(trajectory):
    return [(turn.role, turn.content) for turn in turns_of(trajectory, TOKENIZER)]


def test_only_the_rest_of_a_prompt_is_a_turn():
    first, second, third = tokens("ask a"), tokens("ask b"), tokens("something else")
    said = tokens("say a")
    trajectory = Trajectory(
        [
            Transition(ModelInput.from_ints(first), action("say a"), 0.0, False),
            Transition(ModelInput.from_ints(first + said + second), action("say b"), 0.5, False),
            Transition(ModelInput.from_ints(third), action("say c"), 1.0, True),
        ],
        ModelInput.from_ints(third + tokens("say c") + tokens("the end")),
    )
    assert texts(trajectory) == [
        ("prompt", "ask a"),
        ("assistant", "say a"),
        ("environment", "ask b"),
        ("assistant", "say b"),
        ("prompt", "something else"),
        ("assistant", "say c"),
        ("environment", "the end"),
    ]
    turns = turns_of(trajectory, TOKENIZER)
    assert [turn.reward for turn in turns if turn.role == "assistant"] == [0.0, 0.5, 1.0]
    assert turns[1].tokens == said and turns[1].logprobs == [-0.5] * len(said) and turns[0].logprobs is None


def test_messages_of_the_prompt_are_turns():
    """A prompt that was made of messages is shown as these; what an environment adds later is shown as it is."""
    first, said = tokens("<s>be brief<u>ask a<a>"), tokens("say a")
    trajectory = Trajectory(
        [
            Transition(ModelInput.from_ints(first), action("say a"), 0.0, False),
            Transition(ModelInput.from_ints(first + said + tokens("ask b")), action("say b"), 0.5, True),
        ],
        ModelInput.empty(),
        prompt=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "ask a"}],
    )
    assert texts(trajectory) == [
        ("system", "be brief"),
        ("user", "ask a"),
        ("assistant", "say a"),
        ("environment", "ask b"),
        ("assistant", "say b"),
    ]


def test_a_group_has_its_rewards_errors_and_lost_episodes():
    call = RolloutToolCall(name="add", arguments="{}", result="3")
    first = Trajectory(
        [
            Transition(
                observed("ask"), action("say"), 0.25, False, {"correct": 0}, {"grader_error": "late"}, [call], None, 0.5
            ),
            Transition(observed("ask saytell"), action("on", "length"), 0.5, True, {"correct": 1}, {}, [], 2.0, 0.25),
        ],
        ModelInput.empty(),
    )
    second = Trajectory([], ModelInput.empty(), "max_tokens")
    group = TrajectoryGroup(
        [first, second], [1.0, 0.0], [{"rank": 0}, {"rank": float("nan")}], ["ta\nlk", "ta\nlk"], [ValueError("gone")]
    )
    found = group_rollouts(group, "7", TOKENIZER, step=3, advantages=[0.5, -0.5], split="test", kind="sample")
    assert [(one.number, one.reward, one.advantage, one.stop_reason) for one in found] == [
        (0, 1.75, 0.5, "length"),
        (1, 0.0, -0.5, "max_tokens"),
        (2, None, None, "error"),
    ]
    assert all(
        (one.step, one.kind, one.split, one.group, one.tags) == (3, "sample", "test", "7", ["ta_lk"]) for one in found
    )
    assert found[0].reward_parts == {"correct": 1.0, "rank": 0.0, "group_reward": 1.0} and found[1].reward_parts == {}
    assert found[0].errors == ["late"] and found[2].errors == ["ValueError: gone"]
    assert found[0].seconds == {"sampling": 2.0, "environment": 0.75}
    assert found[0].turns[1].tool_calls == [call]


async def test_played_episodes_are_timed():
    async def complete(observation, stop, *, max_tokens=None):
        return action("fine")

    played = await do_single_rollout(complete, TalkEnv(RENDERER, 2), first_action=action("well"))
    assert played.transitions[0].sampling_seconds is None and played.transitions[1].sampling_seconds is not None
    assert [turn.content for turn in turns_of(played, TOKENIZER) if turn.role == "assistant"] == ["well", "fine"]
    [rollout] = group_rollouts(TrajectoryGroup([played], [0.0], [{}]), "0", TOKENIZER, step=0)
    assert set(rollout.seconds) == {"sampling", "environment"}


@tool
def double(a: int) -> int:
    """Doubles."""
    return 2 * a


@pytest.mark.parametrize(("arguments", "result", "error"), [({"a": 4}, "8", None), ({"b": 4}, None, "Error: double")])
async def test_tool_calls_are_kept_with_their_answers(arguments, result, error):
    from lorimer.chat.conversation import make_tool_call

    calls = [make_tool_call("double", arguments)]
    env = ToolEnv(
        RENDERER,
        [{"role": "user", "content": "double 4"}],
        [double],
        lambda _: 1.0,
        parse_calls=lambda _: calls,
        max_turns=1,
    )
    await env.initial_observation()
    answer = await env.step(tokens("x<|im_end|>"))
    [called] = answer.tool_calls
    assert (called.name, called.result) == ("double", result)
    assert called.error == error or called.error.startswith(error)
