"""``lorimer checkpoint push-hf`` to a stand-in of the hub, with the real ``huggingface_hub``."""

import json
import subprocess

import pytest

from lorimer.cli.push import repo_name
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
    assert len(repo_name("m" * 200, "tinker://a/weights/b")) <= 96
