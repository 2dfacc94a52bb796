"""RL of an agent that knows nothing of Lorimer: a program with the plain `openai` package learns to use a tool.

    python -m lorimer.recipes.agent_rl

`agent` below is ordinary code against OpenAI's API: it asks, runs the calculator that the model calls by `<<7*36>>`,
and asks again. Its requests go to an address of the run, where every answer is recorded as sampled; the reward that it
returns trains the model. The task and the short supervised stage before are those of `tool_use_rl`.

With lorimer/tiny it takes 350 s of CPU time on 2 busy virtual cores without bfloat16; of 100 held-out products, sampled
at temperature 1, 59 % are correct after the supervised stage and 68 % after RL: one run, whose settings were chosen
after a first one with fewer steps did not learn, and a difference that chance alone can make.
"""

import asyncio
import importlib
import importlib.util
import random
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorimer.cookbook import supervised
from lorimer.cookbook.datasets import GeneratedDataset
from lorimer.cookbook.logs import read_metrics
from lorimer.cookbook.program import recipe_service
from lorimer.cookbook.renderers import get_renderer
from lorimer.cookbook.rl import training
from lorimer.cookbook.rl.agents import Agent, AgentCall, ExternalAgents, Outcome
from lorimer.cookbook.rl.envs import RLDataset
from lorimer.cookbook.rl.problems import ProblemDataset
from lorimer.cookbook.service import get_tokenizer
from lorimer.errors import InvalidInput
from lorimer.recipes.tool_use_rl import Product, calculator, draw, run, show_form
from lorimer.terminal import run_recipe

if TYPE_CHECKING:
    import openai

MAX_TURNS = 3


async def agent(call: AgentCall) -> Outcome:
    """Answer a question with the tool. The reward is 1 for the right answer, 0.5 for the right call only."""
    client = shared_client(asyncio.get_running_loop()).with_options(base_url=call.base_url, api_key=call.api_key)
    a, b = call.task
    messages: list[Any] = [{"role": "user", "content": f"What is {a} * {b}?"}]
    has_called = is_right = False
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(model=call.model, messages=messages)
        said = answer.choices[0].message.content or ""
        asked = re.fullmatch(r"\s*<<(.*)>>\s*", said)
        if asked is None:
            is_right = said.strip() == str(a * b)
            break
        result = (await calculator({"expression": asked[1]})).content
        has_called |= result == str(a * b)
        messages += [{"role": "assistant", "content": said}, {"role": "tool", "tool_call_id": "0", "content": result}]
    return Outcome(1.0 if is_right else 0.5 * has_called, {"correct": is_right, "called": has_called})


@lru_cache(maxsize=1)
def shared_client(loop: asyncio.AbstractEventLoop) -> "openai.AsyncOpenAI":
    """Return one client for all episodes of an event loop: each new one takes tens of milliseconds of CPU."""
    import openai

    return openai.AsyncOpenAI(api_key="given by each episode", base_url="http://127.0.0.1")


def load_agent(name: str) -> Agent:
    """Import an agent by `module:function`."""
    module, _, function = name.partition(":")
    try:
        found: Agent = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput(f"agent is {name!r}; module:function is accepted ({error})") from error
    return found


def make_datasets(
    play: Agent, num_questions: int, batch_size: int, group_size: int, seed: int
) -> tuple[RLDataset, RLDataset]:
    rng = random.Random(seed)
    products: list[Product] = list(dict.fromkeys(draw(rng) for _ in range(2000)))
    agents = ExternalAgents(play, timeout_seconds=300)
    return (
        ProblemDataset(products[num_questions:], agents, batch_size=batch_size, group_size=group_size, seed=seed),
        ProblemDataset(products[:num_questions], agents, batch_size=num_questions, group_size=1),
    )


def main(
    model: Annotated[str, typer.Option(help="base model")] = "lorimer/tiny",
    base_url: Annotated[str | None, typer.Option(help="server; else one that runs, else in this process")] = None,
    log_dir: Annotated[Path, typer.Option(help="where the run is kept")] = Path("runs/agent_rl"),
    agent_name: Annotated[
        str, typer.Option("--agent", help="another agent, as module:function; it gets an AgentCall")
    ] = "lorimer.recipes.agent_rl:agent",
    sft_steps: Annotated[int, typer.Option(help="steps that show the form")] = 90,
    steps: Annotated[int, typer.Option(help="steps of reinforcement learning", min=1)] = 24,
    batch_size: Annotated[int, typer.Option(help="questions in a step", min=1)] = 16,
    group_size: Annotated[int, typer.Option(help="episodes of each question", min=1)] = 8,
    num_questions: Annotated[int, typer.Option(help="held-out products to evaluate", min=1, max=100)] = 100,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 2e-3,
    seed: int = 0,
) -> None:
    if importlib.util.find_spec("openai") is None:
        raise InvalidInput("the agent of this recipe needs the package openai: pip install openai")
    play = load_agent(agent_name)
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
            dataset_builder=lambda _: make_datasets(play, num_questions, batch_size, group_size, seed),
            learning_rate=learning_rate,
            lr_schedule="linear",
            warmup_steps=3,
            rank=sft.rank,
            max_tokens=12,
            num_steps=steps,
            eval_every=steps,
            eval_temperature=1.0,
            save_every=10,
            seed=seed,
            notes={"batch_size": batch_size, "group_size": group_size, "agent": agent_name},
        )
        result = asyncio.run(run(service, sft, rl))
    before, after = read_metrics(rl.log_dir)[0]["test/correct"], result.metrics["test/correct"]
    print(
        f"right answers to {num_questions} products never seen: {before:.0%} after the examples, {after:.0%} after RL"
    )
    print(f"trained: {result.sampler_path}")


if __name__ == "__main__":
    run_recipe(main)
