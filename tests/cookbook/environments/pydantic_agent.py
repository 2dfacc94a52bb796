"""An agent of pydantic-ai for the task of `recipes/agent_rl.py`.

    .venvs/pydantic-ai/bin/python -m lorimer.recipes.agent_rl --agent tests.cookbook.environments.pydantic_agent:play

The framework makes the requests, keeps the history and reads the answers; the result of the calculator is its next
prompt.
"""

import asyncio
import re
from dataclasses import dataclass

from pydantic_ai import Agent, TextOutput  # type: ignore[import-not-found]
from pydantic_ai.models.openai import OpenAIChatModel  # type: ignore[import-not-found]
from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found]

from lorimer.cookbook.rl.agents import AgentCall, Outcome
from lorimer.recipes.agent_rl import MAX_TURNS, shared_client
from lorimer.recipes.tool_use_rl import calculator


@dataclass(frozen=True)
class Calculation:
    expression: str


def read(text: str) -> Calculation | str:
    found = re.fullmatch(r"\s*<<(.*)>>\s*", text)
    return Calculation(found[1]) if found else text.strip()


async def play(call: AgentCall) -> Outcome:
    """Answer a question with the tool. The reward is 1 for the right answer, 0.5 for the right call only."""
    client = shared_client(asyncio.get_running_loop()).with_options(base_url=call.base_url, api_key=call.api_key)
    model = OpenAIChatModel(call.model, provider=OpenAIProvider(openai_client=client))
    solver = Agent(model, output_type=TextOutput(read))
    a, b = call.task
    said, has_called = await solver.run(f"What is {a} * {b}?"), False
    for _ in range(MAX_TURNS - 1):
        if not isinstance(said.output, Calculation):
            break
        result = (await calculator({"expression": said.output.expression})).content
        has_called |= result == str(a * b)
        said = await solver.run(result, message_history=said.all_messages())
    is_right = said.output == str(a * b)
    return Outcome(1.0 if is_right else 0.5 * has_called, {"correct": is_right, "called": has_called})
