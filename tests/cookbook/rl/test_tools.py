"""Tools as a model sees them, and episodes in which it calls them."""

import asyncio
from typing import Annotated, Literal

import pytest
from pydantic import Field

from lorimer.chat.conversation import Message, make_tool_call, text_of
from lorimer.cookbook.renderers import get_renderer
from lorimer.cookbook.rl.datums import trajectory_to_data
from lorimer.cookbook.rl.envs import Trajectory, Transition
from lorimer.cookbook.rl.tools import Tool, ToolEnv, ToolResult, tool
from lorimer.errors import InvalidInput, Unsupported
from tests.cookbook.chat_templates import QWEN3, tokenizer_with
from tests.cookbook.rl.episodes import tiny_renderer

TINY = tiny_renderer()
QWEN = get_renderer("auto", tokenizer_with(QWEN3))


@tool
def add(a: Annotated[int, Field(description="the first")], b: int, sign: Literal["+", "-"] = "+") -> str:
    """Adds two numbers."""
    return str(a + b if sign == "+" else a - b)


@tool
def divide(a: int, b: int) -> float:
    return a / b


@tool
async def finish() -> ToolResult:
    return ToolResult("done", should_stop=True, metrics={"finished": 1})


class Counter:
    def __init__(self) -> None:
        self.total = 0

    @tool
    def count(self, by: int = 1) -> int:
        """Counts on."""
        self.total += by
        return self.total


def test_tool_is_described_by_its_function():
    assert add.spec["function"]["name"] == "add"
    assert add.spec["function"]["description"] == "Adds two numbers."
    parameters = add.spec["function"]["parameters"]
    assert parameters["required"] == ["a", "b"]
    assert parameters["properties"]["a"]["description"] == "the first"
    assert parameters["properties"]["sign"]["enum"] == ["+", "-"]
    assert "self" not in Counter.count.spec["function"]["parameters"]["properties"]


async def test_call_is_checked_and_errors_are_answers():
    assert (await add({"a": 1, "b": 2})).content == "3"
    assert (await add({"a": "5", "b": 2, "sign": "-"})).content == "3"
    wrong = await add({"a": "x", "c": 1})
    assert wrong.content.startswith("Error: add was called with wrong arguments: a: ")
    assert wrong.metrics == {"tool_error": 1}
    assert (await divide({"a": 1, "b": 0})).content == "Error: ZeroDivisionError: division by zero"


async def test_method_keeps_the_state_of_its_object():
    counter = Counter()
    assert [(await counter.count({"by": 2})).content for _ in range(2)] == ["2", "4"]
    assert (await Counter().count({})).content == "1"


async def test_tool_that_hangs_is_given_up():
    async def wait() -> str:
        await asyncio.sleep(3600)
        return ""

    result = await Tool(wait, timeout_seconds=0.05)({})
    assert result.content == "Error: wait took longer than 0.05 seconds"


def test_tool_with_unnamed_arguments_is_refused():
    def spread(*numbers: int) -> int:
        return sum(numbers)

    with pytest.raises(InvalidInput, match="arguments with names"):
        tool(spread)


# ── episodes ──────────────────────────────────────────────────────────────────────────────────────────


def make_env(renderer=QWEN, **options) -> ToolEnv:
    question: Message = {"role": "user", "content": "How much?"}
    return ToolEnv(
        renderer, [question], [add, divide, finish], lambda messages: text_of(messages[-1]) == "3", **options
    )


def encode(renderer, text: str) -> list[int]:
    return renderer.tokenizer.encode(text, add_special_tokens=False)


def call(name: str, arguments: str) -> list[int]:
    return encode(QWEN, f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|im_end|>')


async def test_tools_are_shown_called_and_answered():
    env = make_env()
    prompt, _ = await env.initial_observation()
    assert "Adds two numbers." in QWEN.tokenizer.decode(prompt.to_ints())
    asked = await env.step(call("add", '{"a": 1, "b": 2}'))
    assert (asked.reward, asked.episode_done, asked.metrics["tool_calls"]) == (0.0, False, 1)
    assert env.messages[-1]["content"] == "3"
    assert QWEN.tokenizer.decode(asked.next_observation.to_ints()).count("<tool_response>\n3\n") == 1
    answered = await env.step(encode(QWEN, "3<|im_end|>"))
    assert (answered.reward, answered.episode_done, answered.metrics["correct"]) == (1.0, True, 1.0)


@pytest.mark.parametrize(
    ("action", "told"),
    [
        (call("add", '{"a": 1}'), "wrong arguments: b: Field required"),
        (call("multiply", "{}"), "there is no tool 'multiply'; there are add, divide, finish"),
        (call("add", "[1]"), "this is no call"),
        (encode(QWEN, "<tool_call>add 1 2</tool_call><|im_end|>"), "this is no call"),
    ],
)
async def test_call_that_fails_is_told_to_the_model(action, told):
    env = make_env()
    await env.initial_observation()
    result = await env.step(action)
    assert not result.episode_done
    assert result.metrics["tool_error"] == 1
    assert told in env.messages[-1]["content"]


async def test_episode_ends_with_its_turns_a_stop_or_a_reply_without_end():
    env = make_env(max_turns=2)
    await env.initial_observation()
    assert not (await env.step(call("add", '{"a": 1, "b": 1}'))).episode_done
    assert (await env.step(call("add", '{"a": 1, "b": 1}'))).episode_done
    env = make_env()
    await env.initial_observation()
    stopped = await env.step(call("finish", "{}"))
    assert stopped.episode_done
    assert stopped.metrics["finished"] == 1
    env = make_env()
    await env.initial_observation()
    cut = await env.step(encode(QWEN, "3"))
    assert (cut.reward, cut.metrics["malformed"]) == (0.9, 1.0)


async def test_model_without_a_form_for_calls_gets_one_of_its_own():
    def parse_calls(message):
        said = text_of(message)
        return [make_tool_call("add", {"a": int(said[2]), "b": int(said[4])})] if said.startswith("<<") else []

    env = make_env(TINY, parse_calls=parse_calls)
    prompt, _ = await env.initial_observation()
    first = encode(TINY, "<<1+2>><|im_end|>")
    asked = await env.step(first)
    second = encode(TINY, "3<|im_end|>")
    answered = await env.step(second)
    assert answered.reward == 1.0

    def transition(observation, tokens, reward):
        from lorimer.cookbook.completers import TokensWithLogprobs

        return Transition(observation, TokensWithLogprobs(tokens, [0.0] * len(tokens)), reward, False)

    turns = [transition(prompt, first, 0.0), transition(asked.next_observation, second, 1.0)]
    (datum,) = trajectory_to_data(Trajectory(turns, prompt), 1.0)
    assert datum.mask.sum() == len(first) + len(second), "turns whose prompts grow are one example"


async def test_template_without_tools_is_refused():
    with pytest.raises(Unsupported, match="no tool calls"):
        await make_env(TINY).initial_observation()
