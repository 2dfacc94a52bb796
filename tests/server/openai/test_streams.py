"""Streams between the server and its readers: those who leave, those who are slow, an engine that dies."""

import json
import os
import re
import signal
import time

import httpx2
import pytest

from lorimer.client.embedded import EVENTS, InProcessTransport
from lorimer.server.app import create_app
from lorimer.server.settings import Settings
from tests.server.openai.conftest import TINY

PATIENCE = 20.0
LONG = {"model": TINY, "prompt": "The", "max_tokens": 900, "stream": True, "n": 32, "temperature": 100, "logprobs": 0}
"""More than can be drawn while a test looks on, and so hot that hardly any of them ends early."""


@pytest.fixture
def http(server):
    headers = {"authorization": f"Bearer {server.keys['ada']}"}
    with httpx2.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield client


def measured(http, name: str) -> float:
    text = http.get("/metrics").text
    (found,) = re.findall(rf'^lorimer_engine_{name}{{model="{TINY}"}} (\S+)$', text, re.MULTILINE)
    return float(found)


def wait_until(is_true) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def events(response):
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def test_a_reader_who_leaves_ends_the_sample(http):
    before = measured(http, "tokens_sampled")
    with http.stream("POST", "/v1/completions", json=LONG) as response:
        received = events(response)
        first = [json.loads(next(received)) for _ in range(3)]
        assert measured(http, "running_samples") == 1
    wait_until(lambda: measured(http, "running_samples") == 0)
    assert all(not chunk["choices"][0]["finish_reason"] for chunk in first)
    assert measured(http, "tokens_sampled") == before, "only samples that finish are counted here"


def test_a_client_that_gives_up_waiting_ends_the_sample(http):
    before = measured(http, "tokens_sampled")
    with pytest.raises(httpx2.ReadTimeout):
        http.post("/v1/completions", json={**LONG, "stream": False}, timeout=0.5)
    wait_until(lambda: measured(http, "running_samples") == 0)
    assert measured(http, "tokens_sampled") == before


def test_a_slow_reader_gets_everything_in_fewer_events(http):
    fields = {"model": TINY, "prompt": "The", "max_tokens": 200, "temperature": 0, "logprobs": 0}
    whole = http.post("/v1/completions", json=fields).json()["choices"][0]
    received = []
    with http.stream("POST", "/v1/completions", json={**fields, "stream": True}) as response:
        for number, event in enumerate(events(response)):
            if number == 1:
                time.sleep(1.0)
            received.append(event)
    assert received.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in received]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert tokens == whole["logprobs"]["tokens"]


def test_headers_are_those_of_a_stream(http):
    fields = {"model": TINY, "prompt": "The", "max_tokens": 2, "stream": True}
    response = http.post("/v1/completions", json=fields, headers={"accept-encoding": "gzip"})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in response.headers and "content-encoding" not in response.headers
    assert response.text.endswith("data: [DONE]\n\n")


async def test_a_stream_waits_for_its_engine_and_tells_when_that_dies(tmp_path, monkeypatch):
    monkeypatch.setattr("lorimer.server.openai.sse.FIRST_SECONDS", 0.05)
    monkeypatch.setattr("lorimer.server.openai.sse.KEEP_ALIVE_SECONDS", 0.05)
    app = create_app(Settings(models=("lorimer/debug",), data=tmp_path / "data", num_threads=1, dtype="float32"))
    body = {"model": "lorimer/debug", "prompt": "a", "max_tokens": 400, "n": 64, "stream": True, "logprobs": 0}
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=InProcessTransport(app), base_url="http://127.0.0.1", timeout=60) as http,
    ):
        slot = app.state.context.scheduler.owner.drivers["lorimer/debug#0"].slot
        await app.state.context.scheduler.model_info("lorimer/debug")
        os.kill(slot.pid, signal.SIGSTOP)
        async with http.stream("POST", "/v1/completions", json=body, headers={"accept": EVENTS}) as response:
            lines = [line async for line in read_on(response, slot.pid)]
    assert response.status_code == 200
    assert lines[0] == ": waiting"
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert told[0]["choices"][0]["logprobs"]["tokens"] and "data: [DONE]" not in lines
    assert told[-1]["error"]["type"] == "server_error" and "engine ended" in told[-1]["error"]["message"]


async def read_on(response, pid):
    """Lines of a stream whose engine stands still until two have come, and is killed with the first token."""
    num_lines, is_killed = 0, False
    async for line in response.aiter_lines():
        num_lines += 1
        if num_lines == 2:
            os.kill(pid, signal.SIGCONT)
        if line.startswith("data: ") and not is_killed:
            is_killed = True
            os.kill(pid, signal.SIGKILL)
        yield line
