"""Makes `lorimer/tiny`: trains its tokenizer and weights on the text of `tiny_data.py`, measures and writes them.

    python tools/pretrain_tiny.py --out DIRECTORY      train, measure, write (minutes, one thread)
    python tools/pretrain_tiny.py --score              measure the bundled files again and print the scores

The same seed and thread count give the same weights on the same machine; other machines round differently.
Plain transformers and torch: nothing here is Lorimer's engine. `finetune_tiny.py` shows what the model can learn.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tiny_data import documents, is_held_out

BUNDLED = Path(__file__).resolve().parent.parent / "src" / "lorimer" / "models" / "tiny"
CONTEXT = 1024
ROW_LENGTH = 256
STEP_TOKENS = 2048
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HELD_OUT_TEXT_SEED = 1_000_000
"""Seed of the documents for the perplexity; a training seed must be another one."""

Question = tuple[int, int]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which each digit is its own token and every UTF-8 text has an encoding."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    end_of_text, end_of_turn = tokenizer.pad_token_id, tokenizer.eos_token_id
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=args.hidden // 4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=end_of_turn,
        pad_token_id=end_of_text,
        use_cache=True,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[end_of_turn, end_of_text], pad_token_id=end_of_text)
    return model


def packed_rows(
    tokenizer: PreTrainedTokenizerFast, seed: int, row_length: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Rows of whole documents as (tokens, lengths of the documents); a document longer than a row is cut."""
    end_of_text = tokenizer.pad_token_id
    row: list[int] = []
    lengths: list[int] = []
    for text in documents(seed):
        tokens = [*tokenizer.encode(text, add_special_tokens=False), end_of_text][:row_length]
        if len(row) + len(tokens) > row_length:
            yield row, lengths
            row, lengths = [], []
        row, lengths = row + tokens, [*lengths, len(tokens)]


def batch_tensors(rows: list[tuple[list[int], list[int]]], row_length: int) -> dict[str, torch.Tensor]:
    """Model inputs of some rows: attention stays within a document, positions start at 0 in each."""
    tokens_BT = torch.zeros(len(rows), row_length, dtype=torch.long)
    labels_BT = torch.full((len(rows), row_length), -100)
    document_BT = torch.full((len(rows), row_length), -1)
    positions_BT = torch.zeros(len(rows), row_length, dtype=torch.long)
    for i, (tokens, lengths) in enumerate(rows):
        tokens_BT[i, : len(tokens)] = torch.tensor(tokens)
        starts = itertools.accumulate(lengths, initial=0)
        for number, (start, length) in enumerate(zip(starts, lengths, strict=False)):
            document_BT[i, start : start + length] = number
            positions_BT[i, start : start + length] = torch.arange(length)
            # The label of position t is token t + 1; the last token of a document predicts nothing.
            labels_BT[i, start : start + length - 1] = tokens_BT[i, start + 1 : start + length]
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    mask_B1TT = (same_BTT & torch.ones(row_length, row_length, dtype=torch.bool).tril())[:, None]
    return {
        "input_ids": tokens_BT, "attention_mask": mask_B1TT, "position_ids": positions_BT, "labels": labels_BT,
        "weights": (labels_BT != -100).float(),
    }  # fmt: skip


def favour_answers(batch: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerFast) -> None:
    """Lets the tokens of a user's turn count a tenth: their numbers are drawn at random, so they teach little."""
    vocabulary = tokenizer.get_vocab()
    tokens_BT = batch["input_ids"]
    starts_BT = tokens_BT.eq(vocabulary["<|im_start|>"])
    asks_BT = starts_BT & tokens_BT.roll(-1, 1).eq(vocabulary["user"])
    index_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    last_start_BT = torch.where(starts_BT, index_BT, 0).cummax(1).values
    last_end_BT = torch.where(tokens_BT.eq(vocabulary["<|im_end|>"]), index_BT, -1).cummax(1).values
    in_question_BT = asks_BT.gather(1, last_start_BT) & (last_end_BT <= last_start_BT)
    batch["weights"][in_question_BT] *= 0.1


