"""The settings of an engine: what is refused, with which words, and that they reach the worker unchanged."""

import msgspec
import pytest

from lorimer.engine.config import EngineConfig, VllmConfig, split_quantize


def test_defaults_are_those_of_a_laptop():
    config = EngineConfig()
    assert (config.model, config.device, config.dtype) == ("lorimer/tiny", "auto", "auto")
    assert config.memory_bytes == config.token_budget == config.num_threads == config.max_context == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_threads": -1}, "num_threads is -1; a number of at least 0 is accepted"),
        ({"memory_bytes": -5}, "memory_bytes is -5"),
        ({"max_context": -1}, "max_context is -1"),
        ({"token_budget": -1}, "token_budget is -1"),
        ({"max_sampling_rows": 0}, "max_sampling_rows is 0; at least 1 is accepted"),
        ({"model": ""}, "model is empty; name a directory, a .gguf file, an alias or a hub id"),
        ({"device": "tpu"}, "device is 'tpu'; auto, cpu, cuda, mps are accepted"),
        ({"dtype": "float16"}, "dtype is 'float16'; auto, float32, bfloat16 are accepted"),
        ({"quantize": "fp8"}, "quantize is 'fp8'; none, int8, int4, nf4 are accepted"),
        ({"quantize": "nf4", "ranks": 2}, "ranks is 2 with quantize 'nf4'; a quantised base"),
        ({"quantize": "nf4", "method": "full"}, "method is 'full' with quantize 'nf4'"),
        ({"quantize": "int8", "vllm": VllmConfig()}, "sampler is 'vllm' with quantize 'int8'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_setting_is_named_with_what_is_accepted(settings, message):
    with pytest.raises(ValueError) as refusal:
        EngineConfig(**settings)
    assert message in str(refusal.value)


def test_settings_reach_the_worker_as_they_are():
    config = EngineConfig(model="a/b", device="cpu", dtype="bfloat16", token_budget=7, seed=3, cache_directory="cache")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modle": "lorimer/tiny"}, "unknown field `modle`"),
        ({"num_threads": "2"}, "Expected `int`, got `str` - at `$.num_threads`"),
        ({"token_budget": -1}, "token_budget is -1"),
    ],
    ids=["misspelt", "type", "value"],
)
def test_the_worker_checks_them_again(settings, message):
    with pytest.raises(msgspec.ValidationError) as refusal:
        msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=EngineConfig)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lorimer/tiny", ("lorimer/tiny", "none")),
        ("lorimer/tiny,quantize=int8", ("lorimer/tiny", "int8")),
        ("name=/models/a,b , quantize = nf4", ("name=/models/a,b", "nf4")),
        ("a,quantize=", ("a", "")),
        ("a,quantize=int8,quantize=nf4", ("a,quantize=int8", "nf4")),
    ],
)
def test_the_format_stands_after_the_model(text, expected):
    assert split_quantize(text) == expected


def test_settings_do_not_change():
    with pytest.raises(AttributeError):
        EngineConfig().model = "another"  # type: ignore[misc]
