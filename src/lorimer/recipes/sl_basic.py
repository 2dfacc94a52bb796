"""Supervised learning with the cookbook: the sums of `sl_loop`, built from the parts that the other recipes use.

    python -m lorimer.recipes.sl_basic

A renderer turns messages into tokens, an evaluator measures accuracy, `supervised.train` does the rest. With
lorimer/tiny it takes 48 seconds of CPU time on 2 virtual cores without bfloat16; accuracy on held-out sums rises from
35 % to 99 %.
"""

import asyncio
from pathlib import Path

from lorimer.cookbook import supervised
from lorimer.cookbook.arithmetic import sum_rows
from lorimer.cookbook.datasets import chat_dataset, datum_maker
from lorimer.cookbook.evaluation import accuracy, exact_match
from lorimer.cookbook.program import recipe_service
from lorimer.cookbook.renderers import get_renderer
from lorimer.cookbook.service import get_tokenizer
from lorimer.recipes.sl_loop import HELD_OUT, TRAINING
from lorimer.terminal import run_recipe


def main(
    model: str = "lorimer/tiny",
    base_url: str | None = None,
    log_dir: Path = Path("runs/sl_basic"),
    learning_rate: float = 4e-3,
    steps: int = 60,
    batch_size: int = 64,
    every: int = 20,
    seed: int = 0,
) -> None:
    with recipe_service(model, base_url) as service:
        renderer = get_renderer("auto", get_tokenizer(service, model))
        config = supervised.Config(
            log_dir=log_dir,
            base_model=model,
            dataset=chat_dataset(sum_rows(TRAINING), renderer, batch_size=batch_size, seed=seed),
            max_steps=steps,
            learning_rate=learning_rate,
            rank=16,
            seed=seed,
            test_data=[datum for row in sum_rows(HELD_OUT) for datum in datum_maker(renderer)(row)],
            evaluators=[accuracy(sum_rows(HELD_OUT), renderer, exact_match(), max_tokens=8)],
            eval_every=every,
            save_every=every,
            notes={"batch_size": batch_size},
        )
        result = asyncio.run(supervised.train(config, service))
    print(f"held-out accuracy {result.metrics['test/accuracy']:.0%}; checkpoint: {result.checkpoint.sampler_path}")


if __name__ == "__main__":
    run_recipe(main)
