"""Deletes objects that no row names any more, on a thread of its own, one after the other.

Deletion waits while a backup holds the files of the data directory. What cannot be deleted is an orphan; the sweep of
`retention.py` deletes it later.
"""

import asyncio
import logging
import threading
from collections.abc import Iterable
from queue import SimpleQueue

from lorimer.errors import LorimerError
from lorimer.store.directory import DataDirectory
from lorimer.store.objects import Objects

log = logging.getLogger("lorimer.store")

_HELD_SECONDS = 0.5
_CLOSING_SECONDS = 5.0


class Remover:
    """A queue of names to delete. ``remove`` may be called from any thread; the thread starts with the first name."""

    def __init__(self, objects: Objects, directory: DataDirectory) -> None:
        self._objects, self._directory = objects, directory
        self._queue: SimpleQueue[str | None] = SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._queue.put(name)
        with self._guard:
            if self._thread is None and not self._queue.empty():
                self._thread = threading.Thread(target=self._work, name="lorimer-object-remover", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Delete what was enqueued, for a few seconds at most."""
        self._closing.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSING_SECONDS)

    def _work(self) -> None:
        while (name := self._queue.get()) is not None:
            while self._directory.is_held and not self._closing.wait(_HELD_SECONDS):
                pass
            if self._directory.is_held:
                return
            try:
                asyncio.run(self._objects.delete([name]))
            except LorimerError as error:
                log.warning("cannot delete an object; the next sweep deletes it: %s", error)
