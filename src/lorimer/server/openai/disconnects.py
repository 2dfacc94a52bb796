"""Whoever waits for an answer: work for them ends when they leave or the server ends.

One watch serves a whole request: the HTTP server tells of a reader's leaving once, to the first who asked.
"""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from lorimer.server.context import context_of
from lorimer.server.errors import Refusal

Result = TypeVar("Result")


class Reader:
    """Made when the body has been read; closed with the answer, by ``EventStream`` if there is one."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.held = context_of(request).held
        """What ends when the server does."""
        self.gone = asyncio.ensure_future(_disconnected(request))
        self._is_kept = False

    def keep(self) -> None:
        """Somebody else closes it."""
        self._is_kept = True

    def close(self) -> None:
        self.gone.cancel()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_kept:
            self.close()

    async def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of ``work``, which is cancelled when nobody waits for it any more."""
        task = asyncio.ensure_future(work)
        self.held.add(task)
        try:
            await asyncio.wait({task, self.gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.cancelled():
                raise shutting_down()
            if not task.done():
                raise ClientDisconnect
            return task.result()
        finally:
            self.held.discard(task)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def shutting_down() -> Refusal:
    return Refusal(503, "shutting_down", "the server is shutting down; ask again once it is back")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
