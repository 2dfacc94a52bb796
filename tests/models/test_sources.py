"""Every source of models, their order and their refusals; the hub is a small server on this machine."""

import importlib.resources
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorimer.errors import InvalidInput, ModelNotFound, ModelRefused
from lorimer.models import sources
from lorimer.models.debug import VOCAB_SIZE, make_debug_model, tiny_model
from lorimer.models.sources import ModelSource, resolve
from tests.models.gguf_files import byte_level_vocabulary, write_gguf
from tests.models.hub import COMMIT, Hub


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
    write_gguf(path, tiny_model("llama", seed=seed), byte_level_vocabulary(path.parent / "vocabulary"))


def test_a_directory_is_taken_as_it_is(model, cache, monkeypatch):
    assert resolve(str(model), cache_directory=cache) == ModelSource(str(model), model, "directory")
    monkeypatch.chdir(model.parent)
    assert resolve("./model", cache_directory=cache) == ModelSource("./model", model, "directory")
    assert resolve("model", cache_directory=cache).directory == model
    assert not cache.exists()


def test_a_directory_goes_before_an_alias(debug_model, tmp_path, cache, monkeypatch):
    shutil.copytree(debug_model, tmp_path / "lorimer" / "debug")
    assert resolve("lorimer/debug", cache_directory=cache).kind == "debug"
    monkeypatch.chdir(tmp_path)
    assert resolve("lorimer/debug", cache_directory=cache).kind == "directory"
    shutil.rmtree(tmp_path / "lorimer" / "debug")
    (tmp_path / "lorimer" / "debug").mkdir()
    assert resolve("lorimer/debug", cache_directory=cache).kind == "debug"  # a folder without config.json is no model


def test_an_alias_goes_before_the_hub_cache(debug_model, cache, hub_cache):
    place_in_hub_cache(hub_cache, "lorimer/debug", debug_model)
    assert resolve("lorimer/debug", cache_directory=cache).kind == "debug"


def test_the_debug_alias_is_made_once_and_loads(cache):
    source = resolve("lorimer/debug", cache_directory=cache)
    made = (source.directory / "config.json").stat()
    assert source.directory.is_relative_to(cache)
    assert AutoModelForCausalLM.from_pretrained(source.directory, local_files_only=True).config.model_type == "qwen3"
    assert resolve("lorimer/debug", cache_directory=cache) == source
    assert (source.directory / "config.json").stat() == made


def test_the_bundled_alias_lies_in_the_package(cache):
    source = resolve("lorimer/tiny", cache_directory=cache)
    assert source == ModelSource("lorimer/tiny", Path(sources.__file__).parent / "tiny", "bundled")


def test_a_bundled_model_that_is_missing_is_not_looked_for_elsewhere(
    debug_model, tmp_path, cache, hub_cache, monkeypatch
):
    place_in_hub_cache(hub_cache, "lorimer/tiny", debug_model)
    monkeypatch.setattr(importlib.resources, "files", lambda package: tmp_path / "empty")
    with pytest.raises(ModelNotFound, match="comes with Lorimer, but this installation lacks"):
        resolve("lorimer/tiny", cache_directory=cache)


def test_a_gguf_file_is_converted_once_for_each_content(tmp_path, cache):
    path = tmp_path / "Small Model.gguf"
    small_gguf(path)
    source = resolve(str(path), cache_directory=cache)
    assert source.kind == "gguf"
    assert source.directory.is_relative_to(cache)
    made = (source.directory / "model.safetensors").stat()
    assert resolve(str(path), cache_directory=cache) == source
    assert (source.directory / "model.safetensors").stat() == made
    assert len(AutoTokenizer.from_pretrained(source.directory, local_files_only=True)) == VOCAB_SIZE
    small_gguf(path, seed=1)
    os.utime(path, ns=(0, made.st_mtime_ns + 1))
    other = resolve(str(path), cache_directory=cache)
    assert other.directory != source.directory
    assert (other.directory / "model.safetensors").read_bytes() != (source.directory / "model.safetensors").read_bytes()


