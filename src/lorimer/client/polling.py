"""Waits for results of accepted requests: long polls, repeated through restarts of the server.

``wait_for_result`` polls for one request; ``Completions`` polls once for all samples of a sampling client, instead of
once for each; ``QueueNotes`` logs why work is waiting.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx2
import msgspec
from pydantic import BaseModel

from lorimer.client.connection import Connection
from lorimer.client.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    BillingError,
    RateLimitError,
    RequestFailedError,
    ResultLost,
)
from lorimer.client.retries import Backoff, is_transient, retry_after
from lorimer.client.transport import BILLING_PAUSE_SECONDS, decoded, parse, succeeded
from lorimer.errors import InvalidInput
from lorimer.types import FutureFinished, FuturesRetrieveResponse, RequestErrorCategory, TryAgainResponse
from lorimer.types.compatibility import PROTOBUF

log = logging.getLogger("lorimer")

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

POLL_SECONDS = 45.0
"""Of one poll, on our side; servers answer before."""
MAX_BAD_REQUESTS = 3
MIN_LOOP_SECONDS = 0.05
"""From one poll to the next, so that a server which answers immediately is not polled in a busy loop."""
MAX_REMEMBERED = 10_000
REPEAT_SECONDS = 60.0
DEFAULT_REASONS = {
    "paused_capacity": "the server has no room at the moment",
    "paused_rate_limit": "a limit of this account is reached",
}


class QueueNotes:
    """Logs why one thing, such as ``training of S:train:0``, is waiting, at most once a minute."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._said_at = -REPEAT_SECONDS

    def on_progress(self, answer: TryAgainResponse) -> None:
        if answer.queue_state == "active" or time.monotonic() - self._said_at < REPEAT_SECONDS:
            return
        self._said_at = time.monotonic()
        reason = answer.queue_state_reason or DEFAULT_REASONS.get(answer.queue_state, answer.queue_state)
        log.warning("%s is waiting: %s", self._subject, reason)


@dataclass(frozen=True)
class ResultKind(Generic[T]):
    """What is waited for: its name on the wire, the form it comes in, and how it is read."""

    request_type: str
    accept: str
    read: Callable[[httpx2.Response], T]


def json_result(request_type: str, model: type[M]) -> ResultKind[M]:
    return ResultKind(request_type, "application/json", lambda response: parse(model, response))


def protobuf_result(request_type: str, decode: Callable[[bytes], T]) -> ResultKind[T]:
    def read(response: httpx2.Response) -> T:
        if not response.headers.get("content-type", "").startswith(PROTOBUF):
            raise APIResponseValidationError(response, decoded(response), f"the result is not {PROTOBUF}")
        try:
            return decode(response.content)
        except InvalidInput as error:
            raise APIResponseValidationError(response, None, str(error)) from error

    return ResultKind(request_type, PROTOBUF, read)


async def wait_for_result(
    connection: Connection, request_id: str, kind: ResultKind[T], notes: QueueNotes, *, metadata_first: bool = True
) -> T:
    """Poll until there is a result and return it. Raises the error of the work, or ``ResultLost``."""
    poll = _Poll(connection, request_id, kind, notes)
    while True:
        response, size = await poll.next(metadata_first)
        if response is not None:
            return kind.read(response)
        if size is not None:
            async with connection.result_budget.take(size):
                response, _ = await poll.until_answered()
                return kind.read(response)


