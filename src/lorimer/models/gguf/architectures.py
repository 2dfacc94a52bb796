"""The architectures that a GGUF file may have: names of their tensors, their settings, and what llama.cpp changes.

Values that llama.cpp hard-codes and files omit (Gemma's attention scale, the pattern of sliding windows) are copied
from it. A setting of a file that is not named here is refused.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lorimer.errors import ModelRefused

Settings = Mapping[str, Any]
"""Metadata of the architecture, without its prefix."""

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_TWO_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_FOUR_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm", **_POST_NORMS}


@dataclass(frozen=True)
class Architecture:
    """One value of ``general.architecture``."""

    model_type: str
    """Model type of transformers."""
    model_class: str
    blocks: Mapping[str, str]
    """llama.cpp's names of a layer's tensors, and transformers'."""
    settings: frozenset[str] = frozenset()
    """Keys that are understood besides those of every architecture."""
    extra: Callable[[Settings, Mapping[str, Any]], dict[str, Any]] = field(default=lambda settings, config: {})
    """Fields of the configuration besides those of every architecture."""
    is_permuted: bool = False
    """llama.cpp interleaves the rows of q and k."""
    norm_offset: float = 0.0
    """What llama.cpp adds to the weights of norms."""


def integer(settings: Settings, key: str, default: int | None = None) -> int:
    value = settings.get(key, default)
    if not isinstance(value, int) or value < 1:
        raise ModelRefused(f"metadata {key} is {value!r}; a positive integer is needed")
    return value


def number(settings: Settings, key: str, default: float | None = None) -> float:
    value = settings.get(key, default)
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ModelRefused(f"metadata {key} is {value!r}; a positive number is needed")
    return value


def _gemma(config: Mapping[str, Any], num_layers_of_27b: int) -> dict[str, Any]:
    """Return llama.cpp's settings of all Gemmas; the largest, known by its layers, has another attention scale."""
    head_size: int = config["head_dim"]
    if config["num_hidden_layers"] == num_layers_of_27b:
        head_size = config["hidden_size"] // config["num_attention_heads"]
    activation = "gelu_pytorch_tanh"
    return {"query_pre_attn_scalar": head_size, "hidden_act": activation, "hidden_activation": activation}


def _gemma2(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    return _gemma(config, 46) | {
        "sliding_window": integer(settings, "attention.sliding_window"),
        "attn_logit_softcapping": number(settings, "attn_logit_softcapping"),
        "final_logit_softcapping": number(settings, "final_logit_softcapping"),
    }


def _gemma3(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    number(settings, "rope.freq_base")  # without it the two readers of such files take different ones
    local = {"rope_type": "default", "rope_theta": number(settings, "rope.freq_base_swa", 10000.0)}
    return _gemma(config, 62) | {
        "sliding_window": integer(settings, "attention.sliding_window"),
        "rope_parameters": {"sliding_attention": local, "full_attention": config["rope_parameters"]},
    }


def _phi3(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    window = settings.get("attention.sliding_window")
    return {"sliding_window": integer(settings, "attention.sliding_window") if window else None}


def _qwen3moe(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": integer(settings, "expert_count"),
        "num_experts_per_tok": integer(settings, "expert_used_count"),
        "moe_intermediate_size": integer(settings, "expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_WINDOW = "attention.sliding_window"

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", {**_TWO_NORMS, **_ATTENTION, **_MLP}, is_permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", {**_TWO_NORMS, **_ATTENTION, **_MLP}),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {**_TWO_NORMS, **_ATTENTION, **_QK_NORMS, **_MLP}),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**_TWO_NORMS, **_ATTENTION, **_QK_NORMS, **_EXPERTS},
        frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"}),
        _qwen3moe,
    ),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        {**_FOUR_NORMS, **_ATTENTION, **_MLP},
        frozenset({_WINDOW, "attn_logit_softcapping", "final_logit_softcapping"}),
        _gemma2,
        norm_offset=1.0,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**_FOUR_NORMS, **_ATTENTION, **_QK_NORMS, **_MLP},
        frozenset({_WINDOW, "rope.freq_base_swa"}),
        _gemma3,
        norm_offset=1.0,
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {
            **_TWO_NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        frozenset({_WINDOW}),
        _phi3,
    ),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", {**_POST_NORMS, **_ATTENTION, **_QK_NORMS, **_MLP}),
}
"""By ``general.architecture``. Files of Mistral models say `llama`."""
