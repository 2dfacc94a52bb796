"""The one event loop of the SDK, on a daemon thread: everything is sent and received there, whoever calls from where.

A fork copies the memory but not the thread, so a child process gets a loop of its own; clients of the parent refuse to
work in it, for they would use numbers and connections that the parent uses too.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from lorimer.client.futures import ResultFuture

T = TypeVar("T")


class LoopThread:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._answered: set[str] = set()
        self._thread = threading.Thread(target=self.loop.run_forever, name="lorimer-client", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def note_answer(self, address: str) -> None:
        """Remember that the server at an address has answered a client of this process."""
        self._answered.add(address)

    def has_answered(self, address: str) -> bool:
        return address in self._answered

    def run(self, coroutine: Coroutine[Any, Any, T]) -> ResultFuture[T]:
        """Start a coroutine; those of one thread are started in the order of the calls."""
        if os.getpid() != self.pid:
            coroutine.close()
            raise RuntimeError(
                "this client was made before the process forked, and cannot be used in the child: make a new "
                "ServiceClient there, or hand it a SamplingClient by pickle or get_sampler_handle()"
            )
        future: ResultFuture[T] = ResultFuture()
        self.loop.call_soon_threadsafe(self._start, coroutine, future)
        return future

    def _start(self, coroutine: Coroutine[Any, Any, T], future: ResultFuture[T]) -> None:
        task = self.loop.create_task(coroutine)
        task.add_done_callback(partial(_hand_over, future))

        def give_up(future: ResultFuture[T]) -> None:
            if future.cancelled():
                self.loop.call_soon_threadsafe(task.cancel)

        future.add_done_callback(give_up)  # type: ignore[arg-type]


def _hand_over(future: ResultFuture[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        future.cancel()
    if not future.set_running_or_notify_cancel():
        return  # nobody wants it any more
    if (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


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
