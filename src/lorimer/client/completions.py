"""Which samples of a sampling client have finished: one poll for all of them, instead of one held for each."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lorimer.client.connection import Connection
from lorimer.client.errors import APIError, APIStatusError, BillingError
from lorimer.client.polling import LEAST_LOOP_SECONDS, POLL_SECONDS
from lorimer.client.retries import Backoff, is_transient
from lorimer.client.transport import BILLING_PAUSE_SECONDS
from lorimer.types import FutureFinished, FuturesRetrieveResponse

MOST_BAD_REQUESTS = 3
MOST_REMEMBERED = 10_000


class Completions:
    """Polls while anything is awaited. Ids the server lists before they are awaited are remembered."""

    def __init__(self, connection: Connection, sampling_session_id: str, clone_id: int) -> None:
        self._connection = connection
        self._target = {
            "type": "sampling_session",
            "sampling_session_id": sampling_session_id,
            "cloned_sampler_id": clone_id,
        }
        self._cursor = 0
        self._waiting: dict[str, asyncio.Future[int | None]] = {}
        self._early: dict[str, int | None] = {}
        self._retrieved: list[str] = []
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def expect(self, request_id: str) -> "AsyncIterator[asyncio.Future[int | None]]":
        """A future of the size of a result, if the server says it; what it resolves to may be a failure too."""
        waiting = asyncio.get_running_loop().create_future()
        if request_id in self._early:
            waiting.set_result(self._early.pop(request_id))
        else:
            self._waiting[request_id] = waiting
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._poll())
        try:
            yield waiting
        finally:
            self._waiting.pop(request_id, None)
            self._retrieved.append(request_id)
            if not self._waiting and self._task is not None:
                self._task.cancel()

    async def _poll(self) -> None:
        try:
            await self._poll_until_nothing_waits()
        except Exception as error:
            waiting, self._waiting = self._waiting, {}
            for future in waiting.values():
                if not future.done():
                    future.set_exception(error)

    async def _poll_until_nothing_waits(self) -> None:
        transport, backoff, num_bad = self._connection.transport, Backoff(first=0.1, most=5.0), 0
        while self._waiting:
            began, told = time.monotonic(), self._retrieved[:]
            body = {"target": self._target, "prev_cursor": self._cursor, "retrieved_request_ids": told}
            try:
                answer = await transport.ask(
                    FuturesRetrieveResponse,
                    "POST",
                    "/api/v1/retrieve_futures",
                    body,
                    timeout=POLL_SECONDS,
                    patience=0,
                )
            except APIError as error:
                num_bad += isinstance(error, APIStatusError) and error.status_code == 400
                is_bad = isinstance(error, APIStatusError) and error.status_code == 400 and num_bad <= MOST_BAD_REQUESTS
                if not (is_transient(error) or is_bad or isinstance(error, BillingError)):
                    raise
                transport.report(error)
                await asyncio.sleep(BILLING_PAUSE_SECONDS if isinstance(error, BillingError) else backoff.next())
                continue
            backoff.reset()
            del self._retrieved[: len(told)]
            self._cursor = answer.cursor
            for item in answer.completions:
                size = item.response_payload_uncompressed_size if isinstance(item, FutureFinished) else None
                self._resolve(item.request_id, size)
            await asyncio.sleep(max(0.0, began + LEAST_LOOP_SECONDS - time.monotonic()))

    def _resolve(self, request_id: str, size: int | None) -> None:
        if (future := self._waiting.pop(request_id, None)) is None:
            if len(self._early) >= MOST_REMEMBERED:
                with contextlib.suppress(StopIteration):
                    del self._early[next(iter(self._early))]
            self._early[request_id] = size
        elif not future.done():
            future.set_result(size)
