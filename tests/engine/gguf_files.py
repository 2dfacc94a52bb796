"""Writes GGUF files the way llama.cpp's converter does, from models and tokenizers in memory."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from gguf.quants import quantize
from transformers import PreTrainedModel

from lorimer.engine.debug import CHAT_TEMPLATE, make_debug_model

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_cpp_name(name: str) -> str:
    stem, part = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{part}"
    return f"{NAMES[stem]}.{part}"


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
    config, kind = model.config, model.config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.attention.head_count": config.num_attention_heads,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.key_length": head_dim,
        f"{kind}.attention.value_length": head_dim,
        f"{kind}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{kind}.rope.freq_base": config.rope_parameters["rope_theta"],
    }


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
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    for key, value in (settings_of(model) | metadata).items():
        add(writer, key, value)
    num_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        llama_name = llama_cpp_name(name)
        block = llama_name.split(".")[-2]
        if config.model_type == "llama" and block in num_heads:
            weight = permuted(weight, num_heads[block])
        values = weight.float().numpy()
        if weight.dim() > 1 and encoding != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(llama_name, quantize(values, encoding), raw_dtype=encoding)
        else:
            writer.add_tensor(llama_name, values)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
