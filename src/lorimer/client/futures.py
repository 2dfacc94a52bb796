"""Results that are on their way: asked for with ``result()``, awaited, or passed on."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Generator
from concurrent.futures import Future
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
        waiting = asyncio.shield(asyncio.wrap_future(self._future))
        if timeout is None:
            return await waiting
        return await asyncio.wait_for(waiting, timeout)

    def future(self) -> "Future[T]":
        return self._future


def warn_if_in_loop(method: str) -> None:
    """Say so when a call that blocks is made where it stops everything else."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    log.warning("%s() blocks the running event loop; await %s_async() there instead", method, method)
