"""A server that is killed and comes back under a running program: the program notices only a pause."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import lorimer
from lorimer import types
from tests.client.examples import batch, logprobs, prompt
from tests.conformance.servers import environment, wait_for_address

STEPS = 24


class Restartable:
    """``lorimer serve`` on one port, which can be killed and started again."""

    def __init__(self, data: Path, *options: str) -> None:
        self._options = options
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = found.getsockname()[1]
        self._data = data
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "lorimer.cli.main", "serve", "--port", str(self._port), "--data"]
        command += [str(self._data), "--model", "lorimer/debug", "--dtype", "float32", "--set", "num_threads=1"]
        command += self._options
        log = self._data.parent / "server.log"
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.url = wait_for_address(self.process, log)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=60)


def train(service: lorimer.ServiceClient, pause: float = 0.0) -> tuple[list[float], np.ndarray]:
    """A pipelined loop: each step is submitted before the one before is waited for."""
    trainer = service.create_lora_training_client("lorimer/debug", rank=4, seed=7)
    data, waiting, losses = batch(), [], []
    for _ in range(STEPS):
        waiting.append(trainer.forward_backward(data, "cross_entropy"))
        trainer.optim_step(types.AdamParams(learning_rate=1e-2))
        time.sleep(pause)
        if len(waiting) > 3:
            losses.append(waiting.pop(0).result(120).loss)
    losses += [future.result(120).loss for future in waiting]
    return losses, logprobs(trainer.forward(data, "cross_entropy").result(120))


@pytest.mark.slow
def test_run_and_samples_go_on_across_kill_and_restart(tmp_path):
    server = Restartable(tmp_path / "data")
    try:
        with lorimer.ServiceClient(base_url=server.url) as service:
            expected = train(service)
            sampler = service.create_sampling_client(base_model="lorimer/debug")
            params = types.SamplingParams(max_tokens=300, seed=5, stop=[])
            reference = sampler.sample(prompt(), 2, params).result().sequences
            sampled = [sampler.sample(prompt(), 2, params) for _ in range(8)]

            def restart() -> None:
                for _ in range(2):
                    time.sleep(0.7)
                    server.kill()
                    time.sleep(0.5)
                    server.start()

            restarting = threading.Thread(target=restart)
            restarting.start()
            found = train(service, pause=0.1)
            restarting.join()
            answers = [future.result(120).sequences for future in sampled]
    finally:
        server.stop()
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-4)
    for answer in answers:
        assert [one.tokens for one in answer] == [one.tokens for one in reference]


@pytest.mark.slow
def test_program_may_start_before_its_server(tmp_path):
    server = Restartable(tmp_path / "data")
    server.kill()
    starting = threading.Timer(1.0, server.start)
    starting.start()
    try:
        with lorimer.ServiceClient(base_url=server.url) as service:
            assert service.get_server_capabilities().supported_models[0].model_name == "lorimer/debug"
    finally:
        starting.join()
        server.stop()
    assert os.path.exists(tmp_path / "data")
