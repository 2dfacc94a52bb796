"""Prompt distillation: trains a model to behave as if it had read a long prompt.

    python -m lorimer.recipes.prompt_distillation
    python -m lorimer.recipes.prompt_distillation --prompt-file rules.txt --data questions.jsonl --model MODEL

The teacher is the base model with the prompt before each question. It writes answers; the student learns them without
the prompt or, with `--top-k`, learns the teacher's most likely tokens at each position. Without files the questions are
sums and the prompt is other sums with their answers. With 300 questions and lorimer/tiny, 19 steps lower the nll of the
teacher's answers without the prompt from 1.68 to 1.20, in a little over a minute on a busy machine of two cores.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lorimer import Datum, ServiceClient
from lorimer.chat.conversation import Message
from lorimer.cookbook import distillation, supervised
from lorimer.cookbook.arithmetic import split_sums
from lorimer.cookbook.checkpoints import Method
from lorimer.cookbook.datasets import ShuffledDataset, check_fields, default_held_out, load_rows, split_off
from lorimer.cookbook.datums import datum_from_tokens, num_tokens
from lorimer.cookbook.evaluation import nll
from lorimer.cookbook.program import recipe_service
from lorimer.cookbook.renderers import Renderer, get_renderer
from lorimer.cookbook.service import get_tokenizer
from lorimer.errors import InvalidInput
from lorimer.terminal import run_recipe
from lorimer.types.optim import OPTIMIZERS


def examples_as_prompt(number: int) -> list[Message]:
    """Return questions with answers in a format that the model would not choose by itself."""
    turns: list[Message] = []
    for a, b in split_sums()[0][5 : 5 + 631 * number : 631]:
        turns += [
            {"role": "user", "content": f"What is {a} + {b}?"},
            {"role": "assistant", "content": f"The sum of {a} and {b} is {a + b}."},
        ]
    return turns


def as_text(prompt: distillation.Prompt, answer: list[int]) -> Datum:
    """Build a datum of the answer after the student's prompt; only the answer has weight."""
    tokens = [*prompt.student.to_ints(), *answer]
    return datum_from_tokens(tokens, [0.0] * prompt.student.length + [1.0] * len(answer))


def main(
    model: Annotated[str, typer.Option(help="base model, teacher and student")] = "lorimer/tiny",
    base_url: Annotated[str | None, typer.Option(help="server; else one that runs, else in this process")] = None,
    log_dir: Annotated[Path, typer.Option(help="metrics and checkpoints; a run there is resumed")] = Path(
        "runs/prompt_distillation"
    ),
    prompt_file: Annotated[
        Path | None, typer.Option(help="text of the system's message that only the teacher reads")
    ] = None,
    data: Annotated[str | None, typer.Option(help="JSONL with a question in each line")] = None,
    num_questions: Annotated[int, typer.Option(min=1)] = 800,
    num_held_out: Annotated[
        int | None, typer.Option(help="questions to measure with; without one a tenth, at most 100")
    ] = None,
    num_examples: Annotated[int, typer.Option(help="questions in the prompt, without --prompt-file")] = 6,
    num_samples: Annotated[int, typer.Option(help="answers of the teacher to each question", min=1)] = 2,
    max_tokens: Annotated[int, typer.Option(min=1)] = 24,
    top_k: Annotated[int, typer.Option(help="learn so many likely tokens at each place; 0 learns the text")] = 8,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 2e-3,
    optimizer: Annotated[str, typer.Option(help=", ".join(OPTIMIZERS))] = "adamw",
    method: Annotated[Method, typer.Option(help="lora, or full: train the weights of the model itself")] = "lora",
    rank: Annotated[int, typer.Option(min=1)] = 16,
    max_steps: Annotated[int | None, typer.Option(min=1)] = None,
    eval_every: int = 10,
    seed: int = 0,
) -> None:
    sums = [{"question": f"What is {a} + {b}?"} for a, b in split_sums()[0]]
    rows: Sequence[Any] = check_fields(load_rows(data), "question") if data else sums
    num_test = default_held_out(len(rows), 100) if num_held_out is None else num_held_out
    rows = rows[: num_questions + num_test] if data else split_off(rows, num_questions + num_test, seed)[1]
    if not 0 <= num_test < len(rows):
        raise InvalidInput(f"num_held_out is {num_test} and there are {len(rows)} questions; fewer are accepted")
    rules: list[Message] = examples_as_prompt(num_examples)
    if prompt_file:
        rules = [{"role": "system", "content": prompt_file.read_text("utf-8")}]

    async def run(service: ServiceClient, renderer: Renderer) -> tuple[dict[str, float], supervised.Result]:
        teacher = await service.create_sampling_client_async(base_model=model)

        def prompts(row: dict[str, str]) -> distillation.Prompt:
            question: Message = {"role": "user", "content": row["question"]}
            with_rules = renderer.build_generation_prompt([*rules, question])
            return distillation.Prompt(renderer.build_generation_prompt([question]), with_rules)

        asked = [prompts(row) for row in rows]
        answers = await distillation.write_answers(
            teacher,
            [prompt.of_teacher for prompt in asked],
            renderer.get_stop_sequences(),
            max_tokens=max_tokens,
            num_samples=num_samples,
            seed=seed,
        )
        pairs = [(prompt, answer) for prompt, found in zip(asked, answers, strict=True) for answer in found]
        held_out = {id(prompt) for prompt in asked[len(asked) - num_test :]}
        learned = [pair for pair in pairs if id(pair[0]) not in held_out]
        test = [as_text(*pair) for pair in pairs if id(pair[0]) in held_out]
        examples = [as_text(*pair) for pair in learned]
        if top_k:
            examples = await asyncio.gather(*(distillation.soft_datum(teacher, *pair, top_k) for pair in learned))
        print(f"the teacher wrote {len(pairs)} answers; the student reads {num_tokens(examples)} tokens of them")
        config = supervised.Config(
            log_dir=log_dir,
            base_model=model,
            dataset=ShuffledDataset(examples, batch_size, seed=seed),
            learning_rate=learning_rate,
            optimizer=optimizer,
            method=method,
            rank=rank,
            seed=seed,
            max_steps=max_steps,
            test_data=test,
            eval_every=eval_every,
            save_every=20,
            notes={"rules": rules, "data": data, "top_k": top_k, "num_samples": num_samples},
        )
        before = await nll(test)(teacher) if test else {}  # the base model without the prompt
        return before, await supervised.train(config, service)

    with recipe_service(model, base_url) as service:
        before, result = asyncio.run(run(service, get_renderer("auto", get_tokenizer(service, model))))
    if before:
        print(f"nll of the teacher's answers without the prompt: {before['test/nll']:.3f} before,", end=" ")
        print(f"{result.metrics['test/nll']:.3f} after")
    print(f"student: {result.checkpoint.sampler_path}")


if __name__ == "__main__":
    run_recipe(main)