def test_a_refused_gguf_file_leaves_nothing_in_the_cache(tmp_path, cache):
    path = tmp_path / "torn.gguf"
    small_gguf(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelRefused, match="torn"):
        resolve(str(path), cache_directory=cache)
    assert [entry.name for entry in (cache / "models").iterdir() if not entry.name.endswith(".lock")] == []


def test_a_model_in_the_hub_cache_needs_no_hub(debug_model, cache, hub_cache):
    snapshot = place_in_hub_cache(hub_cache, "owner/name", debug_model)
    assert resolve("owner/name", cache_directory=cache) == ModelSource("owner/name", snapshot, "hub-cache")


def test_a_half_downloaded_model_in_the_hub_cache_is_not_used(debug_model, cache, hub_cache):
    snapshot = place_in_hub_cache(hub_cache, "owner/name", debug_model)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "pytorch_model.bin").touch()
    with pytest.raises(ModelNotFound, match=r"hub cache .* has no model\.safetensors; pytorch_model\.bin: pickle"):
        resolve("owner/name", cache_directory=cache)


def test_a_reference_found_nowhere_lists_every_place(cache, hub_cache):
    with pytest.raises(ModelNotFound) as caught:
        resolve("SmolLM2-135M-Instruc", cache_directory=cache)
    first, *places = str(caught.value).split("; ", 5)
    assert first == "no model 'SmolLM2-135M-Instruc'"
    assert places == [
        "looked at: local directory or .gguf file 'SmolLM2-135M-Instruc': does not exist",
        "aliases lorimer/tiny, lorimer/debug, smollm2-135m-instruct: it is none of them "
        "(did you mean 'smollm2-135m-instruct'?)",
        f"hub cache '{hub_cache}': has no complete snapshot of it",
        f"hub {constants.ENDPOINT}: not asked, because HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set",
    ]


@pytest.mark.parametrize("reference", ["/no/such/model", "./no-such", "../no/such", "~/no-such-model", "no/such.gguf"])
def test_a_missing_path_is_looked_up_on_disk_only(reference, cache, hub_cache):
    with pytest.raises(ModelNotFound, match="does not exist") as caught:
        resolve(reference, cache_directory=cache)
    assert "hub" not in str(caught.value)


@pytest.mark.parametrize("reference", ["", "-rf", "--config", "a\0b"])
def test_what_cannot_name_a_model_is_refused(reference, cache):
    with pytest.raises(InvalidInput, match="cannot name a model"):
        resolve(reference, cache_directory=cache)


@pytest.mark.parametrize("reference", ["a/b/c", "sp ace/x", "x" * 5000, "a/../b"])
def test_what_cannot_be_a_hub_id_says_so(reference, cache, hub_cache):
    with pytest.raises(ModelNotFound, match="is not a hub id"):
        resolve(reference, cache_directory=cache)


def test_pickle_weights_are_refused_by_name(model, cache):
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").touch()
    with pytest.raises(ModelRefused, match=r"no model\.safetensors; pytorch_model\.bin: pickle files can run code"):
        resolve(str(model), cache_directory=cache)


@pytest.mark.parametrize("file_name", ["config.json", "tokenizer_config.json"])
def test_code_that_comes_with_a_model_is_refused(model, cache, file_name):
    change_json(model / file_name, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    with pytest.raises(ModelRefused, match=rf"{file_name}.*auto_map.*modeling_evil\.Evil"):
        resolve(str(model), cache_directory=cache)


@pytest.mark.parametrize("content", ["{", "[]", '"x"', "\udcff"])
def test_a_damaged_config_is_refused(model, cache, content):
    (model / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelRefused, match=r"config\.json' (cannot be read as JSON|is not a JSON object)"):
        resolve(str(model), cache_directory=cache)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        pytest.param(
            {"a": "model-00001-of-00002.safetensors"}, "lacks 'model-00001-of-00002.safetensors'", id="missing"
        ),
        pytest.param({"a": "../other.safetensors"}, r"names '\.\./other\.safetensors'", id="outside"),
        pytest.param({"a": "weights.bin"}, r"names 'weights\.bin'", id="pickle"),
        pytest.param({}, "has no weight_map", id="empty"),
    ],
)
def test_shards_must_all_be_there(model, cache, shards, message):
    change_json(model / "model.safetensors.index.json", weight_map=shards)
    with pytest.raises(ModelRefused, match=message):
        resolve(str(model), cache_directory=cache)


