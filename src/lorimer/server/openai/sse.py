"""Server-sent events: an answer that is sent while it is made, and ended when its reader leaves.

The status is still open until the first event is there, or has been waited for a while: what is refused immediately is
answered with its own status, what fails later with an event. While nothing comes, a comment keeps the connection.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lorimer.errors import LorimerError
from lorimer.server.errors import answer_error
from lorimer.server.openai.disconnects import Reader, shutting_down

FIRST_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 10.0
COMMENT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"

Event = tuple[str, Mapping[str, Any]]
"""A name, which may be empty, and what it says."""
Next = asyncio.Future[Event | None]
ShowError = Callable[[int, str, str], Event]
"""Makes an event of a status, a code and a sentence."""


def encode(event: Event) -> bytes:
    name, data = event
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + orjson.dumps(data) + b"\n\n"


async def stream(reader: Reader, events: AsyncIterator[Event], show_error: ShowError, end: bytes = b"") -> Response:
    """An answer of these events; raises what goes wrong before the first of them."""
    first: Next = asyncio.ensure_future(_next(events))
    try:
        await reader.wait(_settled(first))
        if first.done() and first.exception() is not None:
            first.result()
    except BaseException:
        await _give_up(first, events)
        raise
    reader.keep()
    return EventStream(reader, events, first, show_error, end)


async def _next(events: AsyncIterator[Event]) -> Event | None:
    """None at the end."""
    return await anext(events, None)


async def _settled(first: Next) -> None:
    await asyncio.wait({first}, timeout=FIRST_SECONDS)


async def _give_up(waiting: Next, events: AsyncIterator[Event]) -> None:
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    if (close := getattr(events, "aclose", None)) is not None:
        await close()


class EventStream(Response):
    def __init__(
        self,
        reader: Reader,
        events: AsyncIterator[Event],
        first: Next,
        show_error: ShowError,
        end: bytes,
    ) -> None:
        # Proxies that gather answers before they pass them on are asked not to.
        super().__init__(media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._reader, self._events, self._waiting = reader, events, first
        self._show_error, self._end = show_error, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        reader = self._reader
        reader.held.add(sending)
        try:
            await asyncio.wait({sending, reader.gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.cancelled():
                await self._send_last(send, await self._error_event(shutting_down()))
            elif sending.done():
                sending.result()
        finally:
            reader.held.discard(sending)
            reader.close()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await _give_up(self._waiting, self._events)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            while True:
                done, _ = await asyncio.wait({self._waiting}, timeout=KEEP_ALIVE_SECONDS)
                if not done:
                    await _send_part(send, COMMENT)
                    continue
                if (event := self._waiting.result()) is None:
                    break
                self._waiting = asyncio.ensure_future(_next(self._events))
                await _send_part(send, encode(event))
        except LorimerError as error:
            await self._send_last(send, await self._error_event(error))
            return
        await self._send_last(send, self._end)

    async def _error_event(self, error: LorimerError) -> bytes:
        answer = await answer_error(self._reader.request, error)  # which logs what is worth it
        said = orjson.loads(bytes(answer.body))
        return encode(self._show_error(answer.status_code, said["code"], said["detail"]))

    @staticmethod
    async def _send_last(send: Send, data: bytes) -> None:
        with contextlib.suppress(OSError):
            await send({"type": "http.response.body", "body": data, "more_body": False})


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
