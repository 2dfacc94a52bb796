"""Base models: what a server serves, what this machine has, and what can be said of one without its weights."""

import json
import shutil
import subprocess
import sys
import threading

import pytest

from lorimer.engine.adapters.lora import find_targets, init_adapter
from lorimer.engine.messages import LoraConfig
from lorimer.models.debug import make_debug_model, tiny_model
from tests.cli.commands import CommandLine, lorimer
from tests.cli.conftest import MODEL
from tests.conformance.servers import environment
from tests.models.hub import Hub


def test_list_of_a_server(alice: CommandLine):
    assert MODEL in alice("model", "list")
    found = alice.json("model", "list")
    assert found["server"] == alice.url
    assert [model["model_name"] for model in found["models"]] == [MODEL]


def test_list_of_this_machine(tmp_path):
    run = lorimer("model", "list", "--local", "-f", "json", LORIMER_CACHE_DIRECTORY=str(tmp_path))
    assert run.exit_code == 0, run.stderr
    models = {model["name"]: model for model in json.loads(run.stdout)["models"]}
    assert models["lorimer/tiny"]["kind"] == "bundled"
    assert models["lorimer/tiny"]["directory"].endswith("tiny")
    assert models["smollm2-135m-instruct"]["directory"] is None
    assert models["lorimer/debug"]["directory"] is None
    # Without a server in sight, the plain command lists the same.
    plain = lorimer("model", "list", LORIMER_CACHE_DIRECTORY=str(tmp_path), LORIMER_DATA=str(tmp_path / "data"))
    assert plain.exit_code == 0, plain.stderr
    assert "not fetched" in plain.stdout


def test_hub_cache_is_listed(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    make_debug_model(snapshot)
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("0" * 40)
    torn = tmp_path / "models--owner--torn" / "snapshots" / ("1" * 40)
    shutil.copytree(snapshot, torn)
    (torn / "model.safetensors").unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path), raising=False)
    found = lorimer("model", "list", "--local")
    rows = {line.split()[0]: line for line in found.stdout.splitlines() if line.strip()}
    assert "here" in rows["owner/name"]
    assert "refused" in rows["owner/torn"]


def test_pull(tmp_path):
    run = lorimer("model", "pull", "lorimer/debug", "-f", "json", LORIMER_CACHE_DIRECTORY=str(tmp_path))
    assert run.exit_code == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["directory"].startswith(str(tmp_path))
    assert found["size_bytes"] > 10_000
    missing = lorimer("model", "pull", "lorimer/tyni")
    assert missing.exit_code == 4
    assert "did you mean 'lorimer/tiny'" in missing.stderr


@pytest.mark.parametrize("architecture", ["llama", "phi3", "qwen3_moe"])
def test_info_counts_what_lora_trains(tmp_path, architecture):
    make_debug_model(tmp_path / "model", architecture=architecture)
    run = lorimer("model", "info", tmp_path / "model", "-f", "json")
    assert run.exit_code == 0, run.stderr
    found = json.loads(run.stdout)
    model = tiny_model(architecture)
    assert found["num_parameters"] == sum(p.numel() for p in model.parameters())
    pairs = init_adapter(find_targets(model), LoraConfig(rank=8, seed=0))
    assert found["lora_parameters"]["8"] == sum(t.numel() for pair in pairs.values() for t in pair)
    assert found["run_bytes"]["8"] == 16 * found["lora_parameters"]["8"]
    assert (found["num_layers"], found["max_context"], found["has_chat_template"]) == (2, 512, True)
    assert found["stored_dtypes"] == ["F32"]
    assert set(found["lora_targets"]) == {"attn", "mlp", "unembed"}


def test_info_of_a_served_name_and_of_what_is_refused(tmp_path):
    run = lorimer("model", "info", "big/one", LORIMER_MODELS="big/one=lorimer/tiny")
    assert run.exit_code == 0, run.stderr
    assert "tied to the embedding" in run.stdout
    assert "rank 32" in run.stdout
    make_debug_model(tmp_path / "model", architecture="qwen3")
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    settings |= {"layer_types": ["full_attention", "linear_attention"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    refused = lorimer("model", "info", tmp_path / "model")
    assert "linear_attention" in refused.stderr
    assert lorimer("model", "info", tmp_path / "none").exit_code == 4


def test_info_of_a_hub_model_fetches_no_weights(tmp_path):
    """In a process of its own: the hub's client reads its environment when it is loaded."""
    make_debug_model(tmp_path / "model")
    hub = Hub()
    hub.files["owner/name"] = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    serving = threading.Thread(target=hub.server.serve_forever)
    serving.start()
    with hub.server:
        variables = environment(
            HF_ENDPOINT=f"http://127.0.0.1:{hub.server.server_port}",
            HF_HOME=str(tmp_path / "hf"),
            HF_HUB_OFFLINE="0",
            NO_PROXY="127.0.0.1",
        )
        command = [sys.executable, "-m", "lorimer.cli.main", "model", "info", "owner/name", "-f", "json"]
        run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
        hub.server.shutdown()
        serving.join()
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert (found["kind"], found["stored_dtypes"], found["num_layers"]) == ("hub", [], 2)
    assert any("config.json" in request for request in hub.requests)
    assert not any("safetensors" in request for request in hub.requests)
