"""Which base models and adapters a vLLM sampler takes, as their files show before vLLM starts."""

import json

import pytest

from lorimer.engine.config import EngineConfig
from lorimer.engine.model.base_model import load_tokenizer
from lorimer.engine.model.device import open_device
from lorimer.engine.vllm.base_files import BaseFiles, check_adapter
from lorimer.errors import InvalidInput, ModelRefused
from lorimer.models.debug import make_debug_model
from lorimer.models.sources import resolve

CONFIG = EngineConfig(dtype="float32", num_threads=1)


def read(directory):
    return BaseFiles(resolve(str(directory)), CONFIG, open_device(CONFIG), load_tokenizer(directory))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "phi3"])
def test_experts_and_fused_layers_are_refused(tmp_path, architecture):
    make_debug_model(tmp_path / "model", architecture=architecture)
    with pytest.raises(ModelRefused, match="not experts or fused layers"):
        read(tmp_path / "model")


def test_adapters_are_made_for_every_layer(tmp_path):
    make_debug_model(tmp_path / "model", architecture="llama")
    base = read(tmp_path / "model")
    assert (base.info.vocab_size, base.info.max_context, base.info.eos_token_ids) == (272, 512, [2])
    assert len(base.layers) == 14
    base.write_adapter(tmp_path / "adapter", 1.0)
    check_adapter(str(tmp_path / "adapter"), 8)
    with pytest.raises(InvalidInput, match="rank 8; this sampler accepts up to 4"):
        check_adapter(str(tmp_path / "adapter"), 4)
    settings = tmp_path / "adapter" / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"rank_pattern": {"q_proj": 16}}))
    with pytest.raises(InvalidInput, match="rank_pattern"):
        check_adapter(str(tmp_path / "adapter"), 8)
