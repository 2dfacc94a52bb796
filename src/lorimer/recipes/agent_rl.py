"""RL of an agent that knows nothing of Lorimer: a program with the plain `openai` package learns to use a tool.

    python -m lorimer.recipes.agent_rl

`agent` below is ordinary code against OpenAI's API: it asks, runs the tool that the model calls, and asks again. Its
requests go to an address of the run, where every answer is recorded as sampled; the reward it returns trains the model.
The questions are products that the model cannot compute. A short supervised stage shows the format of a call.

With lorimer/tiny it takes FIGURES
"""

import asyncio
import importlib.util
import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lorimer import Datum, ServiceClient
from lorimer.chat.conversation import Message, ToolSpec, TrainOn, make_tool_call
from lorimer.cookbook import supervised
from lorimer.cookbook.datasets import GeneratedDataset
from lorimer.cookbook.datums import conversation_to_datum
from lorimer.cookbook.logs import read_metrics
from lorimer.cookbook.program import recipe_service
from lorimer.cookbook.renderers import Renderer, get_renderer
from lorimer.cookbook.rl import training
from lorimer.cookbook.rl.agents import AgentCall, ExternalAgents, Outcome
from lorimer.cookbook.rl.envs import RLDataset
from lorimer.cookbook.rl.problems import ProblemDataset
from lorimer.cookbook.service import get_tokenizer
from lorimer.errors import InvalidInput
from lorimer.recipes.tool_use_rl import Product, calculator, draw
from lorimer.terminal import run_recipe

TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Computes a product.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
MAX_TURNS = 3


async def agent(call: AgentCall) -> Outcome:
    """Answer a question with the tool. The reward is 1 for the right answer, 0.5 for the right call only."""
    import openai  # which nothing else of Lorimer needs

    a, b = call.task
    messages: list[Any] = [{"role": "user", "content": f"What is {a} * {b}?"}]
    has_called = False
    async with openai.AsyncOpenAI(base_url=call.base_url, api_key=call.api_key) as client:
        for _ in range(MAX_TURNS):
            tools: list[Any] = [TOOL]
            answer = await client.chat.completions.create(model=call.model, messages=messages, tools=tools)
            message = answer.choices[0].message
            if not message.tool_calls:
                is_right = (message.content or "").strip() == str(a * b)
                return Outcome(1.0 if is_right else 0.5 * has_called, {"correct": is_right, "called": has_called})
            messages.append(message.model_dump(exclude_none=True))
            for one in message.tool_calls:
                assert one.type == "function"
                result = await compute(one.function.arguments)
                has_called |= result == str(a * b)
                messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
    return Outcome(0.5 * has_called, {"correct": 0, "called": has_called})


async def compute(arguments: str) -> str:
    """Run the tool; an error is text for the model, too."""
    expression = json.loads(arguments).get("x")
    return (await calculator({"expression": str(expression)})).content


def show_form(renderer: Renderer, rng: random.Random) -> Iterable[Datum]:
    """Generate an example of the supervised stage."""
    a, b = draw(rng)
    conversation: list[Message] = [
        {"role": "user", "content": f"What is {a} * {b}?"},
        {"role": "assistant", "content": "", "tool_calls": [make_tool_call("calc", {"x": f"{a}*{b}"})]},
        {"role": "tool", "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]
    yield conversation_to_datum(conversation, renderer, train_on=TrainOn.ALL_ASSISTANT_MESSAGES, tools=[TOOL])


def make_datasets(batch_size: int, group_size: int, seed: int) -> tuple[RLDataset, RLDataset]:
    rng = random.Random(seed)
    products: list[Product] = list(dict.fromkeys(draw(rng) for _ in range(2000)))
    agents = ExternalAgents(agent, timeout_seconds=300)
    return (
        ProblemDataset(products[100:], agents, batch_size=batch_size, group_size=group_size, seed=seed),
        ProblemDataset(products[:100], agents, batch_size=100, group_size=1),
    )


async def run(service: ServiceClient, sft: supervised.Config, rl: training.Config) -> training.Result:
    shown = await supervised.train(sft, service)
    return await training.train(replace(rl, load_from=shown.checkpoint.state_path), service)


def main(
    model: Annotated[str, typer.Option(help="base model")] = "lorimer/tiny",
    base_url: Annotated[str | None, typer.Option(help="server; without one it runs in this process")] = None,
    log_dir: Annotated[Path, typer.Option(help="where the run is kept")] = Path("runs/agent_rl"),
    sft_steps: Annotated[int, typer.Option(help="steps that show the form")] = 60,
    steps: Annotated[int, typer.Option(help="steps of reinforcement learning", min=1)] = 20,
    batch_size: Annotated[int, typer.Option(help="questions in a step", min=1)] = 16,
    group_size: Annotated[int, typer.Option(help="episodes of each question", min=1)] = 8,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 1e-3,
    seed: int = 0,
) -> None:
    if importlib.util.find_spec("openai") is None:
        raise InvalidInput("the agent of this recipe needs the package openai: pip install openai")
    with recipe_service(model, base_url) as service:
        renderer = get_renderer("auto", get_tokenizer(service, model))
        sft = supervised.Config(
            log_dir=log_dir / "sft",
            base_model=model,
            dataset=GeneratedDataset(lambda rng: show_form(renderer, rng), 64, sft_steps, seed=seed),
            learning_rate=5e-3,
            rank=16,
            seed=seed,
        )
        rl = training.Config(
            log_dir=log_dir / "rl",
            base_model=model,
            dataset_builder=lambda _: make_datasets(batch_size, group_size, seed),
            learning_rate=learning_rate,
            lr_schedule="linear",
            warmup_steps=3,
            rank=sft.rank,
            max_tokens=64,
            num_steps=steps,
            eval_every=steps,
            eval_temperature=1.0,
            save_every=10,
            seed=seed,
            notes={"batch_size": batch_size, "group_size": group_size},
        )
        result = asyncio.run(run(service, sft, rl))
    before, after = read_metrics(rl.log_dir)[0]["test/correct"], result.metrics["test/correct"]
    print(f"right answers to 100 products never seen: {before:.0%} after the examples, {after:.0%} after RL")
    print(f"trained: {result.sampler_path}")


if __name__ == "__main__":
    run_recipe(main)