class _Poll(Generic[T]):
    def __init__(self, connection: Connection, request_id: str, kind: ResultKind[T], notes: QueueNotes) -> None:
        self._connection = connection
        self._request_id = request_id
        self._kind = kind
        self._notes = notes
        self._num_polls = 0
        self._num_bad = 0
        self._backoff = Backoff(first=0.1, longest=5.0)

    async def until_answered(self) -> tuple[httpx2.Response, None]:
        while True:
            response, _ = await self.next(metadata_first=False)
            if response is not None:
                return response, None

    async def next(self, metadata_first: bool) -> tuple[httpx2.Response | None, int | None]:
        """Poll once. Return the response with the result, or the size of the result, or neither if it is not ready."""
        transport, began = self._connection.transport, time.monotonic()
        try:
            response = await transport.send(
                "POST",
                "/api/v1/retrieve_future",
                content=msgspec.json.encode({"request_id": self._request_id, "allow_metadata_only": metadata_first}),
                headers={
                    "Content-Type": "application/json",
                    "Accept": self._kind.accept,
                    "X-Tinker-Request-Type": self._kind.request_type,
                    "X-Tinker-Request-Iteration": str(self._num_polls),
                },
                timeout=POLL_SECONDS,
            )
            self._num_polls += 1
            if response.status_code >= 400:
                await self._not_yet(response, began)
                return None, None
        except (APIConnectionError, RateLimitError) as error:
            transport.report(error)
            await asyncio.sleep(self._backoff.next())
            return None, None
        self._backoff.reset()
        return await self._read(response, began)

    async def _not_yet(self, response: httpx2.Response, began: float) -> None:
        """Wait as long as the status asks for; raise if a retry cannot help."""
        status, transport = response.status_code, self._connection.transport
        if status == 408:
            self._backoff.reset()
            await self._on_progress(response, began)
        elif status >= 500:
            await asyncio.sleep(retry_after(response.headers) or self._backoff.next())
        elif status == 400 and self._num_bad < MAX_BAD_REQUESTS:
            self._num_bad += 1
        elif status == 410:
            raise ResultLost(f"the server has no result for request {self._request_id}: {decoded(response)}")
        else:
            try:
                succeeded(response)
            except BillingError as error:
                transport.report(error)
                await asyncio.sleep(BILLING_PAUSE_SECONDS)

    async def _on_progress(self, response: httpx2.Response, began: float) -> None:
        self._notes.on_progress(parse(TryAgainResponse, response))
        await asyncio.sleep(max(0.0, began + MIN_LOOP_SECONDS - time.monotonic()))

    async def _read(self, response: httpx2.Response, began: float) -> tuple[httpx2.Response | None, int | None]:
        if response.headers.get("content-type", "").startswith(PROTOBUF):
            return response, None
        values: Any = decoded(response)
        if not isinstance(values, dict):
            raise APIResponseValidationError(response, values, "the answer to a poll is no object")
        if values.get("type") == "try_again":
            await self._on_progress(response, began)
            return None, None
        if values.get("status") == "complete_metadata":
            return None, int(values.get("response_payload_size", 0))
        if "error" in values:
            raise RequestFailedError(str(values["error"]), self._request_id, _category(values.get("category")))
        return response, None


def _category(value: object) -> RequestErrorCategory:
    try:
        return RequestErrorCategory(str(value))
    except ValueError:
        return RequestErrorCategory.Unknown


# ── all samples of a client ─────────────────────────────────────────────────────────────────────────


class Completions:
    """Polls for all samples of a client while any is awaited. Remembers ids that the server lists before that."""

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
        """Yield a future that resolves when the request has finished or failed, to the size of its result if known."""
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
        transport, backoff, num_bad = self._connection.transport, Backoff(first=0.1, longest=5.0), 0
        while self._waiting:
            began, retrieved = time.monotonic(), self._retrieved[:]
            body = {"target": self._target, "prev_cursor": self._cursor, "retrieved_request_ids": retrieved}
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
                is_bad = isinstance(error, APIStatusError) and error.status_code == 400 and num_bad <= MAX_BAD_REQUESTS
                if not (is_transient(error) or is_bad or isinstance(error, BillingError)):
                    raise
                transport.report(error)
                await asyncio.sleep(BILLING_PAUSE_SECONDS if isinstance(error, BillingError) else backoff.next())
                continue
            backoff.reset()
            del self._retrieved[: len(retrieved)]
            self._cursor = answer.cursor
            for item in answer.completions:
                size = item.response_payload_uncompressed_size if isinstance(item, FutureFinished) else None
                self._resolve(item.request_id, size)
            await asyncio.sleep(max(0.0, began + MIN_LOOP_SECONDS - time.monotonic()))

    def _resolve(self, request_id: str, size: int | None) -> None:
        if (future := self._waiting.pop(request_id, None)) is None:
            if len(self._early) >= MAX_REMEMBERED:
                with contextlib.suppress(StopIteration):
                    del self._early[next(iter(self._early))]
            self._early[request_id] = size
        elif not future.done():
            future.set_result(size)
