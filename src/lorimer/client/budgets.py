"""Limits on bytes under way: who comes first is served first, and one that is too large for the limit goes alone."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteBudget:
    def __init__(self, size: int) -> None:
        self._size = size
        self._used = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @asynccontextmanager
    async def take(self, num_bytes: int) -> AsyncIterator[None]:
        if self._waiting or not self._has_room(num_bytes):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((turn, num_bytes))
            try:
                await turn  # whoever grants it has counted the bytes
            except BaseException:
                self._give_back(num_bytes if turn.done() and not turn.cancelled() else 0)
                raise
        else:
            self._used += num_bytes
        try:
            yield
        finally:
            self._give_back(num_bytes)

    def _has_room(self, num_bytes: int) -> bool:
        return self._used == 0 or self._used + num_bytes <= self._size

    def _give_back(self, num_bytes: int) -> None:
        self._used -= num_bytes
        while self._waiting:
            turn, wanted = self._waiting[0]
            if not turn.done():
                if not self._has_room(wanted):
                    return
                self._used += wanted
                turn.set_result(None)
            self._waiting.popleft()