def batch_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Weighted mean of the cross-entropy of the predicted tokens, in nats."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits_BTV = model(**inputs, use_cache=False).logits
    losses_BT = F.cross_entropy(logits_BTV.transpose(1, 2), batch["labels"], reduction="none")
    return (losses_BT * batch["weights"]).sum() / batch["weights"].sum()


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up over the first 5 % of the steps, then a cosine down to a tenth."""
    warmup = max(1, args.steps // 20)
    if step < warmup:
        return float(args.lr * (step + 1) / warmup)
    progress = (step - warmup) / max(1, args.steps - warmup)
    return float(args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress))))


def pretrain(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> tuple[Qwen3ForCausalLM, int]:
    """The trained model and the number of tokens it was trained on."""
    model = build_model(args, tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens in the vocabulary")
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98))
    short_rows = packed_rows(tokenizer, args.seed, ROW_LENGTH)
    long_rows = packed_rows(tokenizer, args.seed + 1, CONTEXT)
    num_tokens, started, smooth = 0, time.monotonic(), 0.0
    num_steps = min(args.stop, args.steps)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        # Short rows waste less attention; the long ones teach every position of the context.
        row_length, rows = (CONTEXT, long_rows) if step % 8 == 7 else (ROW_LENGTH, short_rows)
        batch = batch_tensors(list(itertools.islice(rows, STEP_TOKENS // row_length)), row_length)
        favour_answers(batch, tokenizer)
        loss = batch_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        num_tokens += int((batch["labels"] != -100).sum())
        smooth = loss.item() if step == 0 else 0.98 * smooth + 0.02 * loss.item()
        if (step + 1) % args.report == 0 or step + 1 == num_steps:
            seconds = time.monotonic() - started
            progress = f"step {step + 1}/{num_steps}  loss {smooth:.3f}  {num_tokens / seconds:,.0f} tokens/s"
            print(f"{progress}  {seconds:.0f} s{watched(model, tokenizer) if args.watch else ''}", flush=True)
    return model.eval(), num_tokens


def watched(model: Any, tokenizer: Any) -> str:
    """Greedy accuracy so far, on a quarter of the questions."""
    model.eval()
    one, two = (accuracy(model, tokenizer, pairs, False) for pairs in (all_questions(9), held_out_questions(99)[::4]))
    model.train()
    return f"  one digit {one['exact']:.1%}  two digits {two['exact']:.1%}"


def all_questions(most: int) -> list[Question]:
    return list(itertools.product(range(most + 1), range(most + 1)))


def held_out_questions(most: int) -> list[Question]:
    """Every (a, b) with numbers in 0..most that never occur together in the training text."""
    return [pair for pair in all_questions(most) if is_held_out(*pair)]


def chat_prompt(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


@torch.no_grad()
def replies(model: Any, tokenizer: Any, questions: list[str], sampled: bool, max_new_tokens: int = 8) -> list[str]:
    """The model's reply to each question, special tokens included; prompts of one length run together, unpadded."""
    prompts = [chat_prompt(tokenizer, question) for question in questions]
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, prompt in enumerate(prompts):
        by_length[len(prompt)].append(i)
    texts = [""] * len(questions)
    for length, members in by_length.items():
        ids = torch.tensor([prompts[i] for i in members])
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
            do_sample=sampled, top_k=0 if sampled else None,
        )  # fmt: skip
        for i, tokens in zip(members, out[:, length:], strict=True):
            texts[i] = tokenizer.decode(tokens)
    return texts


def accuracy(model: Any, tokenizer: Any, pairs: list[Question], sampled: bool) -> dict[str, float]:
    """Shares of "What is a + b?" answered with exactly the number, and of replies that end by themselves."""
    torch.manual_seed(0)
    texts = replies(model, tokenizer, [f"What is {a} + {b}?" for a, b in pairs], sampled)
    exact = sum(text.split("<|im_end|>")[0] == str(a + b) for text, (a, b) in zip(texts, pairs, strict=True))
    ended = sum("<|im_end|>" in text for text in texts)
    return {"exact": round(exact / len(pairs), 4), "ended": round(ended / len(pairs), 4)}


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any, num_rows: int = 16) -> float:
    """Per token, on documents of a seed that is never trained on."""
    rows = list(itertools.islice(packed_rows(tokenizer, HELD_OUT_TEXT_SEED, 512), num_rows))
    losses = [batch_loss(model, batch_tensors(rows[i : i + 8], 512)).item() for i in range(0, num_rows, 8)]
    return round(math.exp(sum(losses) / len(losses)), 4)


def measure(directory: Path) -> dict[str, Any]:
    """Scores of the files in a directory, in float32."""
    model, tokenizer = load(directory)
    scores: dict[str, Any] = {}
    for name, pairs in {
        "one_digit_all": all_questions(9),
        "one_digit_held_out": held_out_questions(9),
        "two_digit_held_out": held_out_questions(99),
    }.items():
        greedy, sampled = (accuracy(model, tokenizer, pairs, sampled) for sampled in (False, True))
        scores[name] = {"questions": len(pairs), "greedy": greedy, "sampled": sampled}
    scores["perplexity"] = perplexity(model, tokenizer)
    scores["vocabulary"] = len(tokenizer)
    scores["parameters"] = sum(p.numel() for p in model.parameters())
    scores["sha256"] = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    return scores


def load(directory: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(directory)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=BUNDLED, help="directory of the model files (default: the bundled)")
    parser.add_argument("--score", action="store_true", help="measure the files in --out instead of training")
    parser.add_argument("--seed", type=int, default=0, help="of the text and the initial weights")
    parser.add_argument(
        "--steps", type=int, default=1700, help="length of the learning-rate schedule, in steps of 2048 tokens"
    )
    parser.add_argument("--stop", type=int, default=935, help="steps after which to end, half-taught on purpose")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size")
    parser.add_argument("--layers", type=int, default=4, help="number of layers")
    parser.add_argument("--vocab", type=int, default=1024, help="size of the vocabulary")
    parser.add_argument("--report", type=int, default=50, help="steps between progress lines")
    parser.add_argument("--watch", action="store_true", help="measure sums at each progress line")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    if args.score:
        print(json.dumps(measure(args.out), indent=2))
    else:
        write(args)


def use_portable_class(path: Path) -> None:
    """Names the tokenizer class that transformers 4 knows too."""
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n")


def write(args: argparse.Namespace) -> None:
    started = time.monotonic()
    tokenizer = train_tokenizer(itertools.islice(documents(args.seed), 20_000), args.vocab)
    model, num_tokens = pretrain(args, tokenizer)
    args.out.mkdir(parents=True, exist_ok=True)
    model.bfloat16().save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(args.out, save_jinja_files=False)
    use_portable_class(args.out / "tokenizer_config.json")
    training = {
        "seed": args.seed,
        "steps": min(args.stop, args.steps),
        "tokens": num_tokens,
        "seconds": round(time.monotonic() - started),
    }
    scores = {**measure(args.out), "training": training}
    (args.out / "scores.json").write_text(json.dumps(scores, indent=2) + "\n")
    print(json.dumps(scores, indent=2))


if __name__ == "__main__":
    main()
