"""Carries what is not journaled between API replicas and owners over TCP: direct samples, cancellations, evictions.

A frame is four bytes of length and a message. The first one has the token, which every process of an installation
derives from its secret. Without a connection cancellations are not carried, and direct samples fail so that their
caller may try again; nothing that was acknowledged is lost.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import socket
from collections.abc import Mapping
from typing import Literal

import msgspec
from pydantic import ValidationError

from lorimer import types
from lorimer.engine import messages
from lorimer.errors import Busy, Cancelled, EngineError, InvalidInput, LorimerError
from lorimer.scheduler import events
from lorimer.scheduler.driver import Driver
from lorimer.scheduler.samples import Sample
from lorimer.scheduler.streaming import DirectSample
from lorimer.scheduler.translate import sequence_ids
from lorimer.types.encoding import decode_sample_response, encode_sample_response

log = logging.getLogger("lorimer.scheduler")

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 256 << 20
CONNECT_SECONDS = 5.0
Category = Literal["user", "server", "cancelled", "busy"]
ERRORS: dict[Category, type[LorimerError]] = {
    "user": InvalidInput,
    "cancelled": Cancelled,
    "busy": Busy,
    "server": EngineError,
}


class Frame(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


class Hello(Frame):
    token: str


class Start(Frame):
    """Begin a direct sample. `Progress` follows if it streams, then `Finished` or `Failed`."""

    request_id: str
    place: str
    user_id: str
    weights_id: str | None
    request: bytes
    grammar: str
    stream: bool


class Cancel(Frame):
    """Cancel a sample, direct or journaled."""

    place: str
    request_id: str


class Unload(Frame):
    """Evict an idle run."""

    place: str
    model_id: str


class Progress(Frame):
    request_id: str
    progress: bytes


class Finished(Frame):
    request_id: str
    response: bytes


class Failed(Frame):
    request_id: str
    category: Category
    error: str


_requests = msgspec.msgpack.Decoder(Hello | Start | Cancel | Unload)
_replies = msgspec.msgpack.Decoder(Progress | Finished | Failed)
_encoder = msgspec.msgpack.Encoder()


def door_token(secret: bytes) -> str:
    return hmac.new(secret, b"lorimer door", hashlib.sha256).hexdigest()


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next frame, or None if the other end is gone."""
    try:
        size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
        return await reader.readexactly(size) if size <= MAX_FRAME_BYTES else None
    except (asyncio.IncompleteReadError, OSError):
        return None


