"""Direct preference optimization (DPO): trains a model to prefer the better of two answers.

    python -m lorimer.recipes.dpo                # lorimer/tiny learns to prefer right sums to wrong ones
    python -m lorimer.recipes.dpo --data pairs.jsonl --model smollm2-135m-instruct --learning-rate 2e-4

A line of the data is `{"prompt": "...", "chosen": "...", "rejected": "..."}`; `instruction` is accepted for `prompt`,
and all three may be lists of messages. Without data the pairs are generated: correct and wrong answers to sums. With
lorimer/tiny, 20 steps of 32 such pairs lower the held-out loss from 0.693 to 0.669 and raise the margin from 0 to 0.05
and the accuracy to 70 %, in 33 seconds of CPU time on an AMD EPYC, two cores and no GPU.
"""

import asyncio
import random
from pathlib import Path
from typing import Annotated, Any

import typer

from lorimer.cookbook import preference
from lorimer.cookbook.checkpoints import Method, read_reference
from lorimer.cookbook.datasets import ShuffledDataset, load_rows, split_off
from lorimer.cookbook.logs import write_atomically
from lorimer.cookbook.program import recipe_service
from lorimer.cookbook.renderers import get_renderer
from lorimer.cookbook.service import get_tokenizer
from lorimer.terminal import run_recipe
from lorimer.types.optim import OPTIMIZERS


def generate_pairs(number: int, seed: int) -> list[dict[str, Any]]:
    """Generate sums with the correct answer and one that is slightly off."""
    rng = random.Random(seed)
    rows = []
    for _ in range(number):
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        off = rng.choice([-10, -2, -1, 1, 2, 10])
        rows.append({"prompt": f"What is {a} + {b}?", "chosen": str(a + b), "rejected": str(abs(a + b + off))})
    return rows


def main(
    data: Annotated[str | None, typer.Option(help="JSONL or JSON file or Hugging Face dataset of pairs")] = None,
    model: Annotated[str, typer.Option(help="base model")] = "lorimer/tiny",
    base_url: Annotated[str | None, typer.Option(help="server; else one that runs, else in this process")] = None,
    log_dir: Annotated[Path, typer.Option(help="metrics and checkpoints; a run there is resumed")] = Path("runs/dpo"),
    start_from: Annotated[Path | None, typer.Option(help="file with the reference of a model to begin with")] = None,
    output: Annotated[Path, typer.Option(help="file for the reference of the trained model")] = Path("dpo_model.txt"),
    kind: Annotated[str, typer.Option(help="dpo, or reward_model: learn to judge instead")] = "dpo",
    beta: Annotated[float, typer.Option(help="how strongly it holds on to where it began")] = 0.1,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 1e-3,
    optimizer: Annotated[str, typer.Option(help=", ".join(OPTIMIZERS))] = "adamw",
    method: Annotated[Method, typer.Option(help="lora, or full: train the weights of the model itself")] = "lora",
    rank: Annotated[int, typer.Option(min=1)] = 32,
    batch_size: Annotated[int, typer.Option(help="pairs in a step", min=1)] = 32,
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    max_steps: Annotated[int | None, typer.Option(min=1)] = None,
    max_length: Annotated[
        int, typer.Option(help="tokens of a question and its answer; the rest is cut off", min=1)
    ] = 512,
    num_held_out: Annotated[
        int | None, typer.Option(help="pairs to measure with; without one a tenth, at most 100")
    ] = None,
    eval_every: int = 10,
    save_every: Annotated[int, typer.Option(min=1)] = 20,
    seed: int = 0,
) -> None:
    all_rows = load_rows(data) if data else generate_pairs(1000, seed)
    rows, held_out = split_off(all_rows, num_held_out, seed, most=100)
    make = preference.dpo_pair if kind == "dpo" else preference.reward_pair
    with recipe_service(model, base_url) as service:
        renderer = get_renderer("auto", get_tokenizer(service, model))
        pairs = [make(row, renderer, max_length) for row in rows]
        dataset: ShuffledDataset[preference.Pair] = ShuffledDataset(pairs, batch_size, num_epochs=epochs, seed=seed)
        if advice := dataset.length_advice(max_steps):
            print(advice)
        config = preference.Config(
            log_dir=log_dir,
            base_model=model,
            dataset=dataset,
            kind=kind,  # type: ignore[arg-type]
            beta=beta,
            learning_rate=learning_rate,
            optimizer=optimizer,
            method=method,
            rank=rank,
            seed=seed,
            load_from=read_reference(start_from) if start_from else None,
            max_steps=max_steps,
            test_pairs=[make(row, renderer, max_length) for row in held_out],
            eval_every=eval_every,
            save_every=save_every,
            notes={"data": data, "batch_size": batch_size, "max_length": max_length},
        )
        result = asyncio.run(preference.train(config, service))
    write_atomically(output, result.checkpoint.sampler_path + "\n")
    if held_out:
        print(f"held-out accuracy {result.metrics['test/accuracy']:.1%}, margin {result.metrics['test/margin']:.3f}")
    print(f"model: {result.checkpoint.sampler_path} (in {output})")


if __name__ == "__main__":
    run_recipe(main)
