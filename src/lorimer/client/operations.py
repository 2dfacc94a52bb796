"""The numbered operations of one run: numbered in the order of the calls, sent in that order, their results awaited.

A number is taken when a call is made, whichever thread makes it, and never given up: what has been numbered is sent
even if nobody waits for it, because a server holds a run back at a number that does not come.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel

from lorimer.client.connection import Connection
from lorimer.client.futures import AwaitableConcurrentFuture
from lorimer.client.polling import ResultKind, wait_for_result
from lorimer.client.queue_notes import QueueNotes
from lorimer.client.transport import encode, parse
from lorimer.types import UntypedAPIFuture
from lorimer.types.compatibility import PROTOBUF
from lorimer.types.compression import compress_zstd

T = TypeVar("T")
R = TypeVar("R")

MOST_POLLS = 32
"""Held at once for one run: operations finish in their order, so that the first ones suffice."""
COMPRESS_BYTES = 16 * 1024


@dataclass(frozen=True)
class Submission:
    """A request, ready to be sent."""

    path: str
    content: bytes
    size: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)


def json_submission(path: str, body: BaseModel) -> Submission:
    content = encode(body)
    assert content is not None
    return Submission(path, content)


class Operations:
    def __init__(self, connection: Connection, subject: str) -> None:
        self._connection = connection
        self._notes = QueueNotes(subject)
        self._lock = threading.Lock()
        self._next_number = 1
        self._turn = asyncio.Lock()
        self._polls = asyncio.Semaphore(MOST_POLLS)

    def submit(
        self,
        encoders: Sequence[Callable[[int], Submission]],
        kind: ResultKind[T],
        finish: Callable[[list[T]], R],
    ) -> AwaitableConcurrentFuture[R]:
        """Number and send requests that belong together; ``finish`` makes one result of theirs.

        What cannot be encoded raises here, and takes no number.
        """
        with self._lock:
            submissions = [encoder(self._next_number + index) for index, encoder in enumerate(encoders)]
            future = self._connection.run(self._carry_out(submissions, kind, finish))
            self._next_number += len(submissions)
        return future

    def submit_one(self, encoder: Callable[[int], Submission], kind: ResultKind[T]) -> AwaitableConcurrentFuture[T]:
        return self.submit([encoder], kind, lambda results: results[0])

    async def _send_all(self, submissions: Sequence[Submission]) -> list[UntypedAPIFuture]:
        async with self._turn:
            if len(submissions) == 1 or not self._connection.config.parallel_fwdbwd_chunks:
                return [await self._send(submission) for submission in submissions]
            # The first comes last, so that the server begins when it has all of them.
            rest = await asyncio.gather(*map(self._send, submissions[1:]), return_exceptions=True)
            promises = [await self._send(submissions[0])]
        for promise in rest:
            if isinstance(promise, BaseException):
                raise promise
            promises.append(promise)
        return promises

    async def _send(self, submission: Submission) -> UntypedAPIFuture:
        connection, content, headers = self._connection, submission.content, submission.headers
        async with connection.training_budget.take(submission.size):
            compresses = connection.config.proto_compress_fwdbwd and not connection.is_local
            if compresses and headers.get("Content-Type") == PROTOBUF and len(content) >= COMPRESS_BYTES:
                content = await asyncio.to_thread(compress_zstd, content)
                headers = {**headers, "Content-Encoding": "zstd"}
            answer = await connection.transport.call("POST", submission.path, content, headers=headers)
        return parse(UntypedAPIFuture, answer)

    async def _carry_out(
        self, submissions: Sequence[Submission], kind: ResultKind[T], finish: Callable[[list[T]], R]
    ) -> R:
        # A task of its own, begun before anything can be cancelled: who gives the result up does not stop the sending.
        sending = asyncio.get_running_loop().create_task(self._send_all(submissions))
        promises = await asyncio.shield(sending)
        return finish(list(await asyncio.gather(*(self._wait(promise.request_id, kind) for promise in promises))))

    async def _wait(self, request_id: str, kind: ResultKind[T]) -> T:
        async with self._polls:
            return await wait_for_result(self._connection, request_id, kind, self._notes)