def _write(writer: asyncio.StreamWriter, frame: Frame) -> None:
    data = _encoder.encode(frame)
    writer.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Notice a machine that is gone within seconds."""
    found = writer.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


# ── the owner's side ──────────────────────────────────────────────────────────────────────────────────


class Door:
    """Listens for API replicas and passes what they ask to the drivers, given by replica."""

    def __init__(self, drivers: Mapping[str, Driver], token: str) -> None:
        self._drivers, self._token = drivers, token
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> str:
        """Listen, and return the address."""
        self._server = await asyncio.start_server(self._serve, host, port)
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        streams: dict[str, DirectSample] = {}
        try:
            _keep_alive(writer)
            if await self._is_known(reader):
                await self._answer(reader, writer, streams)
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("a connection of an API replica ended: %s", error)
        finally:
            self._tasks.discard(task)
            for stream in streams.values():
                stream.close()
            writer.close()

    async def _is_known(self, reader: asyncio.StreamReader) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_SECONDS):
                hello = await _read(reader)
                if hello is not None:
                    found = _requests.decode(hello)
                    return isinstance(found, Hello) and hmac.compare_digest(found.token, self._token)
        return False

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, streams: dict[str, DirectSample]
    ) -> None:
        while (data := await _read(reader)) is not None:
            match _requests.decode(data):
                case Start() as start:
                    self._start(start, writer, streams)
                case Cancel(place=place, request_id=request_id):
                    if request_id in streams:
                        streams[request_id].close()
                    elif (driver := self._drivers.get(place)) is not None:
                        driver.cancel(request_id)
                case Unload(place=place, model_id=model_id):
                    if (driver := self._drivers.get(place)) is not None:
                        driver.post(events.Unloaded(model_id))

    def _start(self, start: Start, writer: asyncio.StreamWriter, streams: dict[str, DirectSample]) -> None:
        try:
            driver = self._drivers.get(start.place)
            if driver is None:
                raise Busy(f"replica {start.place} has moved to another process; try again")
            request = types.SampleRequest.model_validate_json(start.request)
            stream = driver.start_sample(start.user_id, start.weights_id, request, start.grammar, start.stream)
        except (LorimerError, ValidationError) as error:
            _write(writer, _failed(start.request_id, error))
            return
        streams[start.request_id] = stream
        if start.stream:
            stream.on_progress = lambda progress: _write(writer, Progress(start.request_id, messages.encode(progress)))
        task = asyncio.create_task(self._forward(start, stream, writer, streams))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(
        self, start: Start, stream: DirectSample, writer: asyncio.StreamWriter, streams: dict[str, DirectSample]
    ) -> None:
        try:
            response = await stream.answer
            _write(writer, Finished(start.request_id, encode_sample_response(response)))
        except LorimerError as error:
            _write(writer, _failed(start.request_id, error))
        finally:
            streams.pop(start.request_id, None)


def _failed(request_id: str, error: Exception) -> Failed:
    category: Category = next((name for name, kind in ERRORS.items() if isinstance(error, kind)), "user")
    return Failed(request_id, category, str(error))


# ── the side of an API replica ────────────────────────────────────────────────────────────────────────


class DoorClient:
    """A connection to one owner, made when it is first used and again after it was lost."""

    def __init__(self, address: str, token: str) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port, self._token = host.strip("[]"), int(port), token
        self._streams: dict[str, DirectSample] = {}
        self._outgoing: asyncio.Queue[Frame] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start_sample(self, place: str, sample: Sample) -> DirectSample:
        """Begin a direct sample at a replica."""
        stream = DirectSample(sample, lambda request_id: self.cancel(place, request_id))
        self._streams[sample.request_id] = stream
        request = sample.request.model_dump_json().encode()
        self._send(
            Start(
                sample.request_id,
                place,
                sample.user_id,
                sample.weights_id,
                request,
                sample.grammar,
                sample.is_streaming,
            )
        )
        return stream

    def cancel(self, place: str, request_id: str) -> None:
        self._send(Cancel(place, request_id))

    def unload(self, place: str, model_id: str) -> None:
        self._send(Unload(place, model_id))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _send(self, frame: Frame) -> None:
        self._outgoing.put_nowait(frame)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(self._host, self._port)
            _keep_alive(writer)
            _write(writer, Hello(self._token))
            sending = asyncio.create_task(self._pump(writer))
            try:
                while (data := await _read(reader)) is not None:
                    self._receive(data)
            finally:
                sending.cancel()
        except (OSError, TimeoutError) as error:
            log.warning("the owner at %s:%d cannot be reached: %s", self._host, self._port, error)
        finally:
            if writer is not None:
                writer.close()
            self._outgoing = asyncio.Queue()
            streams, self._streams = self._streams, {}
            for stream in streams.values():
                stream.resolve(Busy("the process that computes this model cannot be reached; try again"))

    async def _pump(self, writer: asyncio.StreamWriter) -> None:
        while True:
            _write(writer, await self._outgoing.get())
            await writer.drain()

    def _receive(self, data: bytes) -> None:
        frame = _replies.decode(data)
        stream = self._streams.get(frame.request_id)
        if stream is None:
            return
        match frame:
            case Progress(progress=encoded):
                progress = messages.decode_reply(encoded)
                assert isinstance(progress, messages.SampleProgress)
                stream.progress(progress)
                return
            case Finished(response=response):
                ids = sequence_ids(frame.request_id, stream.request.num_samples)
                stream.resolve(decode_sample_response(response, ids))
            case Failed(category=category, error=error):
                stream.resolve(ERRORS[category](error))
        del self._streams[frame.request_id]
