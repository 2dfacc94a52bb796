"""Which models are opened, which are refused and why."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lorimer.engine.model.attention import group_sequences
from lorimer.engine.model.base_model import (
    BaseModel,
    eos_token_ids,
    load_model,
    load_tokenizer,
    register_implementations,
)
from lorimer.engine.training.batch import Pass
from lorimer.errors import ModelRefused
from lorimer.models.debug import make_debug_model, tiny_config, tiny_model
from pretrain_tiny import BUNDLED
from tests.engine.reference import DEVICE, on_device

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def build(model_type, **fields):
    register_implementations()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        (
            "llama4_text",
            {**SMALL, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
            "chunked_attention",
        ),
        (
            "bloom",
            {"vocab_size": 100, "hidden_size": 32, "n_layer": 2, "n_head": 4},
            "does not use transformers' attention",
        ),
        (
            "falcon",
            {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
            "cannot be packed",
        ),
        (
            "gpt2",
            {
                "vocab_size": 100,
                "n_embd": 32,
                "n_layer": 2,
                "n_head": 4,
                "bos_token_id": None,
                "eos_token_id": None,
            },
            "LoRA",
        ),
        ("mamba", {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2}, "linear_attention"),
    ],
)
def test_models_that_cannot_be_packed_are_refused_with_the_reason(model_type, fields, reason):
    with pytest.raises(ModelRefused, match=reason):
        BaseModel(build(model_type, **fields), DEVICE)


def test_an_attention_function_of_its_own_kind_is_noticed():
    """A model whose attention looks both ways comes out different, and is refused."""
    register_implementations()
    model = tiny_model("llama")
    eager = model.forward

    def look_ahead(*args, **kwargs):
        output = eager(*args, **kwargs)
        output.logits = output.logits + output.logits.flip(1)
        return output

    model.forward = look_ahead
    with pytest.raises(ModelRefused, match="differ from each computed alone"):
        BaseModel(model, DEVICE)


@pytest.mark.parametrize(
    ("model_type", "fields", "factor"),
    [
        ("granite", {"logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5}, 0.25),
        ("cohere", {"logit_scale": 0.0625, "bos_token_id": None, "eos_token_id": None}, 0.0625),
    ],
)
def test_what_a_model_does_to_its_logits_is_found(model_type, fields, factor):
    model = BaseModel(build(model_type, **SMALL, **fields), DEVICE)
    assert model.logit_map.factor == pytest.approx(factor, rel=1e-4)


def test_long_rotary_tables_limit_the_context():
    fields = {
        "max_position_embeddings": 256,
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 64,
        },
    }
    assert BaseModel(build("phi3", **SMALL | fields, pad_token_id=0), DEVICE).max_context == 64


def test_a_directory_opens_in_either_precision(tmp_path):
    make_debug_model(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(tmp_path, replace(DEVICE, dtype=dtype), "debug")
        assert model.head.weight.dtype == dtype
        assert model.name == "debug"
    assert isinstance(load_tokenizer(tmp_path), type(AutoTokenizer.from_pretrained(tmp_path)))


def test_the_bundled_model_opens_in_either_precision():
    """It is pretrained: its log probabilities are large, and bfloat16 rounds them visibly, on both sides."""
    wide, narrow = (
        load_model(BUNDLED, replace(DEVICE, dtype=dtype), "tiny") for dtype in (torch.float32, torch.bfloat16)
    )
    tokens = on_device(torch.arange(20) * 3 % wide.vocab_size)
    logprobs = []
    with torch.no_grad():
        for model in (wide, narrow):
            groups = group_sequences([len(tokens)], [0])
            hidden = model.hidden(tokens, on_device(torch.arange(len(tokens))), Pass([], groups=groups))
            logprobs.append(model.logit_map.apply_(model.head.multiply(hidden).float()).log_softmax(-1))
    assert (logprobs[0] - logprobs[1]).abs().mean() < 0.1


def test_a_directory_that_holds_no_causal_language_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ModelRefused, match="causal language model"):
        load_model(tmp_path, DEVICE, "picture")


def test_every_token_that_ends_a_sequence_is_collected(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    config = tiny_config("llama")
    assert eos_token_ids(tmp_path, config, None) == [config.eos_token_id, 5, 7]
    assert eos_token_ids(tmp_path / "none", config, None) == [config.eos_token_id]
