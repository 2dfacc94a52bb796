"""Reinforcement learning with the cookbook: the sums of `sl_basic`, learned from rewards instead of examples.

    python -m lorimer.recipes.rl_basic

The same rows and grader become an RL dataset; the cookbook does sampling, advantages, updates and checkpoints. With
lorimer/tiny it takes 170 s of CPU time on 2 virtual cores without bfloat16; accuracy on held-out sums rises from 35 %
to 86 %.
"""

import asyncio
from pathlib import Path

from lorimer.cookbook.arithmetic import sum_rows
from lorimer.cookbook.evaluation import exact_match
from lorimer.cookbook.program import recipe_service
from lorimer.cookbook.rl import training
from lorimer.cookbook.rl.problems import question_dataset
from lorimer.recipes.sl_loop import HELD_OUT, TRAINING
from lorimer.terminal import run_recipe


def main(
    model: str = "lorimer/tiny", base_url: str | None = None, log_dir: Path = Path("runs/rl_basic"), steps: int = 80
) -> None:
    config = training.Config(
        base_model=model,
        dataset_builder=lambda renderer: (
            question_dataset(sum_rows(TRAINING), renderer, exact_match(), batch_size=32, group_size=8),
            question_dataset(sum_rows(HELD_OUT), renderer, exact_match(), batch_size=100),
        ),
        log_dir=log_dir,
        learning_rate=4e-3,
        lr_schedule="linear",
        warmup_steps=8,
        max_tokens=8,
        num_steps=steps,
        eval_every=steps,
        save_every=10,
    )
    with recipe_service(model, base_url) as service:
        result = asyncio.run(training.train(config, service))
    print(f"held-out sums that are right: {result.metrics['test/correct']:.0%}; trained: {result.sampler_path}")


if __name__ == "__main__":
    run_recipe(main)
