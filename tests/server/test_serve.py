"""The server as a process: how it starts, what it refuses, how it ends, and that nothing is left of it."""

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import time

import httpx2
import psutil
import pytest

from tests.server.processes import LORIMER


def test_serves_says_so_and_ends_in_order(launch, model):
    """By SIGINT; the test of polls ends a server by SIGTERM."""
    server = launch("--model", f"my/model={model}").wait_until_ready()
    assert "open" in server.output
    assert "my/model: ready" in server.output
    assert f"TINKER_BASE_URL={server.url}" in server.output
    assert httpx2.get(f"{server.url}/readyz").json() == {"status": "ready", "reasons": []}
    engines = server.engines()
    assert len(engines) == 1
    server.process.send_signal(signal.SIGINT)
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


@pytest.mark.parametrize(
    ("source", "others"),
    [
        ("./nope", []),
        ("gone=none.gguf", []),
        ("Quen/Qwen3-8B", []),
        ("lorimer/tinny", []),
        ("./nope", ["--model", "lorimer/tiny"]),
        ("Quen/Qwen3-8B", ["--model", "lorimer/tiny"]),
    ],
)
def test_model_that_is_not_there_ends_the_server_before_it_listens(launch, source, others):
    server = launch(*others, "--model", source, variables={"HF_HUB_OFFLINE": "1"})
    assert server.process.wait(60) == 1
    told = server.stderr()
    assert server.process.stdout.read() == "", "it announced an address"
    assert told.startswith("lorimer: model ") and told.count("\n") == 1 and "looked at: " in told, told
    assert ("hub https://" in told) == ("Qwen" in source or "tinny" in source)


def test_hub_that_cannot_be_reached_is_told_soon(launch, tmp_path):
    variables = {"HF_HUB_OFFLINE": "", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")}
    server = launch("--model", "Quen/Qwen3-8B", variables=variables)
    began = time.monotonic()
    assert server.process.wait(60) == 1
    assert time.monotonic() - began < 20
    assert "hub http://127.0.0.1:9: " in server.stderr() and "Traceback" not in server.stderr()


def test_model_that_the_engine_refuses_ends_the_server(launch, model, tmp_path):
    """What is wrong with it shows only when it is loaded."""
    wrong = tmp_path / "wrong"
    shutil.copytree(model, wrong)
    (wrong / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"]}))
    server = launch("--model", str(wrong))
    assert server.process.wait(120) == 1
    assert "lorimer: model 'wrong' cannot be served: " in server.stderr()
    assert "Traceback" not in server.stderr()


def test_interrupt_while_the_hub_is_asked_or_a_model_loads(launch, model, tmp_path):
    """A hub that takes the question and says nothing; then an engine that is loading."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        variables = {"HF_HUB_OFFLINE": "", "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf")}
        asking = launch("--model", "Quen/Qwen3-8B", variables=variables)
        connection, _ = silent.accept()
        with connection:
            connection.recv(1)
            asking.process.send_signal(signal.SIGINT)
            began = time.monotonic()
            assert asking.process.wait(30) == 130
            assert time.monotonic() - began < 5
    loading = launch("--model", str(model)).wait_until_listening()
    (engine,) = psutil.Process(loading.process.pid).children()  # the fork server, while it imports the engine
    engine.suspend()  # it would be ready too soon
    loading.process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert loading.process.wait(60) == 0
    assert time.monotonic() - began < 8
    for server in (asking, loading):
        assert "Traceback" not in server.stderr()


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
    engines = server.engines()
    assert len(engines) == 1
    server.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(server.process.wait, 60) == 0, server.stderr()
    for writer in writers:
        writer.close()
    assert "Traceback" not in server.stderr()
    assert psutil.wait_procs(engines, timeout=30)[1] == []
