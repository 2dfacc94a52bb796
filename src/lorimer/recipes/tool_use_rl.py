"""A calculator and when to use it: multi-turn reinforcement learning with a tool.

    python -m lorimer.recipes.tool_use_rl

The model is asked for products that it cannot compute. It may write ``<<7*36>>``, is told the result, and answers. A
short supervised stage shows it the form; reinforcement learning makes it copy the right numbers into the call and out
of the result. The turns of an episode are one training example, because each prompt extends the one before.

A few steps were run. With a higher rate (2e-3) the reward of lorimer/tiny fell to 0; what the present settings reach is
not known yet.
"""

import ast
import asyncio
import operator
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from lorimer import Datum, ServiceClient
from lorimer.cookbook import supervised
from lorimer.cookbook.datasets import GeneratedDataset
from lorimer.cookbook.datums import conversation_to_datum
from lorimer.cookbook.messages import Message, ToolCall, TrainOn, make_tool_call, text_of
from lorimer.cookbook.renderers import Renderer, get_renderer
from lorimer.cookbook.rl import training
from lorimer.cookbook.rl.envs import RLDataset
from lorimer.cookbook.rl.problems import ProblemDataset
from lorimer.cookbook.rl.tools import ToolEnv, tool
from lorimer.cookbook.service import get_tokenizer, open_service

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
    """``<<7*36>>`` is a call: a form that a small model can learn. Larger ones have theirs in the chat template."""
    found = re.fullmatch(r"\s*<<(.*)>>\s*", text_of(message))
    return [make_tool_call("calculator", {"expression": found[1]})] if found else []


def ask(numbers: Product) -> Message:
    return {"role": "user", "content": f"What is {numbers[0]} * {numbers[1]}?"}


def make_env(renderer: Renderer, numbers: Product) -> ToolEnv:
    answer = str(numbers[0] * numbers[1])

    def reward(messages: list[Message]) -> float:
        """Half for the right call, half for the right answer, so that the one is learned before the other."""
        has_called = any(message["role"] == "tool" and text_of(message) == answer for message in messages)
        return (has_called + (text_of(messages[-1]).strip() == answer)) / 2

    return ToolEnv(renderer, [ask(numbers)], [calculator], reward, max_turns=3, parse_calls=parse_calls)


def draw(rng: random.Random) -> Product:
    return rng.randint(2, 9), rng.randint(11, 99)


def show_form(renderer: Renderer, rng: random.Random) -> Iterable[Datum]:
    """One example of the supervised stage."""
    a, b = draw(rng)
    conversation: list[Message] = [
        ask((a, b)),
        {"role": "assistant", "content": f"<<{a}*{b}>>"},
        {"role": "tool", "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]
    yield conversation_to_datum(conversation, renderer, train_on=TrainOn.ALL_ASSISTANT_MESSAGES)


async def run(service: ServiceClient, sft: supervised.Config, rl: training.Config) -> float:
    shown = await supervised.train(sft, service)
    result = await training.train(replace(rl, load_from=shown.checkpoint.state_path), service)
    print(f"trained: {result.sampler_path}")
    return result.metrics.get("test/correct", 0.0)


def main(
    model: Annotated[str, typer.Option(help="base model")] = "lorimer/tiny",
    base_url: Annotated[str | None, typer.Option(help="server; without one it runs in this process")] = None,
    log_dir: Annotated[Path, typer.Option(help="where the run is kept")] = Path("runs/tool_use_rl"),
    sft_steps: Annotated[int, typer.Option(help="steps that show the form")] = 60,
    steps: Annotated[int, typer.Option(help="steps of reinforcement learning")] = 40,
    batch_size: Annotated[int, typer.Option(help="questions in a step")] = 16,
    group_size: Annotated[int, typer.Option(help="tries at each question")] = 8,
    learning_rate: float = 5e-4,
    eval_every: int = 10,
    seed: int = 0,
) -> None:
    def make_datasets(renderer: Renderer) -> tuple[RLDataset, RLDataset]:
        rng = random.Random(seed)
        products = list(dict.fromkeys(draw(rng) for _ in range(2000)))

        def make(numbers: Product) -> ToolEnv:
            return make_env(renderer, numbers)

        return (
            ProblemDataset(products[100:], make, batch_size=batch_size, group_size=group_size, seed=seed),
            ProblemDataset(products[:100], make, batch_size=100, group_size=1),
        )

    with open_service(model, base_url) as service:
        renderer = get_renderer("auto", get_tokenizer(service, model))
        sft = supervised.Config(
            log_dir=log_dir / "sft",
            base_model=model,
            dataset=GeneratedDataset(lambda rng: show_form(renderer, rng), 32, sft_steps, seed=seed),
            learning_rate=5e-3,
            rank=16,
            seed=seed,
        )
        rl = training.Config(
            log_dir=log_dir / "rl",
            base_model=model,
            dataset_builder=make_datasets,
            learning_rate=learning_rate,
            warmup_steps=5,
            max_tokens=12,
            max_trajectory_tokens=200,
            num_steps=steps,
            eval_every=eval_every,
            save_every=10,
            seed=seed,
            notes={"batch_size": batch_size, "group_size": group_size},
        )
        correct = asyncio.run(run(service, sft, rl))
    print(f"reward for 100 products never seen: {correct:.2f}")


if __name__ == "__main__":
    typer.run(main)
