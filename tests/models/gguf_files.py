"""Writes GGUF files the way llama.cpp's converter does, from models and tokenizers in memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from gguf.quants import quantize
from transformers import PreTrainedModel

from lorimer.models.debug import CHAT_TEMPLATE, make_debug_model

LLAMA_CPP = {"mistral": "llama", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}
"""What llama.cpp calls an architecture, where that is not transformers' name."""


def tensors_of(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights under the names of llama.cpp, which its own package knows."""
    config = model.config
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind_of(model))
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith(".experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), weight.chunk(2, 1), strict=True):
                yield f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight", half.contiguous()
            continue
        stem, dot, part = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, ".", "weight")
        found = names.get_name(stem)
        assert found is not None, name
        yield f"{found}{dot}{part}", weight


def kind_of(model: PreTrainedModel) -> str:
    return LLAMA_CPP.get(model.config.model_type, model.config.model_type)


def permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp's own order of the rows of q and k in `llama` files."""
    rows = weight.shape[0]
    return weight.reshape(num_heads, 2, rows // num_heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def byte_level_vocabulary(directory: Path, pre: str = "qwen2") -> dict[str, Any]:
    make_debug_model(directory)
    content = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def settings_of(model: PreTrainedModel) -> dict[str, Any]:
    """As llama.cpp's converter writes them."""
    config, kind = model.config, kind_of(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    particular: dict[str, dict[str, Any]] = {
        "gemma2": {
            "attention.sliding_window": getattr(config, "sliding_window", None),
            "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
            "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        },
        "gemma3": {"attention.sliding_window": getattr(config, "sliding_window", None)},
        "phi3": {"attention.sliding_window": getattr(config, "sliding_window", None) or 0},
        "qwen3moe": {
            "expert_count": getattr(config, "num_experts", None),
            "expert_used_count": getattr(config, "num_experts_per_tok", None),
            "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        },
    }
    common = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope["rope_theta"],
    }
    return {f"{kind}.{key}": value for key, value in (common | particular.get(kind, {})).items()}


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    metadata: dict[str, Any],
    encoding: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: dict[str, numpy.ndarray] | None = None,
) -> None:
    config, kind = model.config, kind_of(model)
    writer = gguf.GGUFWriter(path, kind)
    for key, value in (settings_of(model) | metadata).items():
        add(writer, key, value)
    num_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in tensors_of(model):
        block = name.split(".")[-2]
        if kind == "llama" and block in num_heads:
            weight = permuted(weight, num_heads[block])
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + 1
        values = weight.float().numpy()
        if weight.dim() > 1 and encoding != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, quantize(values, encoding), raw_dtype=encoding)
        else:
            writer.add_tensor(name, values)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
