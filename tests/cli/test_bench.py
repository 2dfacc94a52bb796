"""The measurements of a user's own machine: against a server, and with the service in the same process."""

import json
import os
import subprocess
import sys

import pytest

from tests.cli.conftest import MODEL, command_line
from tests.conformance.servers import RunningServer, environment

RATES = ("train_tokens_per_second", "sample_1x16_tokens_per_second", "sample_8x1_tokens_per_second")


def test_against_a_server(server: RunningServer):
    user = command_line(server, "measurer")  # what the others used is counted by other tests
    found = user.json("bench", "--seconds", "1", "--rank", "2")
    assert (found["model"], found["server"], found["rank"]) == (MODEL, user.url, 2)
    assert all(found[name] > 10 for name in RATES)
    assert 0 < found["request_ms"] < 1000
    assert found["operation_ms"] <= found["operation_p90_ms"]
    assert found["engine_bytes"] is None
    code, message = user.refused("bench", "--model", "other")
    assert (code, repr(MODEL) in message) == (2, True)


@pytest.mark.slow
def test_embedded_leaves_nothing_behind(tmp_path):
    """In a process of its own: the service of this one, if there is any, has other settings."""
    command = [sys.executable, "-m", "lorimer.cli.main", "bench", "--model", MODEL, "--seconds", "1"]
    variables = environment(HOME=str(tmp_path), TMPDIR=str(tmp_path), LORIMER_NUM_THREADS="1", LORIMER_DTYPE="float32")
    run = subprocess.run([*command, "-f", "json"], env=variables, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert (found["model"], found["server"]) == (MODEL, "local")
    assert all(found[name] > 10 for name in RATES)
    assert found["engine_bytes"] > 50 << 20
    assert not any("lorimer-bench" in name for name in os.listdir(tmp_path))
