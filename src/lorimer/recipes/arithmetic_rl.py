"""Reinforcement learning on sums, evaluated on sums that the model has never seen, not even in pretraining.

    python -m lorimer.recipes.arithmetic_rl --seed 0

With lorimer/tiny, sampled at temperature 1 as in training, accuracy rises from 17 % to 56 - 60 % over three seeds
(greedy from 44 % to 80 - 83 %). 80 steps take 100 to 150 seconds of CPU time, including the server in this process, on
a busy AMD EPYC of two cores and no GPU. ``metrics.jsonl`` in the log directory has the curve; docs/rl.md has the
figures.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lorimer.cookbook.arithmetic import NUM_TEST, split_sums, sum_rows
from lorimer.cookbook.evaluation import accuracy, exact_match
from lorimer.cookbook.program import recipe_service
from lorimer.cookbook.renderers import get_renderer
from lorimer.cookbook.rl import training
from lorimer.cookbook.rl.problems import question_dataset
from lorimer.cookbook.service import get_tokenizer
from lorimer.terminal import run_recipe

MAX_TOKENS = 8


def main(
    model: Annotated[str, typer.Option(help="base model")] = "lorimer/tiny",
    base_url: Annotated[str | None, typer.Option(help="server; else one that runs, else in this process")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="where the run is kept; its name has the seed")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 80,
    batch_size: Annotated[int, typer.Option(help="sums in a step", min=1)] = 32,
    group_size: Annotated[int, typer.Option(help="answers to each sum", min=1)] = 8,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 4e-3,
    warmup_steps: int = 8,
    loss_fn: Annotated[str, typer.Option(help="importance_sampling, ppo, cispo or gspo")] = "importance_sampling",
    eval_every: int = 20,
    num_questions: Annotated[int, typer.Option(help="sums to measure with, at most 200")] = NUM_TEST,
    seed: int = 0,
) -> None:
    learned, held_out = (sum_rows(pairs) for pairs in split_sums())
    with recipe_service(model, base_url) as service:
        measure = partial(
            accuracy, held_out[:num_questions], get_renderer("auto", get_tokenizer(service, model)), exact_match()
        )
        config = training.Config(
            base_model=model,
            dataset_builder=lambda renderer: (
                question_dataset(
                    learned, renderer, exact_match(), batch_size=batch_size, group_size=group_size, seed=seed
                ),
                None,
            ),
            log_dir=log_dir or Path(f"runs/arithmetic_rl_{seed}"),
            learning_rate=learning_rate,
            lr_schedule="linear",
            warmup_steps=warmup_steps,
            loss_fn=loss_fn,  # type: ignore[arg-type]
            rank=16,
            max_tokens=MAX_TOKENS,
            num_steps=steps,
            evaluators=[
                measure(max_tokens=MAX_TOKENS, name="greedy"),
                measure(max_tokens=MAX_TOKENS, name="sampled", temperature=1.0, num_samples=4),
            ],
            eval_every=eval_every,
            seed=seed,
            notes={"batch_size": batch_size, "group_size": group_size},
        )
        result = asyncio.run(training.train(config, service))
    shares = [f"{name} {result.metrics[f'{name}/accuracy']:.1%}" for name in ("greedy", "sampled")]
    print(f"right answers to {num_questions} sums never seen: {', '.join(shares)}")
    print(f"trained: {result.sampler_path}")


if __name__ == "__main__":
    run_recipe(main)
