"""Requests to the application in this process, with answers that are read while they are made.

Whole answers go the way httpx2 has for them; it waits for the end, which is no way for a stream of events.
"""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import httpx2

EVENTS = "text/event-stream"


class InProcessTransport(httpx2.ASGITransport):
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.headers.get("accept") != EVENTS:
            return await super().handle_async_request(request)
        body = await request.aread()
        stream = _Stream(self, request, body)
        status, headers = await stream.begin()
        return httpx2.Response(status, headers=headers, stream=stream)


class _Stream(httpx2.AsyncByteStream):
    """One answer; the application runs beside its reader, and is ended when that leaves."""

    def __init__(self, transport: InProcessTransport, request: httpx2.Request, body: bytes) -> None:
        self._transport, self._request, self._body = transport, request, body
        self._messages: asyncio.Queue[MutableMapping[str, Any] | None] = asyncio.Queue()
        self._is_sent = False
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        self._task = asyncio.create_task(self._run())
        try:
            start = await self._messages.get()
        except BaseException:
            await self.aclose()
            raise
        if start is None:
            raise httpx2.ReadError("the service in this process gave no answer", request=self._request)
        return start["status"], list(start.get("headers", []))

    async def _run(self) -> None:
        url = self._request.url
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self._request.method,
            "headers": [(name.lower(), value) for name, value in self._request.headers.raw],
            "scheme": url.scheme,
            "path": url.path,
            "raw_path": url.raw_path.split(b"?")[0],
            "query_string": url.query,
            "server": (url.host, url.port),
            "client": self._transport.client,
            "root_path": self._transport.root_path,
        }
        try:
            await self._transport.app(scope, self._receive, self._send)
        finally:
            self._messages.put_nowait(None)

    async def _receive(self) -> dict[str, Any]:
        if self._is_sent:
            await asyncio.Event().wait()  # the reader's leaving cancels the task
        self._is_sent = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self._messages.put_nowait(message)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._messages.get()) is not None:
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body"):
                return

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
