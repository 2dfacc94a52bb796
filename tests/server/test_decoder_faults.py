"""Decoders that die or hang, and servers that end or are killed while decoders are at work."""

import asyncio
import os
import signal
import time

import httpx2
import psutil
import pytest

from lorimer.server.errors import Refusal
from tests.server.decoding import PROTOBUF, TRAIN, job, training_body
from tests.server.processes import eventually


async def test_a_decoder_that_dies_or_hangs_fails_its_body_alone_and_is_replaced(pool):
    decoders = pool(decoder_seconds=20.0)
    body = training_body(10)
    await decoders.decode("ada", job(TRAIN, body), [body])
    (first,) = decoders.pids
    for number in (signal.SIGSTOP, signal.SIGKILL):
        os.kill(decoders.pids[0], signal.SIGSTOP)
        work = asyncio.ensure_future(decoders.decode("ada", job(TRAIN, body), [body]))
        await asyncio.sleep(0.1)
        other = await decoders.decode("bob", job(TRAIN, body), [body])
        assert other[1] == body
        if number == signal.SIGKILL:
            os.kill(first, signal.SIGKILL)
        with pytest.raises(Refusal) as raised:
            await work
        assert (raised.value.status, raised.value.code) == (503, "decoder_failed")
        assert not psutil.pid_exists(first) or psutil.Process(first).status() == psutil.STATUS_ZOMBIE
        assert (await decoders.decode("ada", job(TRAIN, body), [body]))[1] == body
        first = decoders.pids[0]
    assert decoders.memory.total == 0


# ── the end ───────────────────────────────────────────────────────────────────────────────────────────


def decoder_of(server) -> psutil.Process:
    return next(one for one in server.engines() if "lorimer.server.decoder" in one.cmdline())


async def begin_decoding(server) -> "tuple[psutil.Process, asyncio.Task[object]]":
    """A decoder that is at a body for as long as anybody waits."""
    body = training_body(1000)
    headers = {"content-type": PROTOBUF}
    url = f"{server.url}/api/v1/forward_backward"
    assert httpx2.post(url, content=body, headers=headers, timeout=60).status_code == 404
    decoder = decoder_of(server)
    decoder.suspend()
    client = httpx2.AsyncClient(timeout=120)
    return decoder, asyncio.ensure_future(client.post(url, content=body, headers=headers))


async def test_shutdown_does_not_wait_for_a_decoder(launch):
    server = launch("--lazy", "--set", "shutdown_seconds=5").wait_until_listening()
    decoder, held = await begin_decoding(server)
    await asyncio.sleep(1)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    answer = await asyncio.gather(held, return_exceptions=True)
    assert await asyncio.to_thread(server.process.wait, 60) == 0, server.stderr()
    assert time.monotonic() - began < 40
    assert isinstance(answer[0], Exception) or answer[0].status_code == 503
    decoder.wait(30)


async def test_a_killed_server_takes_its_decoders_along(launch):
    server = launch("--lazy").wait_until_listening()
    body = training_body(1000)
    url = f"{server.url}/api/v1/forward_backward"
    assert httpx2.post(url, content=body, headers={"content-type": PROTOBUF}, timeout=60).status_code == 404
    decoder = decoder_of(server)
    server.process.kill()
    server.process.wait()
    eventually(lambda: not decoder.is_running() or decoder.status() == psutil.STATUS_ZOMBIE, "gone")
