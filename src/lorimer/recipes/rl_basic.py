"""Reinforcement learning on the cookbook's abstractions: the task of ``rl_loop`` in an environment and a config.

    python -m lorimer.recipes.rl_basic

The environment asks and grades; sampling, advantages, updates, metrics, checkpoints and resuming are the library's. On
lorimer/tiny the share of right answers (``env/all/correct``) begins at 0.2; `arithmetic_rl` measures what it comes to.
"""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from lorimer.cookbook.renderers import Renderer
from lorimer.cookbook.rl import training
from lorimer.cookbook.rl.envs import RLDataset
from lorimer.cookbook.rl.problems import ProblemDataset, ProblemEnv

Sum = tuple[int, int]


class SumEnv(ProblemEnv):
    def __init__(self, renderer: Renderer, numbers: Sum) -> None:
        super().__init__(renderer)
        self.a, self.b = numbers

    def get_question(self) -> str:
        return f"What is {self.a} + {self.b}?"

    def check_answer(self, sample_str: str) -> bool:
        return sample_str.strip() == str(self.a + self.b)


def main(
    model: Annotated[str, typer.Option(help="base model")] = "lorimer/tiny",
    base_url: Annotated[str | None, typer.Option(help="server; without one it runs in this process")] = None,
    log_dir: Annotated[Path, typer.Option(help="where the run is kept")] = Path("runs/rl_basic"),
    steps: int = 40,
    batch_size: Annotated[int, typer.Option(help="sums in a step")] = 16,
    group_size: Annotated[int, typer.Option(help="answers to each sum")] = 16,
    learning_rate: float = 3e-3,
    seed: int = 0,
) -> None:
    def make_datasets(renderer: Renderer) -> tuple[RLDataset, None]:
        sums = [(a, b) for a in range(100) for b in range(100)]
        make_env = lambda numbers: SumEnv(renderer, numbers)  # noqa: E731
        return ProblemDataset(sums, make_env, batch_size=batch_size, group_size=group_size, seed=seed), None

    config = training.Config(
        base_model=model,
        base_url=base_url,
        dataset_builder=make_datasets,
        log_dir=log_dir,
        learning_rate=learning_rate,
        lr_schedule="linear",
        rank=16,
        max_tokens=8,
        num_steps=steps,
        save_every=10,
        seed=seed,
        notes={"batch_size": batch_size, "group_size": group_size},
    )
    result = asyncio.run(training.train(config))
    print(f"trained: {result.sampler_path}")


if __name__ == "__main__":
    typer.run(main)
