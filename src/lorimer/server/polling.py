"""Hold a request until its result is ready; stop waiting when the client disconnects or the server shuts down."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from lorimer.server.context import context_of
from lorimer.server.errors import Refusal

Result = TypeVar("Result")

WATCH_AFTER_SECONDS = 0.05
"""When a poll begins to watch for a disconnect, which a quick result does not need."""


async def hold(request: Request, waiting: Coroutine[Any, Any, Result]) -> Result:
    """Wait for ``waiting`` and return its result. Cancel it when the client disconnects or the server shuts down.

    The body must have been read. Raises ``ClientDisconnect`` when the client has disconnected, and a 503 ``Refusal``
    when the server shuts down first.
    """
    held = context_of(request).held
    task = asyncio.ensure_future(waiting)
    gone: asyncio.Future[None] | None = None
    held.add(task)
    try:
        await asyncio.wait({task}, timeout=WATCH_AFTER_SECONDS)
        if not task.done():
            gone = asyncio.ensure_future(_disconnected(request))
            # Retrieve the exception, so that asyncio does not log it.
            gone.add_done_callback(lambda gone: gone.cancelled() or gone.exception())
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.cancelled():
            raise Refusal(503, "shutting_down", "the server is shutting down; ask again once it is back")
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        held.discard(task)
        if gone is not None:
            gone.cancel()  # cancelled in the background while the response is sent
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
