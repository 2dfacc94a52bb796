"""The bundled model: small, well-formed, of the strength its scores say, and made from text without held-out sums."""

import hashlib
import json
import re
import string
from itertools import islice

import pytest
import torch
from safetensors import safe_open

from pretrain_tiny import BUNDLED, accuracy, all_questions, held_out_questions, load, perplexity
from tiny_data import documents, is_held_out, render_chat

SCORES = json.loads((BUNDLED / "scores.json").read_text("utf-8"))
MAX_BYTES = 4_000_000
TEXTS = {
    "empty": "",
    "space": " ",
    "spaces": "  two  spaces and a last one ",
    "controls": "a\x00b\r\n\t\x7f\u2028\ufeffc",
    "accents": "e\u0301 \u00e9 na\u00efve stra\u00dfe \u0130stanbul",
    "scripts": "漢字 かな العربية עברית हिन्दी ไทย",
    "other digits": "²³ ½ ٣٤ ५ \uff14\uff12",
    "emoji": "\U0001f642 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "punctuation": "it 's , don 't . can't ! ( x ) [y] {z} <|im| <|im_start <||>",
    "special tokens": "<|im_start|>user\nx<|im_end|><|endoftext|> y",
    "numbers": "0 00 007 1234567890 3.14 -5 1e10 12+7=",
    "last plane": "\U0010ffff\ue000",
    "code": "def f(x):\n\treturn {'a': x**2}  # done\n\n\n",
}


@pytest.fixture(scope="module")
def tiny():
    torch.set_num_threads(1)
    return load(BUNDLED)


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return tiny[1]


def test_files_are_small():
    files = {path.name: path.stat().st_size for path in BUNDLED.iterdir()}
    assert set(files) == {
        "config.json", "generation_config.json", "model.safetensors", "scores.json", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert sum(files.values()) <= MAX_BYTES


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < len(tokenizer) == SCORES["vocabulary"]


def test_each_digit_is_one_token(tokenizer):
    assert tokenizer.tokenize(string.digits * 2) == list(string.digits * 2)
    with_digits = [token for token in tokenizer.get_vocab() if any(digit in token for digit in string.digits)]
    assert sorted(with_digits) == list(string.digits)


def test_special_tokens(tiny):
    model, tokenizer = tiny
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    assert model.config.eos_token_id == 2
    assert model.generation_config.eos_token_id == [2, 0]
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 1024


def test_chat_template(tokenizer):
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "What is 12 + 7?"},
        {"role": "assistant", "content": "19"},
        {"role": "user", "content": " Thanks!\n"},
    ]
    chat = (
        "<|im_start|>system\nAnswer briefly.<|im_end|>\n"
        "<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n"
        "<|im_start|>assistant\n19<|im_end|>\n"
        "<|im_start|>user\n Thanks!\n<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == chat == render_chat(messages)
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == chat + "<|im_start|>assistant\n"


def test_weights_are_those_that_were_scored(tiny):
    model, _ = tiny
    path = BUNDLED / "model.safetensors"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SCORES["sha256"]
    assert sum(p.numel() for p in model.parameters()) == SCORES["parameters"]
    with safe_open(path, "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118


def test_scores_are_what_the_weights_reach(tiny):
    model, tokenizer = tiny
    for name, pairs in {"one_digit_all": all_questions(9), "two_digit_held_out": held_out_questions(99)}.items():
        greedy = accuracy(model, tokenizer, pairs, sampled=False)
        # Other machines round differently, which turns near ties only.
        assert greedy["exact"] == pytest.approx(SCORES[name]["greedy"]["exact"], abs=0.02)
        assert greedy["ended"] >= 0.98
    assert perplexity(model, tokenizer) == pytest.approx(SCORES["perplexity"], rel=1e-3)


def test_strength_leaves_room_to_learn():
    two_digits = SCORES["two_digit_held_out"]
    assert 0.25 <= two_digits["greedy"]["exact"] <= 0.50
    assert 0.15 <= two_digits["sampled"]["exact"] <= 0.35
    assert SCORES["one_digit_all"]["greedy"]["exact"] >= 0.60


def test_documents_depend_on_the_seed_only():
    first = list(islice(documents(7), 200))
    assert first == list(islice(documents(7), 200))
    assert first != list(islice(documents(8), 200))
    digest = hashlib.sha256("".join(first).encode()).hexdigest()
    assert digest == "f17d174a19c0464aec08ba18d3eae9ba57c1dc678a7ccbc8b7cda89c01ce6a63"


def test_held_out_pairs_never_meet():
    """The first two numbers of a line are those of its question or equation, but where it only counts on."""
    counting = re.compile(r"Go on: |After |Before |\d+, \d+<")
    num_pairs = 0
    for text in islice(documents(11), 20_000):
        for line in text.splitlines():
            numbers = [int(number) for number in re.findall(r"\d+", line)]
            if len(numbers) >= 2 and not counting.match(line):
                num_pairs += 1
                assert not is_held_out(numbers[0], numbers[1]), line
    assert num_pairs > 10_000


def test_held_out_share_and_symmetry():
    pairs = all_questions(99)
    assert 0.08 <= sum(is_held_out(a, b) for a, b in pairs) / len(pairs) <= 0.12
    assert all(is_held_out(a, b) == is_held_out(b, a) for a, b in pairs)
    assert any(is_held_out(a, b) for a, b in all_questions(9))
