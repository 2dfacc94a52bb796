"""A held request ends with its result, with its client, or with the server."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect, Request

from lorimer.server.errors import Refusal
from lorimer.server.polling import hold


def request_of(running, receive):
    return Request({"type": "http", "app": running.app, "headers": [], "state": {}}, receive)


async def stays():
    await asyncio.Event().wait()


async def leaves():
    return {"type": "http.disconnect"}


async def test_result_and_error_are_handed_on(start):
    async def fails():
        raise ValueError("no")

    async with start() as running:
        assert await hold(request_of(running, stays), asyncio.sleep(0, "result")) == "result"
        with pytest.raises(ValueError, match="no"):
            await hold(request_of(running, stays), fails())
        assert running.context.held == set()


async def test_client_that_leaves_ends_the_wait(start):
    ended = asyncio.Event()

    async def wait():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with start() as running:
        with pytest.raises(ClientDisconnect):
            await hold(request_of(running, leaves), wait())
        assert ended.is_set()
        assert running.context.held == set()


async def test_end_of_the_server_releases_everybody(start):
    async with start() as running:
        waiting = [asyncio.create_task(hold(request_of(running, stays), stays())) for _ in range(100)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(running.context.held) == 100
        running.context.release()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert {(type(outcome), outcome.status) for outcome in outcomes} == {(Refusal, 503)}
