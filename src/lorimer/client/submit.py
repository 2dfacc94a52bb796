"""Submits the operations of one run: checks and splits their data, numbers them in the order of the calls, sends them
in that order, awaits and merges their results.

A number is taken when a call is made, on whichever thread, and never returned: a numbered request is sent even if
nobody waits for its result, because the server holds a run until the next number arrives.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel

from lorimer.client.connection import Connection
from lorimer.client.errors import RefusedData
from lorimer.client.futures import AwaitableConcurrentFuture
from lorimer.client.polling import QueueNotes, ResultKind, wait_for_result
from lorimer.client.transport import encode, parse
from lorimer.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
    TensorData,
    UntypedAPIFuture,
)
from lorimer.types.compatibility import PROTOBUF
from lorimer.types.compression import compress_zstd
from lorimer.types.metrics import reduce_metric

T = TypeVar("T")
R = TypeVar("R")

MAX_POLLS = 32
"""Concurrent polls of one run: operations finish in order, so polling for the first ones suffices."""
COMPRESS_BYTES = 16 * 1024
TOKEN_BYTES = 4
PER_TOKEN = ("weights", "advantages", "logprobs", "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask")


def check_data(data: Sequence[Datum]) -> None:
    if isinstance(data, Datum):
        raise TypeError("data is one Datum; a list of them is accepted: [datum]")
    if not data:
        raise RefusedData("data is empty; at least one Datum is accepted")
    for index, datum in enumerate(data):
        if not isinstance(datum, Datum):
            kind = f"{type(datum).__module__}.{type(datum).__qualname__}"
            raise TypeError(f"data[{index}] is a {kind}; lorimer.types.Datum is accepted")
        _check_datum(datum, f"data[{index}]")


def _check_datum(datum: Datum, where: str) -> None:
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        return
    if targets.dtype != "int64":
        raise RefusedData(f"{where}: target_tokens are {targets.dtype}; token ids are integers")
    length = _length(datum.model_input)
    found = _rows(targets)
    if length is not None and found != length:
        raise RefusedData(
            f"{where} has {found} target_tokens for {length} input tokens; each input token takes the token that "
            "follows it as its target: model_input is tokens[:-1] and target_tokens is tokens[1:]"
        )
    for name in PER_TOKEN:
        tensor = datum.loss_fn_inputs.get(name)
        if tensor is not None and _rows(tensor) != found:
            raise RefusedData(f"{where} has {_rows(tensor)} {name} for {found} target_tokens; one for each is accepted")


def _rows(tensor: TensorData) -> int:
    shape = tensor.dense_shape
    return shape[0] if shape else 1


def _length(model_input: ModelInput) -> int | None:
    try:
        return model_input.length
    except ValueError:  # an image whose tokens only the server counts
        return None


# ── splitting ────────────────────────────────────────────────────────────────────────────────────


def estimate_bytes(datum: Datum) -> int:
    """Estimate the size of a datum on the wire."""
    inputs = sum(_chunk_bytes(chunk) for chunk in datum.model_input.chunks)
    return inputs + sum(_tensor_bytes(tensor) for tensor in datum.loss_fn_inputs.values())


def _chunk_bytes(chunk: ModelInputChunk) -> int:
    match chunk:
        case EncodedTextChunk():
            return TOKEN_BYTES * len(chunk.tokens)
        case ImageChunk():
            return len(chunk.data)
        case ImageAssetPointerChunk():
            return len(chunk.location)
        case DmelChunk():
            return len(chunk.dmel)
    raise TypeError(f"{type(chunk).__name__} is no chunk of a model input")


def _tensor_bytes(tensor: TensorData) -> int:
    return tensor.values.nbytes + sum(indices.nbytes for indices in tensor.csr or ())


def split_data(data: Sequence[Datum], max_datums: int, max_bytes: int) -> Iterator[tuple[list[Datum], int]]:
    """Split data in order into chunks within the limits and yield each with its size; an oversized datum goes alone."""
    chunk: list[Datum] = []
    size = 0
    for datum in data:
        added = estimate_bytes(datum)
        if chunk and (size + added > max_bytes or len(chunk) == max_datums):
            yield chunk, size
            chunk, size = [], 0
        chunk.append(datum)
        size += added
    if chunk:
        yield chunk, size


def merge_results(results: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Merge the results of all chunks, in order, into one."""
    return ForwardBackwardOutput(
        loss_fn_output_type=results[0].loss_fn_output_type,
        loss_fn_outputs=[output for result in results for output in result.loss_fn_outputs],
        metrics=merge_metrics(results),
    )


def merge_metrics(results: Sequence[ForwardBackwardOutput]) -> dict[str, float]:
    """Each metric of the first result that all have, reduced as the part of its name after the colon says."""
    weights = [len(result.loss_fn_outputs) for result in results]
    merged: dict[str, float] = {}
    for key in results[0].metrics:
        if key.count(":") != 1:
            raise ValueError(f"the metric {key!r} does not say after one colon how it is reduced")
        if not all(key in result.metrics for result in results):
            continue
        values = [result.metrics[key] for result in results]
        match key.partition(":")[2]:
            case "sum" | "min" | "max" | "mean" | "slack":
                merged[key] = reduce_metric(key, values, weights)
            case "hash2":
                merged[key] = sum(int(value) for value in values) % 2**64
            case "unique":
                merged[key] = values[0]
                merged |= {f"{key}_{index}": value for index, value in enumerate(values[1:], 1)}
    return merged


# ── sending ─────────────────────────────────────────────────────────────────────────────────────────


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
        self._polls = asyncio.Semaphore(MAX_POLLS)

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
