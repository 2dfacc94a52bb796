"""Every source of models, their order and their refusals; the hub is a small server here, pip is the real one."""

import base64
import contextlib
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorimer.engine import sources, wheels
from lorimer.engine.debug import make_debug_model
from lorimer.engine.sources import ModelSource, resolve
from lorimer.engine.wheels import WheelModel
from lorimer.errors import InvalidInput, ModelNotFound, ModelRefused

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def debug_model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("debug") / "model"
    make_debug_model(directory)
    return directory


@pytest.fixture
def model(debug_model, tmp_path) -> Path:
    """A copy of the debug model that a test may spoil."""
    return Path(shutil.copytree(debug_model, tmp_path / "model"))


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    """An empty hub cache, with the hub itself out of reach."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def place_in_hub_cache(hub_cache: Path, repository: str, model: Path) -> Path:
    folder = hub_cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    return Path(shutil.copytree(model, folder / "snapshots" / COMMIT))


def change_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def small_gguf(path: Path, seed: int = 0) -> None:
    """A one-layer llama in the layout of llama.cpp, with the debug model's tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 16}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    tokens = ["<|end|>", *(chr(code) for code in range(33, 127)), "\u0120"]
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "smollm")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [3] + [1] * (len(tokens) - 1))
    writer.add_array("tokenizer.ggml.merges", ["l o"] if "lo" in tokens else ["a b"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 0)
    generator = torch.Generator().manual_seed(seed)
    shapes = {"token_embd": (len(tokens), 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)}
    shapes |= {f"blk.0.attn_{name}": (8, 8) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 16)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=generator).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
