"""The one event loop of the SDK, on a daemon thread: everything is sent and received there, whoever calls from where.

A fork copies the memory but not the thread, so a child process gets a loop of its own; clients of the parent refuse to
work in it, for they would use numbers and connections that the parent uses too.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="lorimer-client", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def run(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine; those of one thread are started in the order of the calls."""
        if os.getpid() != self.pid:
            coroutine.close()
            raise RuntimeError(
                "this client was made before the process forked, and cannot be used in the child: make a new "
                "ServiceClient there, or hand it a SamplingClient by pickle or get_sampler_handle()"
            )
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)


_lock = threading.Lock()
_current: LoopThread | None = None


def loop_thread() -> LoopThread:
    """The loop of this process."""
    global _current
    with _lock:
        if _current is None or _current.pid != os.getpid():
            _current = LoopThread()
        return _current


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
