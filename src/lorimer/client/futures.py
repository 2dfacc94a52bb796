"""Futures of results, and the event loop that resolves them.

The SDK has one event loop on a daemon thread of the process; every request is sent and received there. A fork copies
the memory but not the thread, so a child process gets a loop of its own. Clients of the parent refuse to work in the
child: they would use numbers and connections that the parent uses too.
"""

import asyncio
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Generator
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")

log = logging.getLogger("lorimer")


class APIFuture(ABC, Generic[T]):
    """A result of the server. The work goes on whether or not anybody waits; a result can be asked for many times."""

    @abstractmethod
    def result(self, timeout: float | None = None) -> T:
        """Wait; ``TimeoutError`` after ``timeout`` seconds, after which it can be asked for again."""

    @abstractmethod
    async def result_async(self, timeout: float | None = None) -> T:
        """As ``result``, for coroutines; ``await future`` is the same."""

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def __getattr__(self, name: str) -> NoReturn:
        raise _missing(self, name)


class ResultFuture(Future[T]):
    """A future of ``concurrent.futures`` that can be awaited too; whoever stops awaiting it gives the call up."""

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()

    def __getattr__(self, name: str) -> NoReturn:
        raise _missing(self, name)


def _missing(future: object, name: str) -> AttributeError:
    hint = "" if name.startswith("_") else "; the result has it perhaps: use .result(), or await the future"
    return AttributeError(f"{type(future).__name__} has no attribute {name!r}{hint}")


class AwaitableConcurrentFuture(APIFuture[T]):
    """A future of ``concurrent.futures`` that can be awaited in any event loop."""

    def __init__(self, future: "Future[T]") -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> T:
        return self._future.result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        # Shielded: whoever stops waiting does not take the result away from others.
        result = asyncio.wrap_future(self._future)
        result.add_done_callback(_retrieve_exception)  # asyncio reports it where nobody waits for it any more
        waiting = asyncio.shield(result)
        if timeout is None:
            return await waiting
        return await asyncio.wait_for(waiting, timeout)

    def future(self) -> "Future[T]":
        return self._future


def _retrieve_exception(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()


def warn_if_in_loop(method: str) -> None:
    """Say so when a call that blocks is made where it stops everything else."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    log.warning("%s() blocks the running event loop; await %s_async() there instead", method, method)


# ── the loop ────────────────────────────────────────────────────────────────────────────────────────


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
