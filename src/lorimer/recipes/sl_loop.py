"""Supervised learning on the bare SDK: a loop to read from top to bottom that teaches a model addition.

    python -m lorimer.recipes.sl_loop

With lorimer/tiny in this process it takes 38 seconds of CPU time on an AMD EPYC, two cores and no GPU; accuracy on
held-out sums rises from 35 % to 97 %. After an interruption it resumes from its last checkpoint. `sl_basic` does the
same with the cookbook.
"""

import json
import random
from pathlib import Path
from typing import Annotated, Any

import typer

from lorimer import types
from lorimer.cookbook.program import recipe_service
from lorimer.terminal import run_recipe

Sum = tuple[int, int]
PAIRS = [(a, b) for a in range(100) for b in range(100)]
HELD_OUT = random.Random(0).sample(PAIRS, 100)
TRAINING = sorted(set(PAIRS) - set(HELD_OUT))


def prompt_tokens(tokenizer: Any, pair: Sum) -> list[int]:
    """Render the question with the model's chat template, up to where the model answers."""
    messages = [{"role": "user", "content": f"What is {pair[0]} + {pair[1]}?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def make_datum(tokenizer: Any, pair: Sum) -> types.Datum:
    """Build a datum that predicts each next token; only the answer and its end-of-sequence token have weight."""
    prompt = prompt_tokens(tokenizer, pair)
    answer = [*tokenizer.encode(str(sum(pair)), add_special_tokens=False), tokenizer.eos_token_id]
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},  # type: ignore[dict-item]
    )


def accuracy(training: Any, tokenizer: Any, questions: list[Sum]) -> float:
    """Return the share of questions that the current weights answer correctly with greedy sampling."""
    sampler = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=8, temperature=0, stop=[tokenizer.eos_token_id])
    prompts = [types.ModelInput.from_ints(prompt_tokens(tokenizer, pair)) for pair in questions]
    futures = [sampler.sample(prompt, num_samples=1, sampling_params=params) for prompt in prompts]
    answers = [tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True) for future in futures]
    right = [bool(answer.strip() == str(sum(pair))) for answer, pair in zip(answers, questions, strict=True)]
    return sum(right) / len(right)


def main(
    model: Annotated[str, typer.Option(help="base model")] = "lorimer/tiny",
    base_url: Annotated[str | None, typer.Option(help="server; else one that runs, else in this process")] = None,
    log_dir: Annotated[Path, typer.Option(help="where the checkpoint path is stored")] = Path("runs/sl_loop"),
    steps: Annotated[int, typer.Option(min=1)] = 60,
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 4e-3,
    rank: Annotated[int, typer.Option(min=1)] = 16,
    save_every: Annotated[int, typer.Option(min=1)] = 20,
    num_questions: Annotated[int, typer.Option(min=1)] = 100,
    seed: int = 0,
) -> None:
    log_dir.mkdir(parents=True, exist_ok=True)
    note = log_dir / "checkpoint.json"
    with recipe_service(model, base_url) as service:
        if note.exists():
            saved = json.loads(note.read_text("utf-8"))
            training, first = service.create_training_client_from_state_with_optimizer(saved["path"]), saved["step"]
            print(f"resumed at step {first} from {saved['path']}, with rank {training.get_info().lora_rank}")
        else:
            training, first = service.create_lora_training_client(model, rank=rank, seed=seed), 0
        tokenizer = training.get_tokenizer()
        print(f"step {first}: {accuracy(training, tokenizer, HELD_OUT[:num_questions]):.0%} of held-out sums are right")

        for step in range(first, steps):
            pairs = random.Random(f"{seed} {step}").sample(TRAINING, batch_size)
            # Submit both before waiting for either; the server runs them in order.
            fwd_bwd_future = training.forward_backward([make_datum(tokenizer, pair) for pair in pairs], "cross_entropy")
            optim_future = training.optim_step(types.AdamParams(learning_rate=learning_rate * (1 - step / steps)))
            metrics = fwd_bwd_future.result().metrics
            optim_future.result()
            print(f"step {step + 1}/{steps}: loss per token {metrics['loss:sum'] / metrics['weight:sum']:.4f}")
            if (step + 1) % save_every == 0 or step + 1 == steps:
                path = training.save_state(f"{step + 1:06d}").result().path
                note.with_suffix(".part").write_text(json.dumps({"step": step + 1, "path": path}), "utf-8")
                note.with_suffix(".part").replace(note)

        right = accuracy(training, tokenizer, HELD_OUT[:num_questions])
    print(f"step {steps}: {right:.0%} of held-out sums are right")
    print(f"checkpoint: {json.loads(note.read_text('utf-8'))['path']}")


if __name__ == "__main__":
    run_recipe(main)