def test_directories_that_are_no_base_model_say_why(tmp_path, cache):
    with pytest.raises(ModelNotFound, match=r"has no config\.json$"):
        resolve(str(tmp_path), cache_directory=cache)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(ModelNotFound, match="it is a LoRA adapter"):
        resolve(str(tmp_path), cache_directory=cache)
    with pytest.raises(ModelNotFound, match=r"is neither a directory nor a \.gguf file"):
        resolve(str(tmp_path / "adapter_config.json"), cache_directory=cache)


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        pytest.param("linux", {}, "home/.cache/lorimer", id="linux"),
        pytest.param("linux", {"XDG_CACHE_HOME": "xdg"}, "xdg/lorimer", id="linux with XDG"),
        pytest.param("darwin", {}, "home/Library/Caches/lorimer", id="macOS"),
        pytest.param("win32", {"LOCALAPPDATA": "local"}, "local/lorimer/Cache", id="Windows"),
        pytest.param("linux", {"LORIMER_CACHE": "mine"}, "mine", id="configured"),
    ],
)
def test_where_the_cache_is(monkeypatch, platform, environment, expected):
    for name in ("LORIMER_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("home"))
    assert sources.default_cache_directory() == Path(expected)


def test_only_one_of_many_makes_a_model_and_the_others_wait(cache):
    makers: list[Path] = []
    said: list[str] = []

    def make(directory: Path) -> None:
        makers.append(directory)
        (directory / "a").write_text("1")
        time.sleep(0.3)
        (directory / "b").write_text("2")

    def ask() -> None:
        made = sources.made_once(cache, "x", make, lambda text, fraction: said.append(text))
        assert sorted(path.name for path in made.iterdir()) == ["a", "b"]

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(makers) == 1
    assert said == ["waiting for another process that makes x"] * 3


def test_a_maker_that_fails_or_was_killed_leaves_no_model(cache):
    (cache / "models" / ".x.partial" / "half").mkdir(parents=True)  # what a killed process leaves behind

    def fail(directory: Path) -> None:
        assert list(directory.iterdir()) == []
        (directory / "a").touch()
        raise ModelRefused("no")

    with pytest.raises(ModelRefused):
        sources.made_once(cache, "x", fail, lambda text, fraction: None)
    assert not (cache / "models" / "x").exists()
    assert not (cache / "models" / ".x.partial").exists()
    made = sources.made_once(cache, "x", lambda directory: (directory / "a").touch(), lambda text, fraction: None)
    assert [path.name for path in made.iterdir()] == ["a"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever)
    thread.start()
    with hub.server:
        yield hub
        hub.server.shutdown()
        thread.join()


ASK = """
import json, sys
from lorimer.models.sources import resolve
from lorimer.errors import LorimerError
steps = []
try:
    source = resolve(sys.argv[1], progress=lambda text, fraction: steps.append([text, fraction]))
    answer = {"kind": source.kind, "directory": str(source.directory)}
except LorimerError as error:
    answer = {"error": type(error).__name__, "message": str(error)}
print(json.dumps(answer | {"steps": steps, "torch": "torch" in sys.modules}))
"""


def ask_hub(hub: Hub, tmp_path: Path, reference: str, **environment: str) -> dict[str, Any]:
    """What `resolve` says in a fresh process: huggingface_hub reads its environment when it is imported."""
    settings = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server.server_port}",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
        "LORIMER_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-c", ASK, reference]
    ended = subprocess.run(
        command, env=settings | environment, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "%|" not in ended.stderr
    return json.loads(ended.stdout)


def test_a_hub_model_is_fetched_without_pickles_and_then_found_in_the_cache(debug_model, tmp_path, hub):
    files = {path.name: path.read_bytes() for path in debug_model.iterdir()}
    unwanted = {"pytorch_model.bin": b"x", "original/consolidated.safetensors": b"x", "consolidated.safetensors": b"x"}
    hub.files["owner/name"] = files | unwanted | {"README.md": b"x", "evil.py": b"x"}
    answer = ask_hub(hub, tmp_path, "owner/name")
    assert answer["kind"] == "hub"
    assert answer["torch"] is False
    assert sorted(path.name for path in Path(answer["directory"]).iterdir()) == sorted(files)
    assert answer["steps"][0] == ["asking the hub for owner/name", None]
    assert answer["steps"][-1] == ["downloading owner/name", 1.0]
    hub.requests.clear()
    again = ask_hub(hub, tmp_path, "owner/name")
    assert (again["kind"], again["directory"]) == ("hub-cache", answer["directory"])
    assert not [request for request in hub.requests if "owner/name" in request]


def test_a_hub_model_with_code_or_pickles_is_refused_before_its_weights_are_fetched(debug_model, tmp_path, hub):
    files = {path.name: path.read_bytes() for path in debug_model.iterdir()}
    config = json.loads(files["config.json"]) | {"auto_map": {"AutoConfig": "evil.Config"}}
    hub.files["owner/code"] = files | {"config.json": json.dumps(config).encode()}
    answer = ask_hub(hub, tmp_path, "owner/code")
    assert answer["error"] == "ModelRefused"
    assert "evil.Config" in answer["message"]
    hub.files["owner/pickle"] = {"config.json": files["config.json"], "pytorch_model.bin": b"x"}
    answer = ask_hub(hub, tmp_path, "owner/pickle")
    assert answer["error"] == "ModelRefused"
    assert "pytorch_model.bin: pickle files" in answer["message"]
    hub.files["owner/dataset"] = {"README.md": b"x"}
    assert "has no config.json" in ask_hub(hub, tmp_path, "owner/dataset")["message"]
    assert not [request for request in hub.requests if request.endswith((".safetensors", ".bin"))]


def test_what_the_hub_answers_is_said_in_our_words(tmp_path, hub):
    hub.errors = {"owner/gated": (403, "GatedRepo"), "owner/none": (404, "RepoNotFound"), "owner/ill": (418, "")}
    place = f"hub http://127.0.0.1:{hub.server.server_port}"
    assert f"{place}: it is gated; accept its terms" in ask_hub(hub, tmp_path, "owner/gated")["message"]
    assert f"{place}: it has no such model, or it is private" in ask_hub(hub, tmp_path, "owner/none")["message"]
    assert f"{place}: Client error '418" in ask_hub(hub, tmp_path, "owner/ill")["message"]


def test_an_offline_process_does_not_ask_and_a_dead_hub_is_named(debug_model, tmp_path, hub):
    hub.files["owner/name"] = {path.name: path.read_bytes() for path in debug_model.iterdir()}
    offline = ask_hub(hub, tmp_path, "owner/name", HF_HUB_OFFLINE="1")
    assert offline["error"] == "ModelNotFound"
    assert "not asked, because HF_HUB_OFFLINE" in offline["message"]
    assert hub.requests == []
    dead = ask_hub(hub, tmp_path, "owner/name", HF_ENDPOINT="http://127.0.0.1:1")
    assert dead["error"] == "ModelNotFound"
    assert "hub http://127.0.0.1:1: " in dead["message"]
    assert "refused" in dead["message"]
