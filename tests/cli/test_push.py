"""``lorimer checkpoint push-hf`` to a stand-in of the hub, with the real ``huggingface_hub``."""

import json
import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM

from lorimer.cli.export import PushedForm
from lorimer.cli.push import repo_name
from lorimer.models.gguf.reader import read_gguf
from lorimer.models.sources import resolve
from tests.cli.hub import COMMIT, TOKEN, running_hub
from tests.conformance.servers import LORIMER, environment


@pytest.fixture(scope="module")
def hub():
    with running_hub() as hub:
        yield hub


@pytest.fixture
def push(alice, hub, tmp_path):
    def push(*arguments, token=TOKEN):
        variables = environment(
            LORIMER_BASE_URL=alice.url,
            LORIMER_API_KEY=alice.key,
            HOME=str(tmp_path),
            HF_HOME=str(tmp_path / "hf"),
            HF_ENDPOINT=hub.url,
            HF_HUB_OFFLINE="0",
            HF_HUB_DISABLE_XET="1",
            HF_HUB_DISABLE_PROGRESS_BARS="1",
            **({"HF_TOKEN": token} if token else {}),
        )
        command = [*LORIMER, "checkpoint", "push-hf", *arguments]
        return subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    return push


def test_adapter_with_a_card_is_uploaded(push, hub, trained, tmp_path):
    done = push(trained.sampler, "--repo", "alice/my-adapter", "-m", "First", "-f", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["repo_id"], found["commit"], found["tinker_path"]) == ("alice/my-adapter", COMMIT, trained.sampler)
    files = hub.repos["alice/my-adapter@main"]
    assert files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert json.loads(files["adapter_config.json"])["r"] == 4
    assert len(files["adapter_model.safetensors"]) > 1000
    card = files["README.md"].decode()
    assert card.startswith('---\nbase_model: "lorimer/debug"\n') and trained.sampler in card
    assert hub.private["alice/my-adapter"]
    assert hub.messages[-1] == "First"


def test_name_and_branch(push, hub, trained):
    done = push(trained.external, "--public", "--revision", "trial", "--no-model-card")
    assert done.returncode == 0, done.stderr
    name = f"alice/{repo_name('lorimer/debug', trained.external)}"
    assert hub.repos[f"{name}@trial"].keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert hub.repos[f"{name}@main"] == {}
    assert not hub.private[name]
    assert name in done.stdout


def test_merged_model_is_uploaded(push, hub, trained, tmp_path):
    done = push(trained.sampler, "--as", "merged", "--dtype", "float32", "-f", "json")
    assert done.returncode == 0, done.stderr
    name = f"alice/{repo_name('lorimer/debug', trained.sampler, PushedForm.merged)}"
    assert json.loads(done.stdout)["repo_id"] == name
    files = hub.repos[f"{name}@main"]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(resolve("lorimer/debug").directory, dtype=torch.float32)
    tokens = torch.tensor([list(range(40, 60))])
    with torch.no_grad():
        assert (merged(tokens).logits - base(tokens).logits).abs().max() > 1e-3
    card = files["README.md"].decode()
    assert "library_name: transformers" in card and f'from_pretrained("{name}")' in card


@pytest.mark.slow
def test_gguf_file_is_uploaded(push, hub, trained, tmp_path):
    done = push(trained.sampler, "--as", "gguf", "--dtype", "q8_0", "--repo", "alice/quantised")
    assert done.returncode == 0, done.stderr
    files = hub.repos["alice/quantised@main"]
    (name,) = files.keys() - {"README.md"}
    assert name == f"{repo_name('lorimer/debug', trained.sampler, PushedForm.gguf)}.gguf"
    (tmp_path / name).write_bytes(files[name])
    assert read_gguf(tmp_path / name).tensors
    assert f"llama-cli -m {name}" in files["README.md"].decode()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "q8_0"], "--base and --dtype are for --as merged and gguf"),
        (["--as", "merged", "--dtype", "q8_0"], "is for --to gguf and ollama"),
        (["--as", "merged", "--base", "./none"], "./none"),
    ],
)
def test_wrong_conversions_make_nothing_on_the_hub(push, hub, trained, options, message):
    before = set(hub.repos)
    done = push(trained.sampler, *options)
    assert done.returncode and message in done.stderr, done.stderr
    assert set(hub.repos) == before


@pytest.mark.parametrize(
    ("options", "token", "message"),
    [
        ([], None, "hf auth login"),
        (["--repo", "bob/not-mine"], TOKEN, "the hub does not take 'bob/not-mine'"),
    ],
)
def test_refusals_of_the_hub_are_one_line(push, hub, trained, options, token, message):
    before = set(hub.repos)
    done = push(trained.sampler, *options, token=token)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert set(hub.repos) == before


def test_names_that_the_hub_takes():
    assert repo_name("Qwen/Qwen3-8B", "tinker://a1:train:0/weights/x..y") == "Qwen3-8B-a1-train-0_weights_x-y"
    for form in PushedForm:
        assert len(repo_name("m" * 200, "tinker://a/weights/b", form)) <= 96
    assert repo_name("m", "tinker://a/weights/b", PushedForm.gguf) == "m-a_weights_b-gguf"
