"""A server whose sampler has no vLLM ends at start, and says how to install it."""

import subprocess
import sys

import pytest

from tests.conformance.servers import LORIMER, environment

PROBLEMS = {sys.executable: "does not have it", "/no/such/python": "cannot be run"}


@pytest.mark.parametrize("python", PROBLEMS)
def test_missing_vllm_is_refused_at_start(tmp_path, python):
    config = tmp_path / "lorimer.toml"
    config.write_text(f'[model."lorimer/tiny"]\nsampler = {{ kind = "vllm", python = "{python}" }}\n', "utf-8")
    command = [*LORIMER, "serve", "--port", "0", "--data", str(tmp_path / "data"), "--config", str(config)]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert PROBLEMS[python] in run.stderr
    assert "pip install vllm" in run.stderr
    assert not (tmp_path / "data").exists()
