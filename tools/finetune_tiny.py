"""Fine-tunes `lorimer/tiny` with LoRA (PEFT, supervised) and prints what it has learned on the way; writes nothing.

    python tools/finetune_tiny.py sums      adding two numbers, measured on pairs it has never seen
    python tools/finetune_tiny.py name      a name of its own

It shows, without Lorimer's engine, that the bundled model learns within a minute on a CPU.
"""

import argparse
import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from pretrain_tiny import BUNDLED, accuracy, batch_loss, batch_tensors, chat_prompt, held_out_questions, load, replies
from tiny_data import NAME_QUESTIONS, is_held_out


def sum_examples(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Questions from pairs that are not held out, so that the held-out ones still measure adding."""
    while True:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        if not is_held_out(a, b):
            yield f"What is {a} + {b}?", str(a + b)


def name_examples(rng: random.Random) -> Iterator[tuple[str, str]]:
    while True:
        yield rng.choice(NAME_QUESTIONS), "My name is Lori."


def learn(args: argparse.Namespace) -> None:
    """Supervised LoRA fine-tuning of the bundled model, with what it answers before, during and after."""
    base, tokenizer = load(args.model)
    torch.manual_seed(args.seed)
    config = LoraConfig(r=args.rank, lora_alpha=32, target_modules="all-linear")
    model = get_peft_model(base, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr, weight_decay=0)
    examples = (sum_examples if args.task == "sums" else name_examples)(random.Random(args.seed))
    seconds = 0.0
    for step in range(args.steps + 1):
        if step % 10 == 0:
            print(f"step {step:3d}  {seconds:5.1f} s of training  {learned(args.task, model.eval(), tokenizer)}")
            model.train()
        started = time.monotonic()
        batch = chat_batch(tokenizer, list(itertools.islice(examples, args.batch)))
        batch_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.monotonic() - started


def chat_batch(tokenizer: Any, examples: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """One example per row; only the answer and the token that ends it are learned."""
    rows, prompt_lengths = [], []
    for question, answer in examples:
        prompt = chat_prompt(tokenizer, question)
        tokens = prompt + tokenizer.encode(answer + "<|im_end|>", add_special_tokens=False)
        rows.append((tokens, [len(tokens)]))
        prompt_lengths.append(len(prompt))
    batch = batch_tensors(rows, max(len(tokens) for tokens, _ in rows))
    for i, length in enumerate(prompt_lengths):
        batch["weights"][i, : length - 1] = 0
    return batch


def learned(task: str, model: Any, tokenizer: Any) -> str:
    if task == "name":
        return str(replies(model, tokenizer, [*NAME_QUESTIONS[:2], "What is 3 + 4?"], False, max_new_tokens=16))
    pairs = held_out_questions(99)
    greedy, sampled = (accuracy(model, tokenizer, pairs, sampled)["exact"] for sampled in (False, True))
    return f"held-out sums: greedy {greedy:.1%}, sampled {sampled:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["sums", "name"], help="what to teach")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="directory of the model (default: the bundled one)")
    parser.add_argument("--steps", type=int, default=60, help="optimiser steps")
    parser.add_argument("--batch", type=int, default=64, help="examples in a step")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate, constant")
    parser.add_argument("--rank", type=int, default=16, help="LoRA rank")
    parser.add_argument("--seed", type=int, default=0, help="of the examples and the adapter")
    torch.set_num_threads(1)
    learn(parser.parse_args())


if __name__ == "__main__":
    main()
