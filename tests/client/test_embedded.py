"""The service in the process of its client, each time in a program of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.servers import ROOT, environment

HEAD = """
import sys, threading, time
import lorimer
from lorimer import types
def data():
    tokens = list(range(10, 20))
    inputs = types.ModelInput.from_ints(tokens[:-1])
    return [types.Datum(inputs, {"target_tokens": tokens[1:], "weights": [1.0] * 9})]
"""


def run_program(text: str, data: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    variables = {"LORIMER_DATA": str(data), "LORIMER_NUM_THREADS": "1", "LORIMER_DTYPE": "float32"} | variables
    return subprocess.run(
        [sys.executable, "-c", HEAD + text], env=environment(**variables), capture_output=True, text=True, timeout=120
    )


TRAIN = """
service = lorimer.ServiceClient(base_url="local", model="lorimer/debug")
trainer = service.create_lora_training_client("lorimer/debug", rank=4, seed=1)
first = trainer.forward_backward(data(), "cross_entropy").result().loss
trainer.optim_step(types.AdamParams(learning_rate=1e-2))
path = trainer.save_state("kept").result().path
second = trainer.forward(data(), "cross_entropy").result().loss
sampler = trainer.save_weights_and_get_sampling_client()
tokens = sampler.sample(types.ModelInput.from_ints([5]), 1, types.SamplingParams(max_tokens=3)).result()
assert second < first and tokens.sequences[0].tokens
assert "torch" not in sys.modules
import pickle
copy = pickle.loads(pickle.dumps(sampler))
assert copy.compute_logprobs(types.ModelInput.from_ints([5, 6])).result()[0] is None
print(path, second)
"""
GO_ON = """
service = lorimer.ServiceClient()
trainer = service.create_training_client_from_state(sys.stdin.readline().strip() or PATH)
print(trainer.forward(data(), "cross_entropy").result().loss)
"""


def test_training_without_a_port_and_going_on_in_the_next_program(tmp_path):
    run = run_program(TRAIN, tmp_path / "data")
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr and "Warning" not in run.stderr
    path, loss = run.stdout.split()
    run = run_program(f"PATH = {path!r}\n{GO_ON}", tmp_path / "data", LORIMER_MODELS="lorimer/debug")
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) == pytest.approx(float(loss), rel=1e-6)


LISTEN = """
import httpx2
service = lorimer.ServiceClient(base_url="local", model="lorimer/debug")
client = service.create_lora_training_client("lorimer/debug", rank=4)
rest = service.create_rest_client()
episode = rest.create_episode(client.model_id, sampler="lorimer/debug", max_tokens=3).result()
connection = rest.holder
(url, key), (again, _) = (connection.run(connection.address()).result() for _ in range(2))
assert url == again and not key
answer = httpx2.post(url + episode.path + "/completions", json={"model": "m", "prompt": [5]}, timeout=60)
assert answer.status_code == 200, answer.text
print(url, len(rest.get_turns(client.model_id, episode.episode_id).result()))
"""


def test_programs_outside_reach_the_service_while_it_runs(tmp_path):
    run = run_program(LISTEN, tmp_path / "data")
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    url, num_turns = run.stdout.split()
    assert url.startswith("http://127.0.0.1:") and num_turns == "1"


def test_second_program_is_told_what_to_do_and_the_engine_ends_with_the_first_also_after_an_error(tmp_path):
    text = f"""
service = lorimer.ServiceClient(base_url="local", model="lorimer/debug")
service.create_lora_training_client("lorimer/debug", rank=4)
import psutil, subprocess
print(*[child.pid for child in psutil.Process().children(recursive=True)])
code = 'import lorimer; lorimer.ServiceClient(base_url="local", model="lorimer/debug").get_server_capabilities()'
run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd={str(ROOT)!r})
print(run.stderr.splitlines()[-1])
raise SystemExit(3)
"""
    run = run_program(text, tmp_path / "data", LORIMER_ENGINE_FORK_SERVER="")
    assert run.returncode == 3, run.stderr
    engines, told = run.stdout.splitlines()
    assert "in use" in told and "LORIMER_DATA" in told and "base_url" in told
    assert engines.split()
    for pid in engines.split():
        assert not Path(f"/proc/{pid}").exists()


def test_missing_server_package_is_named(tmp_path):
    text = """
sys.modules["starlette"] = None
try:
    lorimer.ServiceClient().get_server_capabilities()
except lorimer.TinkerError as error:
    print(error)
"""
    run = run_program(text, tmp_path / "data")
    assert "lorimer[server]" in run.stdout and "LORIMER_BASE_URL" in run.stdout, run.stderr
