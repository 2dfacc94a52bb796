"""What leaves a server: answers as fast as they are read, nothing of users in logs, nothing at all elsewhere."""

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import psutil
import pytest

from lorimer import types
from lorimer.engine.native import library
from lorimer.models.debug import make_debug_model
from tests.server.processes import Process, eventually, is_connected, is_well, statuses
from tests.server.routes.conftest import MODEL, Client, datum, sample_body

CANARY = "canary-7f3a"
LARGE = 512 * 1024 * 1024
SECRET_TOKENS = [201, 203, 207, 211, 223, 227, 229]
HERE = Path(__file__).parent
LOOPBACK = ("127.0.0.1", "::1", "localhost")


async def work(client: Client) -> None:
    """A life of a run: trained, refused, saved, sampled, scored; with something to keep private everywhere."""
    session_id = await client.session(user_metadata={"note": CANARY}, display_name=CANARY, tags=[CANARY])
    run_id = await client.run(session_id, user_metadata={"note": CANARY})
    await client.train(run_id, 1, data=[datum(SECRET_TOKENS)])
    bad = datum(SECRET_TOKENS, target_tokens=np.array([9999] * 7, np.int64), weights=np.ones(7, np.float32))
    await client.failure(await client.submit(types.TrainingRequest(run_id, 2, [bad], "cross_entropy")))
    await client.step(run_id, 3)
    path = await client.save(run_id, 4, "kept", "save_weights_for_sampler")
    sampler_id = await client.sampler(session_id, model_path=path)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": SECRET_TOKENS}]}
    await client.sample(sampler_id, prompt=prompt, sampling_params={"max_tokens": 4, "stop": [CANARY]})
    refused = await client.post("asample", sample_body(sampler_id, 1, num_samples=0, prompt=prompt))
    assert refused.status_code == 400
    events = [{"event": "GENERIC_EVENT", "event_data": {"headers": {"x-api-key": client.headers["x-api-key"]}}}]
    body = {"events": events, "platform": "linux", "sdk_version": "0", "session_id": session_id}
    assert (await client.post("telemetry", body)).status_code == 200
    await client.get(f"sessions/{session_id}?note={CANARY}")
    assert (await client.post("create_session", {"tags": CANARY})).status_code == 422


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outgoing")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Process]:
    """What it asks of the network is written to a file."""
    make_debug_model(folder / "model")
    variables = {
        "OUTBOUND_FILE": str(folder / "outbound"),
        "PYTHONPATH": os.pathsep.join([str(HERE / "outbound"), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "",  # so that whatever wants to reach the hub tries
    }
    flags = ("--model", f"{MODEL}={folder / 'model'}", "--log-level", "debug", "--set", "answer_seconds=1")
    process = Process(folder, *flags, variables=variables).wait_until_ready()
    yield process
    process.close()


async def test_downloads_that_nobody_reads_take_no_memory_and_end(server, folder):
    """An archive is made on the way, a file is sent by the system; both wait for a client that does not take them."""
    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as http:
        client = Client(http, "local")
        run_id = await client.run()
        await client.save(run_id, 1, "large", "save_weights_for_sampler")
        await client.save(run_id, 2, "large", "save_weights_external")
        place = f"training_runs/{run_id}/checkpoints"
        archive = (await client.get(f"{place}/sampler_weights/large/archive")).headers["location"]
        urls = await client.fetch(f"{place}/external_weights/large/external_weights_urls")
    for file in (folder / "data").rglob("adapter_model.safetensors"):
        os.truncate(file, LARGE)
    memory = psutil.Process(server.process.pid).memory_info
    before = most = memory().rss
    waiting = {}
    for url in (archive, urls["urls"]["adapter_model.safetensors"]):
        connection = server.connect(receive_bytes=4096)
        connection.sendall(
            b"GET " + url.removeprefix(server.url).encode() + b" HTTP/1.1\r\n" + b"Host: localhost\r\n\r\n"
        )
        assert statuses(connection.recv(200)) == [200]
        waiting[connection.getsockname()[1]] = connection

    def all_cut_off() -> bool:
        nonlocal most
        most = max(most, memory().rss)
        return not any(is_connected(server, port) for port in waiting)

    eventually(all_cut_off, "cut off")
    eventually(lambda: in_flight(server) == 1, "released: only the one who asks is left")
    for connection in waiting.values():
        connection.close()
    assert most - before < LARGE / 8
    assert is_well(server)


async def test_logs_and_metrics_hold_nothing_of_users_and_nothing_goes_elsewhere(server, folder):
    key = "tml-" + CANARY.replace("-", "") * 4
    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as http:
        await work(Client(http, "local", headers={"x-api-key": key}))
        metrics = (await http.get("/metrics")).text
    server.process.terminate()
    assert server.process.wait(60) == 0
    written = {"log": server.stderr(), "metrics": metrics, "output": server.output + server.process.stdout.read()}
    assert "forward_backward" in written["log"], "there is a log to look at"
    for place, text in written.items():
        for private in (CANARY, key, *(separator.join(map(str, SECRET_TOKENS)) for separator in (", ", ",", " "))):
            assert private not in text, (place, private)
    check_outbound([json.loads(line) for line in (folder / "outbound").read_text().splitlines()])


def in_flight(server: Process) -> int:
    found = re.search(r"requests_in_flight (\d+)", httpx2.get(f"{server.url}/metrics", timeout=30).text)
    assert found
    return int(found[1])


def check_outbound(asked: list[list]) -> None:
    """Only the engine was started, and its C compiler, by lists of arguments; only this machine was spoken to."""
    programs = [what[0] for event, *what in asked if not event.startswith("socket.")]
    assert all(isinstance(words, list) for words in programs), programs
    engine, *others = programs
    assert {"lorimer.engine", "lorimer.engine.forker"} & set(engine)
    assert all(words[1:] == ["--version"] or str(library.FOLDER / "decode.c") in words for words in others), others
    for event, *what in asked:
        if event in ("socket.connect", "socket.sendto"):
            family, address = what
            assert family == socket.AF_UNIX or address[0] in LOOPBACK, what
        elif event.startswith("socket."):
            assert what[0] in LOOPBACK, what
