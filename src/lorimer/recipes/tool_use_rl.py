"""Multi-turn reinforcement learning with a tool: a model learns when and how to use a calculator.

    python -m lorimer.recipes.tool_use_rl

The questions are products that the model cannot compute. It may write ``<<7*36>>``, receives the result, and answers. A
short supervised stage teaches the format; RL teaches the model to copy the correct numbers into the call and out of the
result. The turns of an episode are one training example, because each prompt extends the previous one.

With lorimer/tiny it takes 320 s of CPU time on 2 busy virtual cores without bfloat16; of 100 held-out products, sampled
at temperature 1, 37 % are correct after the supervised stage and 65 % after RL.
"""

import ast
import asyncio
import contextlib
import operator
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from lorimer import Datum, ServiceClient
from lorimer.chat.conversation import Message, ToolCall, TrainOn, make_tool_call, text_of
from lorimer.cookbook import supervised
from lorimer.cookbook.datasets import GeneratedDataset
from lorimer.cookbook.datums import conversation_to_datum
from lorimer.cookbook.logs import read_metrics
from lorimer.cookbook.program import recipe_service
from lorimer.cookbook.renderers import Renderer, get_renderer
from lorimer.cookbook.rl import training
from lorimer.cookbook.rl.envs import Env, RLDataset
from lorimer.cookbook.rl.problems import ProblemDataset
from lorimer.cookbook.rl.remote_envs import EnvPool
from lorimer.cookbook.rl.tools import ToolEnv, tool
from lorimer.cookbook.service import get_tokenizer
from lorimer.terminal import run_recipe

Product = tuple[int, int]

OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@tool
def calculator(expression: str) -> str:
    """Computes a sum, difference, product or quotient of two numbers, such as 12*7."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
        raise ValueError(f"{expression!r} is no arithmetic")

    result = value(ast.parse(expression.strip()[:40], mode="eval").body)
    return str(int(result) if result == int(result) else result)


def parse_calls(message: Message) -> list[ToolCall]:
    """Parse ``<<7*36>>``, a call format that a small model can learn. Larger models use their chat template's."""
    found = re.fullmatch(r"\s*<<(.*)>>\s*", text_of(message))
    return [make_tool_call("calculator", {"expression": found[1]})] if found else []


def ask(numbers: Product) -> Message:
    return {"role": "user", "content": f"What is {numbers[0]} * {numbers[1]}?"}


def make_env(renderer: Renderer, numbers: Product, for_call: float = 0.0) -> ToolEnv:
    """Create an environment: reward 1 for a correct answer, ``for_call`` for only a correct call."""
    answer = str(numbers[0] * numbers[1])

    def reward(messages: list[Message]) -> float:
        # Only a final message of the model counts: a tool result that it does not repeat is not an answer.
        if messages[-1]["role"] == "assistant" and text_of(messages[-1]).strip() == answer:
            return 1.0
        has_called = any(message["role"] == "tool" and text_of(message) == answer for message in messages)
        return for_call * has_called

    return ToolEnv(renderer, [ask(numbers)], [calculator], reward, max_turns=3, parse_calls=parse_calls)


@cache
def read_renderer(directory: str) -> Renderer:
    from transformers import AutoTokenizer

    return get_renderer("auto", AutoTokenizer.from_pretrained(directory))


def make_env_there(directory: str, numbers: Product, for_call: float) -> ToolEnv:
    """Create an environment in a process that has no renderer yet; its tokenizer is in ``directory``."""
    return make_env(read_renderer(directory), numbers, for_call)


def draw(rng: random.Random) -> Product:
    return rng.randint(2, 9), rng.randint(11, 99)


def show_form(renderer: Renderer, rng: random.Random) -> Iterable[Datum]:
    """Generate an example of the supervised stage."""
    a, b = draw(rng)
    conversation: list[Message] = [
        ask((a, b)),
        {"role": "assistant", "content": f"<<{a}*{b}>>"},
        {"role": "tool", "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]
    yield conversation_to_datum(conversation, renderer, train_on=TrainOn.ALL_ASSISTANT_MESSAGES)


async def run(
    service: ServiceClient, sft: supervised.Config, rl: training.Config, pool: EnvPool | None = None
) -> training.Result:
    shown = await supervised.train(sft, service)
    async with pool or contextlib.nullcontext():
        return await training.train(replace(rl, load_from=shown.checkpoint.state_path), service)


def main(
    model: Annotated[str, typer.Option(help="base model")] = "lorimer/tiny",
    base_url: Annotated[str | None, typer.Option(help="server; else one that runs, else in this process")] = None,
    log_dir: Annotated[Path, typer.Option(help="where the run is kept")] = Path("runs/tool_use_rl"),
    sft_steps: Annotated[int, typer.Option(help="steps that show the form")] = 80,
    steps: Annotated[int, typer.Option(help="steps of reinforcement learning", min=1)] = 40,
    batch_size: Annotated[int, typer.Option(help="questions in a step", min=1)] = 24,
    group_size: Annotated[int, typer.Option(help="tries at each question", min=1)] = 8,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 1e-3,
    environments: Annotated[
        Literal["here", "processes", "ray"],
        typer.Option(help="in this process, in processes of this machine, or in those of a Ray cluster"),
    ] = "here",
    environment_workers: Annotated[int, typer.Option(min=1)] = 2,
    seed: int = 0,
) -> None:
    pool = (
        None
        if environments == "here"
        else EnvPool(make_env_there, num_workers=environment_workers, backend=environments)
    )

    def make_datasets(renderer: Renderer) -> tuple[RLDataset, RLDataset]:
        rng = random.Random(seed)
        products = list(dict.fromkeys(draw(rng) for _ in range(2000)))

        def maker(for_call: float) -> Callable[[Product], Env]:
            if pool is None:
                return partial(make_env, renderer, for_call=for_call)
            directory = renderer.tokenizer.name_or_path
            return lambda numbers: pool.env(directory, numbers, for_call)

        make, measure = maker(0.5), maker(0.0)
        return (
            ProblemDataset(products[100:], make, batch_size=batch_size, group_size=group_size, seed=seed),
            ProblemDataset(products[:100], measure, batch_size=100, group_size=1),
        )

    with recipe_service(model, base_url) as service:
        renderer = get_renderer("auto", get_tokenizer(service, model))
        sft = supervised.Config(
            log_dir=log_dir / "sft",
            name=f"{log_dir.name}-sft",
            base_model=model,
            dataset=GeneratedDataset(lambda rng: show_form(renderer, rng), 64, sft_steps, seed=seed),
            learning_rate=5e-3,
            rank=16,
            seed=seed,
        )
        rl = training.Config(
            log_dir=log_dir / "rl",
            name=f"{log_dir.name}-rl",
            base_model=model,
            dataset_builder=make_datasets,
            learning_rate=learning_rate,
            lr_schedule="linear",
            warmup_steps=5,
            rank=sft.rank,
            max_tokens=12,
            max_trajectory_tokens=200,
            num_steps=steps,
            eval_every=steps,
            eval_temperature=1.0,
            save_every=10,
            seed=seed,
            notes={"batch_size": batch_size, "group_size": group_size},
        )
        result = asyncio.run(run(service, sft, rl, pool))
    before, after = read_metrics(rl.log_dir)[0]["test/correct"], result.metrics["test/correct"]
    print(f"right answers to 100 products never seen: {before:.0%} after the examples, {after:.0%} after trying")
    print(f"trained: {result.sampler_path}")


if __name__ == "__main__":
    run_recipe(main)
