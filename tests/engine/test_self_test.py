"""The self-test that `lorimer doctor --gpu` runs: a device that computes as the CPU does passes, another does not."""

import json
import subprocess
import sys

import torch

from lorimer.cli.findings import Status
from lorimer.cli.machine_checks import check_device
from lorimer.engine import self_test
from lorimer.engine.model import device
from lorimer.models.debug import make_debug_model


def test_a_device_is_compared_with_the_cpu(tmp_path, monkeypatch):
    make_debug_model(tmp_path / "model")
    monkeypatch.setattr(self_test, "SECONDS", 0.05)
    # A CPU with bfloat16 units would choose bfloat16, which rounds.
    monkeypatch.setattr(device, "choose_dtype", lambda _: torch.float32)
    found = self_test.report(str(tmp_path / "model"))
    assert found["is_equal"] and json.loads(json.dumps(found)) == found
    for one in found["differences"].values():
        assert one == {"logprob": 0.0, "gradient": 0.0, "equal_sampled_tokens": self_test.NUM_SAMPLED}
    assert len(found["kernels"]) == 5 and found["kernels"][0].startswith("attention with 4 heads of 16: blocks")
    assert found["train_tokens_per_second"] > 0 and found["sample_tokens_per_second"] > 0
    show = [sys.executable, "-c", f"print({json.dumps(found)!r})"]
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda command, run=subprocess.run, **kw: run(show, **kw))
        shown, *kernels = check_device("lorimer/tiny")
    assert (shown.check, shown.status) == ("device", Status.ok)
    assert [(one.check, one.text) for one in kernels] == [("kernels", line) for line in found["kernels"]]
    gradient, calls = self_test._gradient, []

    def wrong(engine, name):
        """The first engine is the reference."""
        calls.append(name)
        return gradient(engine, name) * (1 if len(calls) <= len(self_test.RUNS) else 1.1)

    monkeypatch.setattr(self_test, "_gradient", wrong)
    assert not self_test.report(str(tmp_path / "model"))["is_equal"]


def test_a_device_that_fails_is_a_finding(monkeypatch):
    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda command, **kw: run([sys.executable, "-c", "raise ValueError('no')"], **kw)
    )
    (finding,) = check_device("lorimer/tiny")
    assert finding.status is Status.failed and finding.text == "ValueError: no"
