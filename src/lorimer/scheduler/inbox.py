"""Queues events for one core, from the event loop and from other threads, until its driver takes them."""

import asyncio
import contextlib
from collections import deque


class Inbox:
    """A queue of events. Any number of events wakes the loop only once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[object] = deque()
        self._arrived = asyncio.Event()
        self._is_waking = False
        """A thread has scheduled a wakeup of the loop."""

    @property
    def is_empty(self) -> bool:
        return not self._events

    def post(self, event: object) -> None:
        """Add an event, on the event loop."""
        self._events.append(event)
        self._arrived.set()

    def post_threadsafe(self, event: object) -> None:
        """Add an event from any thread."""
        self._events.append(event)
        if not self._is_waking:
            self._is_waking = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._arrived.set)

    async def take(self) -> list[object]:
        """Wait for events and return all that have arrived, in order."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        self._is_waking = False  # reset before taking events, so that one that arrives meanwhile wakes the loop again
        taken: list[object] = []
        while self._events:
            taken.append(self._events.popleft())
        return taken
