"""The commands of ``tinker``, each in a process of its own."""

import json
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
import tinker

from tests.conformance.coverage import covers
from tests.conformance.samples import MODEL, RANK, TWIN, batch, step
from tests.conformance.servers import create_key, environment

COMMAND = "import sys; sys.modules['torch'] = None; from tinker.cli.__main__ import main; main()"
"""The SDK does without torch, and starts three times as fast."""
DATA = batch()
ENDS = (0, -signal.SIGABRT)
"""Its interpreter was once seen to abort, without a word, when everything had been said: no concern of the server."""


@pytest.fixture(scope="module")
def trainer(service):
    trainer = service.create_lora_training_client(MODEL, rank=RANK, user_metadata={"purpose": "cli"})
    step(trainer, DATA)
    return trainer


@pytest.fixture
def run(alice, tmp_path):
    """Run a command; gives what it printed, as JSON if it is."""

    def run(*arguments, key=alice.key, fails=False, text="", **variables):
        values = {"TINKER_BASE_URL": alice.url, "HOME": str(tmp_path)} | ({"TINKER_API_KEY": key} if key else {})
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, *arguments],
            env=environment(**values, **variables),
            cwd=tmp_path,
            input=text,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert (done.returncode not in ENDS) == fails, done.stdout + done.stderr
        if fails:
            return done.stderr
        return json.loads(done.stdout) if "json" in arguments else done.stdout

    return run


@covers("tinker version")
def test_version(run):
    assert run("version").split() == ["tinker", tinker.__version__]


@covers("tinker auth status", "tinker auth whoami")
def test_auth_status_and_whoami(run, rest):
    assert "Tinker accessible: yes" in run("auth", "status")
    assert run("-f", "json", "auth", "whoami")["user_urn"] == rest.whoami().result().user_urn
    assert "Authentication failed" in run("auth", "status", key="tml-wrong", fails=True)


@covers("tinker auth login", "tinker auth logout")
def test_login_stores_a_key_that_works(run, data_directory, server):
    key = create_key(data_directory, "carol")
    assert "Logged in as" in run("auth", "login", key=None, text=key + "\n")
    assert "Tinker accessible: yes" in run("auth", "status", key=None)
    assert "Removed credential" in run("auth", "logout", key=None)
    assert "No Tinker credentials" in run("auth", "status", key=None, fails=True)


def test_login_with_a_wrong_key_says_why(run):
    assert "not known" in run("auth", "login", key=None, text="tml-wrong\n", fails=True)


@covers("tinker model list")
def test_model_list(run):
    assert [one["model_name"] for one in run("-f", "json", "model", "list")["models"]] == [MODEL, TWIN]
    assert "No model name contains 'qwen'" in run("model", "list", "qwen", fails=True)


@covers("tinker run list", "tinker run info")
def test_runs(run, trainer):
    shown = run("-f", "json", "run", "list", "--limit", "0")["runs"]
    assert trainer.model_id in [one["training_run_id"] for one in shown]
    assert trainer.model_id in run("run", "info", trainer.model_id)
    assert run("-f", "json", "run", "info", trainer.model_id)["lora_rank"] == RANK
    assert "not found" in run("run", "info", "nothing:train:0", fails=True).lower()


@covers("tinker checkpoint list", "tinker checkpoint info", "tinker checkpoint set-ttl")
def test_checkpoints_are_listed_and_get_an_end(run, trainer):
    path = trainer.save_state("listed").result().path
    by_run = run("-f", "json", "checkpoint", "list", "--run-id", trainer.model_id)["checkpoints"]
    everything = run("-f", "json", "checkpoint", "list", "--limit", "0")["checkpoints"]
    assert path in [one["tinker_path"] for one in by_run]
    assert len(everything) >= len(by_run)
    run("checkpoint", "set-ttl", path, "--ttl", "7200")
    assert run("-f", "json", "checkpoint", "info", path)["expires_at"]
    run("checkpoint", "set-ttl", path, "--remove")
    assert run("-f", "json", "checkpoint", "info", path)["expires_at"] is None


@covers("tinker checkpoint publish", "tinker checkpoint unpublish")
def test_checkpoints_are_published(run, trainer, bob):
    path = trainer.save_state("published").result().path
    run("checkpoint", "publish", path)
    assert [one.tinker_path for one in bob.rest().list_checkpoints(trainer.model_id).result().checkpoints] == [path]
    run("checkpoint", "unpublish", path)
    with pytest.raises(tinker.NotFoundError):
        bob.rest().list_checkpoints(trainer.model_id).result()


@covers("tinker checkpoint delete")
def test_checkpoints_are_deleted(run, service, rest):
    trainer = service.create_lora_training_client(MODEL, rank=RANK)
    saved = [trainer.save_state(f"number-{number}").result().path for number in range(2)]
    trainer.save_weights_for_sampler("kept").result()
    assert run("-f", "json", "checkpoint", "delete", "-y", saved[0]) == {"deleted_count": 1, "failed": []}
    assert "Deleted 1" in run("checkpoint", "delete", "--run-id", trainer.model_id, "--type", "weights", text="y\n")
    left = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert [one.checkpoint_id for one in left] == ["sampler_weights/kept"]


@covers("tinker checkpoint download")
def test_checkpoints_are_downloaded(run, trainer, rest, tmp_path):
    training = trainer.save_state("fetched").result().path
    external = trainer.save_weights_external("fetched").result().path
    contents = []
    for path in (training, external):
        shown = run("-f", "json", "checkpoint", "download", path, "-o", str(tmp_path / "out"))
        directory = tmp_path / "out" / path.removeprefix("tinker://").replace("/", "_")
        assert shown["destination"] == str(directory)
        assert json.loads((directory / "adapter_config.json").read_text("utf-8"))["r"] == RANK
        contents.append((directory / "adapter_model.safetensors").read_bytes())
    assert contents[0] == contents[1]
    assert not [
        one
        for one in rest.list_user_checkpoints(limit=5).result().checkpoints
        if one.checkpoint_id.endswith("/download")
    ]


@covers("tinker checkpoint push-hf")
def test_push_to_the_hub_gets_as_far_as_the_hubs_login(run, trainer):
    path = trainer.save_weights_external("pushed").result().path
    assert "Not logged in" in run("checkpoint", "push-hf", path, fails=True, HF_HUB_OFFLINE="1")


@covers("tinker session export-trace")
def test_trace_is_exported(run, service, trainer, tmp_path):
    session_id = service.holder.get_session_id()
    run("session", "export-trace", session_id, "-o", str(tmp_path / "trace.json"))
    assert json.loads((tmp_path / "trace.json").read_text("utf-8"))["traceEvents"]
    assert run("session", "export-trace", session_id, "--url-only").startswith("http://127.0.0.1")


@covers("tinker billing usage", "tinker billing checkpoint-storage")
def test_billing(run, trainer, tmp_path):
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    hours = [moment.isoformat() for moment in (start, start + timedelta(hours=2))]
    assert run("-f", "json", "billing", "usage", *hours)["data"]
    run("billing", "usage", *hours, "--csv", str(tmp_path / "usage.csv"))
    assert "token_count" in (tmp_path / "usage.csv").read_text("utf-8")
    trainer.save_state("stored").result()
    storage = run("-f", "json", "billing", "checkpoint-storage")["data"]
    assert sum(item["checkpoint_count"] for item in storage) >= 1
