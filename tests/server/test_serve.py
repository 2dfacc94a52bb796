"""The server as a process: how it starts, what it refuses, how it ends, and that nothing is left of it."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import psutil
import pytest

from lorimer.engine.debug import make_debug_model

LORIMER = [sys.executable, "-m", "lorimer.cli.main"]


class Process:
    """``lorimer serve`` with a debug model on a free port."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.log = (folder / "log").open("w+")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LORIMER_")}
        command = [*LORIMER, "serve", "--port", "0", "--data", str(folder / "data"), "--set", "num_threads=1", *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment, start_new_session=True
        )
        self.output = ""
        self.url = ""

    def read_until(self, pattern: str) -> str:
        while not (found := re.search(pattern, self.output)):
            line = self.process.stdout.readline()
            assert line, (self.output, self.stderr())
            self.output += line
        return found[1]

    def wait_until_listening(self) -> "Process":
        self.url = self.read_until(r"at (http://\S+)")
        return self

    def wait_until_ready(self) -> "Process":
        self.wait_until_listening()
        self.read_until(r"(lorimer key create)")
        return self

    def stderr(self) -> str:
        self.log.flush()
        return Path(self.log.name).read_text()

    def engines(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


@pytest.fixture
def launch(tmp_path):
    started = []

    def begin(*flags):
        started.append(Process(tmp_path, *flags))
        return started[-1]

    yield begin
    for process in started:
        process.close()


@pytest.fixture
def model(tmp_path):
    make_debug_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serves_says_so_and_ends_in_order(launch, model, number):
    server = launch("--model", f"my/model={model}").wait_until_ready()
    assert "open" in server.output
    assert "my/model: ready" in server.output
    assert f"TINKER_BASE_URL={server.url}" in server.output
    assert httpx2.get(f"{server.url}/readyz").json() == {"status": "ready", "reasons": []}
    engines = server.engines()
    assert len(engines) == 1
    server.process.send_signal(number)
    assert server.process.wait(60) == 0, server.stderr()
    assert "Traceback" not in server.stderr()
    assert psutil.wait_procs(engines, timeout=30)[1] == []


def test_kill_takes_the_engine_along(launch, model):
    server = launch("--model", str(model)).wait_until_ready()
    engines = server.engines()
    server.process.kill()
    server.process.wait()
    assert psutil.wait_procs(engines, timeout=30)[1] == []


def test_second_signal_ends_at_once(launch, model):
    server = launch("--model", str(model)).wait_until_ready()
    engines = server.engines()
    for engine in engines:
        engine.suspend()  # so that the order of the end has to wait
    try:
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 130
    finally:
        for engine in engines:
            engine.resume()
    assert psutil.wait_procs(engines, timeout=30)[1] == []


def test_second_server_is_refused(launch, tmp_path):
    first = launch("--lazy").wait_until_listening()
    second = launch("--lazy")
    assert second.process.wait(60) == 3
    assert f"in use by process {first.process.pid} on" in second.stderr()
    port = first.url.rsplit(":", 1)[1]
    third = subprocess.run(
        [*LORIMER, "serve", "--lazy", "--port", port, "--data", str(tmp_path / "other")], capture_output=True, text=True
    )
    assert third.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in third.stderr
    assert httpx2.get(f"{first.url}/api/v1/healthz").status_code == 200


def test_other_addresses_need_a_key(launch):
    server = launch("--lazy", "--host", "0.0.0.0")
    assert server.process.wait(60) == 2
    assert "lorimer key create" in server.stderr()


def test_model_that_cannot_be_loaded_is_named_and_the_server_stays(launch, tmp_path):
    server = launch("--model", f"gone={tmp_path}/none.gguf").wait_until_ready()
    assert "none.gguf" in server.output
    assert httpx2.get(f"{server.url}/readyz").status_code == 503


def test_half_sent_headers_are_dropped_and_others_served(launch):
    server = launch("--lazy", "--set", "header_seconds=0.5").wait_until_listening()
    address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    slow = [socket.create_connection(address, timeout=30) for _ in range(20)]
    for connection in slow:
        connection.sendall(b"GET /api/v1/healthz HT")
    assert httpx2.get(f"{server.url}/api/v1/healthz").status_code == 200
    for connection in slow:
        assert connection.recv(100) == b""
        connection.close()


HEALTH = b"GET /api/v1/healthz HTTP/1.1\r\n"
POST = b"POST /api/v1/telemetry HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n"
SMUGGLED = {
    "two lengths": POST + b"Content-Length: 4\r\n\r\nabcd",
    "space in name": HEALTH + b"Host : localhost\r\n\r\n",
    "folded": HEALTH + b"Host: localhost\r\nA: b\r\n c: d\r\n\r\n",
    "no host": HEALTH + b"\r\n",
    "two hosts": HEALTH + b"Host: localhost\r\nHost: evil.test\r\n\r\n",
    "long header": HEALTH + b"Host: localhost\r\nA: " + b"b" * 300_000 + b"\r\n\r\n",
}


def test_ambiguous_requests_are_refused(launch):
    server = launch("--lazy").wait_until_listening()
    for name, request in SMUGGLED.items():
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=30) as connection:
            connection.sendall(request)
            status = connection.recv(100).partition(b"\r\n")[0]
            assert re.match(rb"HTTP/1.1 4\d\d ", status), (name, status)


async def hold_polls(url: str, count: int) -> list[asyncio.StreamWriter]:
    """Open ``count`` polls for results that do not come, as a client with as many samples does."""
    host, port = url.removeprefix("http://").split(":")
    writers = []
    for _ in range(count):
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"target": TARGET, "prev_cursor": 0}).encode()
        head = f"POST /api/v1/retrieve_futures HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        writers.append(writer)
    return writers


TARGET: dict[str, object] = {"type": "sampling_session", "sampling_session_id": "", "cloned_sampler_id": 0}


async def in_flight(http: httpx2.AsyncClient) -> int:
    found = re.search(r"requests_in_flight (\d+)", (await http.get("/metrics")).text)
    return int(found[1]) - 1


async def test_polls_of_clients_that_left_are_released_and_the_rest_do_not_hold_the_end(launch, model):
    server = launch("--model", f"m={model}").wait_until_ready()
    async with httpx2.AsyncClient(base_url=server.url, timeout=30) as http:
        made = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
        session = (await http.post("/api/v1/create_session", json=made)).json()["session_id"]
        wanted = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "m"}
        answer = await http.post("/api/v1/create_sampling_session", json=wanted)
        TARGET["sampling_session_id"] = answer.json()["sampling_session_id"]
        writers = await hold_polls(server.url, 300)
        async with asyncio.timeout(60):
            while await in_flight(http) < 300:
                await asyncio.sleep(0.05)
            for writer in writers[:200]:
                writer.close()
            while await in_flight(http) > 100:
                await asyncio.sleep(0.05)
        assert await in_flight(http) == 100
    server.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(server.process.wait, 60) == 0
    for writer in writers:
        writer.close()
    assert "Traceback" not in server.stderr()
