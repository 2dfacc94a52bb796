"""Tiny random models: every supported architecture in a few dozen kilobytes, for tests and for `lorimer/debug`.

`tiny_config` gives the configuration, `tiny_model` a seeded model in memory, `make_debug_model` a directory with
weights and a byte-level tokenizer that `AutoModelForCausalLM` and `AutoTokenizer` load offline. The sizes are chosen
so that the features of an architecture take effect: windows of 6 tokens, low soft-caps, heads wider than the hidden
size divided by their number. Nothing here is pretrained; the small pretrained model is `lorimer/tiny`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lorimer.errors import InvalidInput

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2: padding, start of a chat message, end of a chat message (which ends a sample)."""

_MERGES = ["h e", "Ġ t", "Ġt he", "i n", "e r", "o n", "Ġ a", "l o", "Ġ s", "r e", "in g", "o r", "Ċ Ċ"]

# Qwen's, because AutoTokenizer replaces the pre-tokenizer of every qwen2 directory with it.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

VOCAB_SIZE = len(SPECIAL_TOKENS) + 256 + len(_MERGES)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Settings that every tiny language model shares."""

_ALTERNATING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}

_PARTICULAR: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 8, "sliding_window": 6},
    "gemma2": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        **_ALTERNATING,
    },
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, **_ALTERNATING},
    "phi3": {},
    "olmo2": {},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
        **_ALTERNATING,
    },
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}

ARCHITECTURES = tuple(_PARTICULAR)
"""The `model_type` of every architecture `tiny_config` knows."""


def tiny_config(architecture: str, **overrides: Any) -> PreTrainedConfig:
    """Return the two-layer configuration of one of `ARCHITECTURES`; `overrides` are fields of its class."""
    if architecture not in _PARTICULAR:
        raise InvalidInput(f"no tiny configuration for architecture {architecture!r}; there is one for {ARCHITECTURES}")
    return AutoConfig.for_model(architecture, **(SHARED | _PARTICULAR[architecture] | overrides))


def tiny_model(architecture: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a float32 model of `tiny_config` with every parameter, also biases and norms, drawn from `seed`.

    The weights do not depend on the global random state and leave it as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(architecture, **overrides)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return randomize(model, seed)


def randomize(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Draw every parameter again, in place, and return the model in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(0.2 * noise)
            else:
                # Norms are centred on their neutral value and biases on zero, but no parameter stays there:
                # a term that is forgotten somewhere must change the result.
                parameter.add_(0.1 * noise)
    model.eval()
    return model


def make_debug_model(directory: Path, *, architecture: str = "qwen3", seed: int = 0, **overrides: Any) -> None:
    """Write `tiny_model` and its tokenizer into `directory`, which is created; same arguments, same files."""
    model = tiny_model(architecture, seed=seed, **overrides)
    if model.config.vocab_size < VOCAB_SIZE:
        raise InvalidInput(f"vocab_size {model.config.vocab_size!r} is below the tokenizer's {VOCAB_SIZE}")
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def byte_level_tokenizer() -> Tokenizer:
    # Sorted, because the alphabet comes in a different order in every process.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [merge.replace(" ", "") for merge in _MERGES]
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet, *merged])}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer
