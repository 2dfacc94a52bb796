"""A GGUF file comes back as the model it was made from, or is refused by what is wrong with it."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lorimer.errors import ModelRefused
from lorimer.models.debug import tiny_model
from lorimer.models.gguf import conversion
from lorimer.models.gguf.conversion import convert
from lorimer.models.gguf.reader import read_gguf
from tests.models.gguf_files import byte_level_vocabulary, write_gguf


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40).reshape(1, 40) * 5).logits


@pytest.fixture
def vocabulary(tmp_path: Path) -> dict[str, Any]:
    return byte_level_vocabulary(tmp_path / "vocabulary")


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        pytest.param("llama", {}, id="llama"),
        pytest.param("llama", {"tie_word_embeddings": True}, id="llama tied"),
        pytest.param("llama", {"attention_bias": True, "mlp_bias": True}, id="llama with biases"),
        pytest.param("llama", {"num_key_value_heads": 4, "head_dim": 16}, id="llama with wide heads"),
        pytest.param("qwen2", {}, id="qwen2"),
        pytest.param("qwen3", {}, id="qwen3"),
        pytest.param("qwen3", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}, id="qwen3 tied"),
        pytest.param("qwen3_moe", {}, id="qwen3moe"),
        pytest.param("mistral", {"sliding_window": None}, id="mistral"),
        pytest.param("gemma2", {"num_hidden_layers": 3, "layer_types": None}, id="gemma2"),
        pytest.param("gemma3_text", {"num_hidden_layers": 7, "layer_types": None}, id="gemma3"),
        pytest.param("phi3", {}, id="phi3"),
        pytest.param("phi3", {"sliding_window": 6}, id="phi3 with a sliding window"),
        pytest.param("olmo2", {}, id="olmo2"),
    ],
)
def test_logits_survive_the_round_trip(tmp_path, vocabulary, architecture, overrides):
    original = tiny_model(architecture, seed=3, **overrides)
    write_gguf(tmp_path / "model.gguf", original, vocabulary)
    convert(tmp_path / "model.gguf", tmp_path / "out")
    restored = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert restored.dtype == torch.float32
    # llama.cpp calls Mistral a Llama, which it is without its window; and it adds 1 to Gemma's norms, which rounds.
    assert type(restored) is type(original) or architecture == "mistral"
    rounding = 1e-4 if architecture.startswith("gemma") else 0
    torch.testing.assert_close(logits_of(restored), logits_of(original), rtol=rounding, atol=rounding)
    weights = restored.state_dict()
    for name, weight in original.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=2.0**-22 if "norm" in name and rounding else 0)
    assert restored.generation_config.eos_token_id == 2
    assert restored.config.eos_token_id == 2
    assert restored.config.pad_token_id == 0
    assert restored.config.tie_word_embeddings == original.config.tie_word_embeddings


ROPES = [
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_rotary_scaling_is_kept(tmp_path, vocabulary, rope):
    original = tiny_model("qwen2", rope_parameters=rope)
    settings = {"qwen2.rope.scaling.type": rope["rope_type"], "qwen2.rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        settings["qwen2.rope.scaling.original_context_length"] = 16
    write_gguf(tmp_path / "model.gguf", original, vocabulary | settings)
    convert(tmp_path / "model.gguf", tmp_path / "out")
    restored = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    torch.testing.assert_close(logits_of(restored), logits_of(original), rtol=0, atol=0)
    assert not torch.allclose(logits_of(tiny_model("qwen2")), logits_of(original), atol=1e-3)


def llama3_divisor(frequency: float) -> float:
    wavelength = 2 * math.pi / frequency
    if wavelength < 8192 / 4:
        return 1.0
    if wavelength > 8192:
        return 8.0
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return 1 / ((1 - smooth) / 8 + smooth)


def test_llama3_rotary_divisors_become_its_parameters(tmp_path, vocabulary):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    original = tiny_model("llama", rope_parameters=rope, head_dim=32, max_position_embeddings=131072)
    divisors = numpy.array(
        [llama3_divisor(500000.0 ** -(index / 32)) for index in range(0, 32, 2)], dtype=numpy.float32
    )
    assert divisors[0] == 1
    assert divisors[-1] == 8
    assert any(1 < divisor < 8 for divisor in divisors)
    write_gguf(tmp_path / "model.gguf", original, vocabulary, extra={"rope_freqs.weight": divisors})
    convert(tmp_path / "model.gguf", tmp_path / "out")
    restored = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert restored.config.rope_parameters == rope
    torch.testing.assert_close(logits_of(restored), logits_of(original), rtol=0, atol=0)

    write_gguf(tmp_path / "other.gguf", original, vocabulary, extra={"rope_freqs.weight": divisors**2})
    with pytest.raises(ModelRefused, match=r"rope_freqs\.weight.*Llama 3\.1"):
        convert(tmp_path / "other.gguf", tmp_path / "other")


@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_tensors_become_bfloat16(tmp_path, vocabulary, encoding):
    original = tiny_model("llama", hidden_size=32, intermediate_size=64)
    kind = gguf.GGMLQuantizationType[encoding]
    write_gguf(tmp_path / "model.gguf", original, vocabulary, encoding=kind)
    convert(tmp_path / "model.gguf", tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True).dtype == torch.bfloat16
    restored = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True, dtype=torch.float32)
    with torch.no_grad():
        for parameter in original.parameters():
            if parameter.dim() > 1:
                stored = dequantize(quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(stored).bfloat16())
    torch.testing.assert_close(logits_of(restored), logits_of(original), rtol=0, atol=0)


def test_large_models_are_written_in_shards(tmp_path, vocabulary, monkeypatch):
    monkeypatch.setattr(conversion, "_SHARD_BYTES", 60_000)
    original = tiny_model("qwen3")
    write_gguf(tmp_path / "model.gguf", original, vocabulary)
    steps: list[tuple[str, Any]] = []
    convert(tmp_path / "model.gguf", tmp_path / "out", progress=lambda text, done: steps.append((text, done)))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    restored = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    torch.testing.assert_close(logits_of(restored), logits_of(original), rtol=0, atol=0)
    assert steps[-1] == ("converting model.gguf", 1.0)
    assert [done for _, done in steps] == sorted(done for _, done in steps)


def test_the_tokenizer_and_its_chat_template_are_kept(tmp_path, vocabulary):
    for architecture in ("qwen3", "qwen2", "llama"):
        write_gguf(tmp_path / "model.gguf", tiny_model(architecture), vocabulary)
        convert(tmp_path / "model.gguf", tmp_path / architecture)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / architecture, local_files_only=True)
        original = AutoTokenizer.from_pretrained(tmp_path / "vocabulary", local_files_only=True)
        nfc = "It's the 1234th   caf\u00e9, (x>=0)\n\n <|im_start|>user\nlo<|im_end|> \u00bd"
        assert tokenizer.encode(nfc) == original.encode(nfc)
        assert tokenizer.decode(tokenizer.encode(nfc)) == nfc
        assert tokenizer.encode("cafe\u0301") == original.encode("caf\u00e9")
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token) == (2, 0, None)
        chat = [{"role": "user", "content": "lo"}]
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>user\nlo<|im_end|>\n"


PIECES = {
    "smollm": ["It", "'s", "\u0120the", "\u0120", "1", "2", "3", "4", "th", "\u0120\u0120", "\u0120x"],
    "gpt-2": ["It", "'s", "\u0120the", "\u01201234", "th", "\u0120\u0120", "\u0120x"],
    "llama-bpe": ["It", "'s", "\u0120the", "\u0120", "123", "4", "th", "\u0120\u0120", "\u0120x"],
    "qwen2": ["It", "'s", "\u0120the", "\u0120", "1", "2", "3", "4", "th", "\u0120\u0120", "\u0120x"],
    "default": ["It", "'", "s", "\u0120the", "\u0120", "123", "4", "th", "\u0120\u0120", "\u0120x"],
}


@pytest.mark.parametrize("pre", PIECES)
def test_text_is_cut_as_the_file_says(tmp_path, pre):
    vocabulary = byte_level_vocabulary(tmp_path / "vocabulary", pre) | {"tokenizer.ggml.bos_token_id": 1}
    write_gguf(tmp_path / "model.gguf", tiny_model("llama"), vocabulary)
    convert(tmp_path / "model.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("It's the 1234th   x")] == PIECES[pre]
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert loaded.encode("x")[:-1] == ([1] if pre == "llama-bpe" else [])


def sentencepiece_vocabulary() -> dict[str, Any]:
    normal = ["\u2581\u2581", "lo", "\u2581lo", "er", "low", "\u2581lower", "aa", "aaa"]
    normal += ["\u2581", "l", "o", "w", "e", "r", "a", "h"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *normal]
    tokens += [f"[PAD{index}]" for index in range(len(tokens), 290)]
    num_padding = 290 - 259 - len(normal)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(normal))] + [-1000.0] * num_padding,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(normal) + [5] * num_padding,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_joins_the_best_scored_neighbours(tmp_path):
    write_gguf(tmp_path / "model.gguf", tiny_model("llama", vocab_size=290), sentencepiece_vocabulary())
    convert(tmp_path / "model.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    for text, expected in {
        # In the order of their scores: lo, then the lo with the space before it, then er; only low comes too late.
        "lower": ["\u2581lo", "w", "er"],
        " lower": ["\u2581\u2581", "low", "er"],
        "aaaa": ["\u2581", "aa", "aa"],
        "low \u00e9": ["\u2581lo", "w", "\u2581", "<0xC3>", "<0xA9>"],
        "lo</s>lo": ["\u2581lo", "</s>", "\u2581lo"],
    }.items():
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == ["<s>", *expected], text
    assert tokenizer.decode(tokenizer.encode(" lower \u00e9\u65e5", add_special_tokens=False)) == " lower \u00e9\u65e5"
    assert len(tokenizer) == 275


REFUSALS = [
    pytest.param(
        {"general.architecture": "falcon"},
        "architecture 'falcon'; supported are llama, qwen2, qwen3, qwen3moe, gemma2, gemma3, phi3, olmo2",
        id="architecture",
    ),
    pytest.param({"split.count": 3}, "one of 3 parts", id="split file"),
    pytest.param({"qwen3.expert_count": 8}, r"qwen3\.expert_count = 8 is not understood", id="experts"),
    pytest.param({"qwen3.attention.sliding_window": 64}, r"sliding_window = 64 is not understood", id="sliding window"),
    pytest.param({"qwen3.attention.head_count": [4, 4]}, r"head_count is \[4, 4\]; a positive integer", id="per layer"),
    pytest.param(
        {"qwen3.rope.dimension_count": 4}, r"dimension_count = 4 differs from the head size 16", id="partial rotary"
    ),
    pytest.param({"qwen3.rope.scaling.type": "longrope"}, "'longrope' is not supported", id="rope scaling"),
    pytest.param({"qwen3.block_count": 3}, r"lacks the tensor for 'model\.layers\.2", id="missing tensors"),
    pytest.param({"qwen3.block_count": 1}, r"tensor 'blk\.1\..*the model's", id="extra tensors"),
    pytest.param({"qwen3.feed_forward_length": 64}, r"'blk\.0\.ffn_gate\.weight' has shape \(48, 32\)", id="shape"),
    pytest.param({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model 't5'", id="tokenizer model"),
    pytest.param(
        {"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre 'tekken' cannot be rebuilt.*smollm", id="pre-tokenizer"
    ),
    pytest.param({"tokenizer.ggml.merges": ["a b c"]}, "merges has 'a b c'", id="merges"),
    pytest.param(
        {"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id 9999 is not one of the 272 tokens", id="special id"
    ),
    pytest.param(
        {"tokenizer.ggml.tokens": ["a"] * 300}, "300 tokens, but the embedding only 272 rows", id="vocabulary"
    ),
    pytest.param({"tokenizer.ggml.tokens": ["a"] * 272}, "has 'a' twice", id="repeated token"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_what_cannot_be_taken_over_exactly_is_refused_by_name(tmp_path, vocabulary, changes, message):
    changed = dict(changes)
    model = tiny_model("qwen3")
    kind = changed.pop("general.architecture", "qwen3")
    path = tmp_path / "model.gguf"
    write_gguf(path, model, vocabulary | changed)
    if kind != "qwen3":
        path.write_bytes(
            path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0qwen3", b"\x06\0\0\0\0\0\0\0" + kind.encode(), 1)
        )
    with pytest.raises(ModelRefused, match=message):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gemma2", {"gemma2.attn_logit_softcapping": 0.0}, r"attn_logit_softcapping is 0\.0"),
        ("gemma2", {"gemma2.attention.sliding_window": 0}, r"sliding_window is 0; a positive integer"),
        ("gemma3", {"gemma3.rope.freq_base": 0.0}, r"rope\.freq_base is 0\.0"),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": 4}, "sliding_window_pattern = 4 is not understood"),
        ("olmo2", {"olmo2.attention.sliding_window": 64}, "sliding_window = 64 is not understood"),
        ("phi3", {"phi3.rope.scaling.attn_factor": 1.2}, r"attn_factor = 1\.2.* is not understood"),
        ("phi3", {"phi3.rope.dimension_count": 6}, "dimension_count = 6 differs from the head size 8"),
        ("qwen3moe", {"qwen3moe.expert_used_count": 0}, "expert_used_count is 0; a positive integer"),
        ("qwen3moe", {"qwen3moe.expert_count": 5}, r"ffn_gate_exps\.weight' has shape \(4, 24, 32\)"),
        ("qwen3moe", {"qwen3moe.expert_shared_count": 1}, "expert_shared_count = 1 is not understood"),
    ],
)
def test_what_an_architecture_has_besides_is_refused_by_name(tmp_path, vocabulary, architecture, changes, message):
    names = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"}
    write_gguf(tmp_path / "model.gguf", tiny_model(names.get(architecture, architecture)), vocabulary | changes)
    with pytest.raises(ModelRefused, match=message):
        convert(tmp_path / "model.gguf", tmp_path / "out")


def test_a_phi3_with_long_factors_is_refused(tmp_path, vocabulary):
    factors = {"rope_factors_long.weight": numpy.ones(4, numpy.float32)}
    write_gguf(tmp_path / "model.gguf", tiny_model("phi3"), vocabulary, extra=factors)
    with pytest.raises(ModelRefused, match=r"tensor 'rope_factors_long\.weight' is not part of .* 'phi3'"):
        convert(tmp_path / "model.gguf", tmp_path / "out")


def test_a_tokenizer_that_transformers_would_replace_is_refused(tmp_path):
    vocabulary = byte_level_vocabulary(tmp_path / "vocabulary", "llama-bpe")
    write_gguf(tmp_path / "model.gguf", tiny_model("qwen2"), vocabulary)
    with pytest.raises(ModelRefused, match=r"'qwen2' with its own Qwen2Tokenizer.*llama-bpe"):
        convert(tmp_path / "model.gguf", tmp_path / "out")


def test_a_unigram_vocabulary_is_refused(tmp_path):
    vocabulary = sentencepiece_vocabulary()
    vocabulary["tokenizer.ggml.scores"][270] = -3.25
    write_gguf(tmp_path / "model.gguf", tiny_model("llama", vocab_size=290), vocabulary)
    with pytest.raises(ModelRefused, match="Unigram"):
        convert(tmp_path / "model.gguf", tmp_path / "out")


def test_an_unknown_tensor_is_refused(tmp_path, vocabulary):
    extra = {"blk.0.attn_sinks.weight": numpy.zeros(4, dtype=numpy.float32)}
    write_gguf(tmp_path / "model.gguf", tiny_model("llama"), vocabulary, extra=extra)
    with pytest.raises(ModelRefused, match=r"blk\.0\.attn_sinks\.weight"):
        convert(tmp_path / "model.gguf", tmp_path / "out")


def test_a_file_torn_anywhere_is_refused(tmp_path, vocabulary):
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, tiny_model("llama"), vocabulary)
    content = whole.read_bytes()
    torn = tmp_path / "torn.gguf"
    header_bytes = min(tensor.offset for tensor in read_gguf(whole).tensors)
    lengths = [*range(0, header_bytes, 97), header_bytes, len(content) // 2, len(content) - 4]
    for length in lengths:
        torn.write_bytes(content[:length])
        with pytest.raises(ModelRefused, match=r"'torn\.gguf' is torn"):
            read_gguf(torn)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"PK\x03\x04" + bytes(64), "does not begin with b'GGUF'", id="a zip"),
        pytest.param(b"GGUF\x01\0\0\0" + bytes(64), "GGUF version 1", id="version 1"),
        pytest.param(b"GGUF\0\0\0\x03" + bytes(64), "little-endian", id="big endian"),
        pytest.param(b"GGUF\x03\0\0\0" + b"\xff" * 64, "torn", id="absurd counts"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelRefused, match=message):
        read_gguf(path)


def test_an_array_longer_than_the_file_is_refused_at_once(tmp_path):
    key = b"\x01\0\0\0\0\0\0\0k"
    for item in (0, 8):
        array = b"\x09\0\0\0" + bytes([item, 0, 0, 0]) + (2**60).to_bytes(8, "little")
        counts = bytes(8) + b"\x01" + bytes(7)
        path = tmp_path / "model.gguf"
        path.write_bytes(b"GGUF\x03\0\0\0" + counts + key + array + bytes(64))
        with pytest.raises(ModelRefused, match="torn: k needs"):
            read_gguf(path)
