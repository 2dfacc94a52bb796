"""Checkpoints of a real server, exported: what comes out computes what the server computed."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import lorimer
from lorimer import types
from lorimer.models.sources import resolve
from tests.cli.commands import CommandLine
from tests.cli.conftest import TrainedRun
from tests.models.go_templates import read_modelfile, render

TOKENS = list(range(40, 60))

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")


def server_logprobs(alice: CommandLine, path: str) -> torch.Tensor:
    with lorimer.ServiceClient(base_url=alice.url, api_key=alice.key) as service:
        sampler = service.create_sampling_client(model_path=path)
        return torch.tensor(sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:])


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found = model(input_ids=torch.tensor([TOKENS])).logits[0, :-1].float().log_softmax(-1)
    return found.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


def test_checkpoint_becomes_a_merged_model(alice: CommandLine, trained: TrainedRun, tmp_path):
    output = tmp_path / "merged"
    run = alice.run("export", trained.sampler, "--to", "merged", "--dtype", "float32", "-o", output, "-f", "json")
    assert run.exit_code == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["path"] == str(output)
    assert found["comparison"]["difference"] < 1e-3 < found["comparison"]["effect"]
    merged = logprobs(AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32))
    assert (merged - server_logprobs(alice, trained.sampler)).abs().max() < 1e-3
    assert AutoTokenizer.from_pretrained(output).chat_template
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_checkpoint_becomes_a_peft_directory(alice: CommandLine, trained: TrainedRun, tmp_path):
    run = alice.run("export", trained.training, "--to", "peft", "-o", tmp_path / "out")
    assert run.exit_code == 0, run.stderr
    assert str(tmp_path / "out") in run.stdout
    base = AutoModelForCausalLM.from_pretrained(resolve("lorimer/debug").directory, dtype=torch.float32)
    with_adapter = logprobs(PeftModel.from_pretrained(base, tmp_path / "out").eval())
    assert (with_adapter - server_logprobs(alice, trained.sampler)).abs().max() < 1e-3
    of_run = alice.run("export", f"{trained.run_id}@last", "--to", "peft", "-o", tmp_path / "last")
    assert of_run.exit_code == 0, of_run.stderr
    weights = [tmp_path / name / "adapter_model.safetensors" for name in ("out", "last")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    # What was exported is itself a source.
    again = alice.run("export", tmp_path / "out", "--to", "merged", "-o", tmp_path / "merged", "--no-check")
    assert again.exit_code == 0, again.stderr
    assert "checked" in again.stdout


@pytest.mark.slow
def test_checkpoint_becomes_a_model_of_ollama(alice: CommandLine, trained: TrainedRun, tmp_path):
    output = tmp_path / "mine"
    run = alice.run("export", trained.sampler, "--to", "ollama", "--dtype", "q8_0", "-o", output, "-f", "json")
    assert run.exit_code == 0, run.stderr
    assert json.loads(run.stdout)["read_back"] is not None
    assert sorted(path.name for path in output.iterdir()) == ["Modelfile", "mine.gguf"]
    found = dict(read_modelfile((output / "Modelfile").read_text("utf-8")))
    assert found["FROM"] == "./mine.gguf"
    talk = [{"role": "user", "content": "Hello"}]
    tokenizer = AutoTokenizer.from_pretrained(resolve("lorimer/debug").directory)
    assert render(found["TEMPLATE"], talk) == tokenizer.apply_chat_template(
        talk, tokenize=False, add_generation_prompt=True
    )
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_base_is_found_by_the_names_of_the_settings(alice: CommandLine, trained: TrainedRun, tmp_path):
    assert (
        alice.run("export", trained.sampler, "--to", "peft", "--base", "my/name", "-o", tmp_path / "a").exit_code == 0
    )
    arguments = ["export", tmp_path / "a", "--to", "merged", "--no-check"]
    missing = alice.run(*arguments, "-o", tmp_path / "b")
    assert missing.exit_code == 4
    assert "trained on 'my/name'" in missing.stderr
    assert "--base" in missing.stderr
    assert "hub cache" in missing.stderr
    (tmp_path / "lorimer.toml").write_text('models = ["my/name=lorimer/debug"]\n')
    for number, extra in enumerate((["--config", tmp_path / "lorimer.toml"], ["--base", "lorimer/debug"])):
        found = alice.run(*arguments, "-o", tmp_path / f"c{number}", *extra)
        assert found.exit_code == 0, found.stderr


WRONG = {
    "no directory": (["none", "--to", "peft"], 2, "is no directory"),
    "no such format": (["none", "--to", "onnx"], 2, "onnx"),
    "quantised merge": (["none", "--to", "merged", "--dtype", "q8_0"], 2, "is for --to gguf"),
    "typed adapter": (["none", "--to", "peft", "--dtype", "float16"], 2, "an adapter stays float32"),
    "no such checkpoint": (["tinker://no:train:0/weights/x", "--to", "peft"], 4, "no:train:0"),
    "no path": (["tinker://x", "--to", "peft"], 2, "is no checkpoint"),
}


@pytest.mark.parametrize(("arguments", "code", "message"), WRONG.values(), ids=WRONG)
def test_wrong_usage(alice: CommandLine, tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    run = alice.run("export", *arguments)
    assert (run.exit_code, message in run.stderr) == (code, True), run.stderr
    assert list(tmp_path.iterdir()) == []


def test_existing_target_is_kept(alice: CommandLine, trained: TrainedRun, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    run = alice.run("export", trained.sampler, "--to", "peft", "-o", tmp_path / "mine")
    assert (run.exit_code, "is there already" in run.stderr) == (2, True)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["file"]
