"""vLLM servers that are killed, whose samples are cancelled, and that end with their owner."""

import os
import signal
import subprocess
import time
from pathlib import Path

import httpx2
import psutil
import pytest
import torch
from tinker import types

from lorimer.engine.config import EngineConfig
from lorimer.engine.model.device import open_device
from lorimer.engine.vllm.base_files import BaseFiles
from lorimer.engine.vllm.routes import BASE, Vllm
from lorimer.engine.vllm.server import MODEL_NAME
from lorimer.engine.vllm.start_check import OTHER, TOLERANCES, compare
from lorimer.errors import ModelRefused
from lorimer.models.sources import resolve
from tests.conformance.samples import current_logprobs, datum, prompt_of
from tests.conformance.servers import LORIMER, environment
from tests.vllm.conftest import MODEL, SAMPLER
from tests.vllm.installation import vllm_processes, write_config

PROMPT = list(range(3, 40))
END_SECONDS = 30
NUM_SLOTS = 3
"""For adapters: `max_loras` of the configuration, and one for the base."""


def wait_until_gone(processes):
    _, alive = psutil.wait_procs(processes, END_SECONDS)
    assert not alive


def group_of(process):
    """All processes of a vLLM server, its lifeline included."""
    group = os.getpgid(process.pid)
    return [other for other in psutil.process_iter() if _group(other) == group]


def _group(process):
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


@pytest.mark.parametrize("victim", ["api_server", "worker"])
def test_killed_server_loses_no_sample(installation, service, victim):
    """Samples under way are computed again; while vLLM starts, the engine samples."""
    installation.wait_until_ready()
    base = service.create_sampling_client(base_model=MODEL)
    params = types.SamplingParams(max_tokens=900, stop=[])
    [process] = vllm_processes(installation.pid)
    group, num_deaths = group_of(process), installation.replica()["num_deaths"]
    waiting = [base.sample(prompt_of(PROMPT), 4, params) for _ in range(4)]
    while installation.replica()["num_running_samples"] < 4:
        time.sleep(0.02)
    chosen = process if victim == "api_server" else next(one for one in group if one.name().startswith("VLLM::Worker"))
    chosen.send_signal(signal.SIGKILL)
    wait_until_gone(group)
    meanwhile = base.sample(prompt_of(PROMPT), 1, types.SamplingParams(max_tokens=4)).result()
    assert len(meanwhile.sequences) == 1
    run = service.create_lora_training_client(MODEL, rank=1)
    for future in waiting:
        sequences = future.result().sequences
        assert [len(sequence.tokens) for sequence in sequences] == [900] * 4
        expected = current_logprobs(run, [datum(PROMPT + sequences[0].tokens)])[-900:]
        assert abs(expected - sequences[0].logprobs).max() <= 1e-4
    installation.wait_until_ready()
    assert installation.replica()["num_deaths"] == num_deaths + 1
    small = types.SamplingParams(max_tokens=2)
    assert installation.num_places(lambda: base.sample(prompt_of(PROMPT), 1, small).result()) == {SAMPLER: 1}


def test_cancelled_sample_ends(installation, service):
    """A caller of the OpenAI-compatible route that goes away stops what vLLM computes for it."""
    installation.wait_until_ready()
    body = f'{{"model": "{MODEL}", "prompt": "1", "max_tokens": 900, "n": 8, "stream": true}}'
    command = [
        "curl",
        "-sN",
        f"{installation.server.url}/v1/completions",
        "-d",
        body,
        "-H",
        "Content-Type: application/json",
    ]
    deadline = time.monotonic() + END_SECONDS
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as caller:
        while installation.replica()["num_running_samples"] != 1:
            assert time.monotonic() < deadline and caller.poll() is None
            time.sleep(0.01)
        caller.kill()
    while installation.replica()["num_running_samples"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_server_ends_with_its_owner(tmp_path):
    """Also when the owner is killed while vLLM starts."""
    config = write_config(tmp_path / "lorimer.toml", MODEL)
    command = [*LORIMER, "serve", "--port", "0", "--data", str(tmp_path / "data"), "--config", str(config)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as owner:
        deadline = time.monotonic() + 120
        while not (found := vllm_processes(owner.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        group = group_of(found[0])
        owner.kill()
    wait_until_gone(group)


async def test_check_at_start_finds_a_base_without_an_adapter(installation):
    """The trap for which the base is asked as an adapter of zeros: beside adapters, vLLM computes it with theirs.

    A server that has just started does so; one that has computed other things did not always.
    """
    installation.wait_until_ready()
    [process] = vllm_processes(installation.pid)
    group, num_deaths, deadline = (
        group_of(process),
        installation.replica()["num_deaths"],
        time.monotonic() + END_SECONDS,
    )
    process.kill()
    wait_until_gone(group)
    while installation.replica()["num_deaths"] == num_deaths:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    installation.wait_until_ready()
    [process] = vllm_processes(installation.pid)
    command = process.cmdline()
    socket = command[command.index("--uds") + 1]
    config = EngineConfig(model=MODEL, dtype="float32")
    base = BaseFiles(resolve(MODEL), config, open_device(config), None)
    async with httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=socket), base_url="http://vllm") as client:
        vllm, names = Vllm(client), [OTHER, *(f"{OTHER}-{slot}" for slot in range(NUM_SLOTS - 1))]
        for name in names:
            await vllm.load_adapter(name, Path(socket).parent / OTHER)
            # Requests without an adapter get the weights of the last slot, so no slot may be empty or have the zeros.
            await vllm.complete({"model": name, "prompt": PROMPT, "max_tokens": 1})
        try:
            with pytest.raises(ModelRefused, match="differ between one adapter alone and a mixed batch"):
                await compare(vllm, base, (MODEL_NAME, OTHER), TOLERANCES[torch.float32])
            await compare(vllm, base, (BASE, OTHER), TOLERANCES[torch.float32])
        finally:
            for name in names:
                await vllm.unload_adapter(name)
