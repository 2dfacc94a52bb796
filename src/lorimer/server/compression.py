"""Compression middleware: compresses large responses for clients that accept it.

Small and streamed ones stay as they are.
"""

import asyncio
import gzip

import zstandard
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_OFF_LOOP_BYTES = 256 * 1024
"""Larger responses are compressed in a thread."""
COMPRESSIBLE = ("application/json", "application/x-protobuf", "text/")


class Compression:
    """Compress whole bodies of at least ``min_bytes``, with zstd if the client accepts it, else gzip."""

    def __init__(self, app: ASGIApp, min_bytes: int) -> None:
        self._app = app
        self._min_bytes = min_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        encoding = accepted_encoding(Headers(scope=scope).get("accept-encoding", "")) if scope["type"] == "http" else ""
        if not encoding:
            await self._app(scope, receive, send)
            return
        begun: Message | None = None

        async def send_compressed(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = message
                return
            if begun is not None:
                if message["type"] == "http.response.body" and self._is_worth_it(begun, message):
                    message = await compress(begun, message, encoding)
                start, begun = begun, None
                await send(start)
            await send(message)

        await self._app(scope, receive, send_compressed)

    def _is_worth_it(self, start: Message, message: Message) -> bool:
        headers = Headers(raw=start["headers"])
        return (
            not message.get("more_body")
            and len(message.get("body", b"")) >= self._min_bytes
            and "content-encoding" not in headers
            and headers.get("content-type", "").startswith(COMPRESSIBLE)
        )


async def compress(start: Message, message: Message, encoding: str) -> Message:
    """Compress the body and update the headers of ``start`` to match."""
    body = message["body"]
    work = zstd if encoding == "zstd" else gzipped
    packed = await asyncio.to_thread(work, body) if len(body) > _OFF_LOOP_BYTES else work(body)
    headers = MutableHeaders(raw=start["headers"])
    headers["content-encoding"] = encoding
    headers["content-length"] = str(len(packed))
    headers.add_vary_header("accept-encoding")
    start["headers"] = headers.raw
    return {**message, "body": packed}


def zstd(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(body)


def gzipped(body: bytes) -> bytes:
    return gzip.compress(body, compresslevel=1)


def accepted_encoding(header: str) -> str:
    """Choose ``zstd``, ``gzip`` or nothing by an ``Accept-Encoding`` header; ``q=0`` excludes an encoding."""
    accepted = set()
    for part in header.lower().split(","):
        name, _, quality = part.partition(";")
        if quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000"):
            accepted.add(name.strip())
    return "zstd" if "zstd" in accepted else "gzip" if "gzip" in accepted else ""
