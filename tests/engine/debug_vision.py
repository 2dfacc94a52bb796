"""Tiny random vision-language models, as `debug.py` makes those that read text.

The towers are as small as their architectures allow, and again what is special about one bites: windows of two by two
merged patches, features added after the first layer, rotations by three positions, a class token that is dropped.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2VLImageProcessorPil,
)

from lorimer.errors import InvalidInput
from lorimer.models.debug import CHAT_TEMPLATE, SHARED, SPECIAL_TOKENS, VOCAB_SIZE, byte_level_tokenizer, randomize

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""The ids after the tokenizer's others: marks that a renderer puts around an image, then the placeholders."""
VISION_START, VISION_END, IMAGE_TOKEN, VIDEO_TOKEN = range(VOCAB_SIZE, VOCAB_SIZE + len(VISION_TOKENS))
VISION_VOCAB_SIZE = VOCAB_SIZE + len(VISION_TOKENS)

_HIDDEN = 32
_PATCH, _MERGE, _SIDE = 4, 2, 16
_QWEN_IDS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": _PATCH,
    "spatial_merge_size": _MERGE,
    "out_hidden_size": _HIDDEN,
}

_TURNS_8 = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_TURNS_16 = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
_DEEP_TOWER = _QWEN_TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}

_PARTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        **_QWEN_IDS,
        "text_config": _TURNS_8,
        "vision_config": {
            "depth": 2,
            "embed_dim": 16,
            "hidden_size": _HIDDEN,
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": _PATCH,
            "spatial_merge_size": _MERGE,
        },
    },
    "qwen2_5_vl": {
        **_QWEN_IDS,
        "text_config": _TURNS_8,
        "vision_config": _QWEN_TOWER | {"window_size": 2 * _MERGE * _PATCH, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        **_QWEN_IDS,
        "text_config": _TURNS_16 | {"head_dim": 16},
        "vision_config": _DEEP_TOWER,
    },
    "qwen3_vl_moe": {
        **_QWEN_IDS,
        "text_config": _TURNS_16
        | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        "vision_config": _DEEP_TOWER,
    },
    "llava": {
        "image_token_index": IMAGE_TOKEN,
        "image_seq_length": (_SIDE // _PATCH) ** 2,
        "text_config": {"model_type": "llama", "head_dim": 8},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 24,
            "projection_dim": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": _SIDE,
            "patch_size": _PATCH,
        },
    },
}

VISION_ARCHITECTURES = tuple(_PARTS)


def tiny_vision_config(architecture: str) -> PreTrainedConfig:
    if architecture not in _PARTS:
        raise InvalidInput(
            f"no tiny configuration for architecture {architecture!r}; there is one for {VISION_ARCHITECTURES}"
        )
    parts = _PARTS[architecture]
    text = SHARED | {"vocab_size": VISION_VOCAB_SIZE, "hidden_size": _HIDDEN} | parts["text_config"]
    return AutoConfig.for_model(architecture, **(parts | {"text_config": text}))


def tiny_vision_model(architecture: str, *, seed: int = 0) -> PreTrainedModel:
    """A float32 model of `tiny_vision_config` whose every parameter is drawn from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(
            tiny_vision_config(architecture), dtype=torch.float32
        )
    return randomize(model, seed)


def make_debug_vision_model(directory: Path, *, architecture: str = "qwen3_vl", seed: int = 0) -> None:
    """Write `tiny_vision_model`, its tokenizer and its image processor into `directory`, which is created."""
    model = tiny_vision_model(architecture, seed=seed)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    _image_processor(architecture).save_pretrained(directory)
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in VISION_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "model_max_length": model.config.get_text_config().max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _image_processor(architecture: str) -> Any:
    if architecture == "llava":
        return CLIPImageProcessorPil(size={"shortest_edge": _SIDE}, crop_size={"height": _SIDE, "width": _SIDE})
    # From two by two to eight by eight merged patches.
    merged = (_PATCH * _MERGE) ** 2
    size = {"shortest_edge": 4 * merged, "longest_edge": 64 * merged}
    return Qwen2VLImageProcessorPil(size=size, patch_size=_PATCH, merge_size=_MERGE)
