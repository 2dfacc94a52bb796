"""Debug models of every architecture load offline, run, and depend on nothing but their arguments."""

import hashlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorimer.errors import InvalidInput
from lorimer.models.debug import ARCHITECTURES, VOCAB_SIZE, make_debug_model, tiny_config, tiny_model

TEXT = "the loving caf\u00e9 10 \u65e5\u672c \x00\n\n<|im_end|>'ll"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_debug_model_loads_and_is_not_flat(tmp_path, architecture):
    started = time.perf_counter()
    make_debug_model(tmp_path, architecture=architecture, seed=5)
    assert time.perf_counter() - started < 5
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1_000_000
    model = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert model.config.model_type == architecture
    tokens_T = torch.tensor(tokenizer.encode(TEXT))
    assert tokenizer.decode(tokens_T) == TEXT
    with torch.no_grad():
        logits_TV = model(tokens_T[None]).logits[0]
        expected_TV = tiny_model(architecture, seed=5)(tokens_T[None]).logits[0]
    assert torch.equal(logits_TV, expected_TV)
    assert logits_TV.std() > 0.5
    assert logits_TV.argmax(-1).unique().numel() > 5


def test_tokenizer_has_a_chat_template_and_ends_turns(tmp_path):
    make_debug_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    chat = [{"role": "user", "content": "2+2?"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"
    assert len(tokenizer) == VOCAB_SIZE
    assert AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id == tokenizer.eos_token_id


def digest(directory: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(directory.iterdir()))).hexdigest()


@pytest.mark.parametrize("architecture", ["qwen3", "gpt_oss"])
def test_the_same_arguments_give_the_same_files_whatever_the_global_seed(tmp_path, architecture):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    make_debug_model(tmp_path / "a", architecture=architecture, seed=7)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    make_debug_model(tmp_path / "b", architecture=architecture, seed=7)
    make_debug_model(tmp_path / "c", architecture=architecture, seed=8)
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3_text", "gpt_oss"])
def test_sliding_windows_bite(architecture):
    """With one layer, a token further back than the window cannot change a logit."""
    one_layer: dict[str, Any] = {"num_hidden_layers": 1} | (
        {} if architecture == "mistral" else {"layer_types": ["sliding_attention"]}
    )
    model = tiny_model(architecture, **one_layer)
    tokens_T = torch.arange(20, 40)
    with torch.no_grad():
        before_TV = model(tokens_T[None]).logits[0]
        changed_TV = model(torch.cat([torch.tensor([99]), tokens_T[1:]])[None]).logits[0]
    moved_T = (before_TV - changed_TV).abs().amax(-1) > 1e-6
    assert moved_T.tolist() == [True] * 6 + [False] * 14


def test_overrides_reach_the_configuration():
    config = tiny_config("qwen3", num_hidden_layers=3, tie_word_embeddings=True)
    assert (config.num_hidden_layers, config.tie_word_embeddings) == (3, True)


def test_what_cannot_be_made_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"'bert'.*'llama'"):
        tiny_config("bert")
    with pytest.raises(InvalidInput, match="vocab_size 100 is below"):
        make_debug_model(tmp_path, vocab_size=100)
