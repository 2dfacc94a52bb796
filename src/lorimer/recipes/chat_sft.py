"""Fine-tunes any chat model on conversations from a chat JSONL file or a Hugging Face dataset.

    python -m lorimer.recipes.chat_sft --data conversations.jsonl

A line is `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}`; rows with
prompt and completion, question and answer, or instruction and output are accepted too. For a dataset of the hub write
`--data HuggingFaceH4/no_robots`. With 1,100 short instructions and lorimer/tiny in this process, 33 steps take 36
seconds of CPU time on an AMD EPYC, two cores and no GPU; held-out nll falls from 7.63 to 4.46.
"""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from lorimer.chat.conversation import TrainOn
from lorimer.cookbook import supervised
from lorimer.cookbook.checkpoints import Method
from lorimer.cookbook.datasets import chat_dataset, check_conversations, datum_maker, load_rows, split_off
from lorimer.cookbook.hyperparams import lora_learning_rate
from lorimer.cookbook.program import recipe_service
from lorimer.cookbook.renderers import get_renderer
from lorimer.cookbook.service import get_tokenizer
from lorimer.terminal import run_recipe
from lorimer.types.optim import OPTIMIZERS


def main(
    data: Annotated[str, typer.Option(help=".jsonl or .json file, or Hugging Face dataset as name or name:config")],
    model: Annotated[str, typer.Option(help="base model")] = "lorimer/tiny",
    base_url: Annotated[str | None, typer.Option(help="server; else one that runs, else in this process")] = None,
    log_dir: Annotated[Path, typer.Option(help="metrics and checkpoints; a run there is resumed")] = Path(
        "runs/chat_sft"
    ),
    renderer_name: Annotated[str, typer.Option("--renderer", help="auto, template, no_thinking or text")] = "auto",
    train_on: Annotated[TrainOn, typer.Option(help="which messages are learned")] = TrainOn.ALL_ASSISTANT_MESSAGES,
    learning_rate: Annotated[float | None, typer.Option(help="without one the LoRA rule gives it", min=0.0)] = None,
    optimizer: Annotated[str, typer.Option(help=", ".join(OPTIMIZERS))] = "adamw",
    method: Annotated[Method, typer.Option(help="lora, or full: train the weights of the model itself")] = "lora",
    rank: Annotated[int, typer.Option(min=1)] = 32,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    max_steps: Annotated[int | None, typer.Option(min=1)] = None,
    max_length: Annotated[int, typer.Option(help="tokens of a conversation; the rest is cut off", min=1)] = 1024,
    num_held_out: Annotated[
        int | None, typer.Option(help="conversations to measure with; without one a tenth, at most 64")
    ] = None,
    eval_every: int = 10,
    save_every: Annotated[int, typer.Option(min=1)] = 20,
    seed: int = 0,
) -> None:
    rows, held_out = split_off(check_conversations(load_rows(data)), num_held_out, seed)
    with recipe_service(model, base_url) as service:
        tokenizer = get_tokenizer(service, model)
        if learning_rate is None:
            recommended = lora_learning_rate(model, directory=tokenizer.name_or_path, is_full=method == "full")
            print(recommended)
            learning_rate = recommended.value
        renderer = get_renderer(renderer_name, tokenizer)
        convert = datum_maker(renderer, max_length=max_length, train_on=train_on)
        dataset = chat_dataset(
            rows,
            renderer,
            batch_size=batch_size,
            max_length=max_length,
            train_on=train_on,
            num_epochs=epochs,
            seed=seed,
        )
        if advice := dataset.length_advice(max_steps):
            print(advice)
        config = supervised.Config(
            log_dir=log_dir,
            base_model=model,
            dataset=dataset,
            learning_rate=learning_rate,
            optimizer=optimizer,
            method=method,
            rank=rank,
            seed=seed,
            max_steps=max_steps,
            test_data=[datum for row in held_out for datum in convert(row)],
            eval_every=eval_every,
            save_every=save_every,
            notes={"data": data, "batch_size": batch_size, "max_length": max_length, "train_on": train_on},
        )
        result = asyncio.run(supervised.train(config, service))
    if held_out:
        print(f"held-out nll {result.metrics['test/nll']:.4f}")
    print(f"checkpoint: {result.checkpoint.sampler_path}")


if __name__ == "__main__":
    run_recipe(main)
