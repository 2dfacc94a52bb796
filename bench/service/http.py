"""A minimal HTTP/1.1 client with keep-alive connections, as many as are needed concurrently.

It is minimal so that the benchmark measures the server and not an HTTP library. It requires a Content-Length in
responses, which Lorimer always sends.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
MAX_OPENING = 200
"""Maximum number of connections being opened concurrently: fewer than the server's backlog."""


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class HttpError(RuntimeError):
    """An unexpected response."""


class HttpPool:
    def __init__(self, host: str, port: int, key: str = "") -> None:
        self._host, self._port = host, port
        self._key = f"x-api-key: {key}\r\n" if key else ""
        self._idle: deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = deque()
        self._opening = asyncio.Semaphore(MAX_OPENING)

    async def post(self, path: str, body: bytes, media: str = JSON, encoding: str = "identity") -> Answer:
        """Send one request. Return responses with 200 or 408, which ends a poll; raise ``HttpError`` for any other."""
        answer = await self._ask(
            f"POST {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\ncontent-type: {media}\r\n"
            f"content-encoding: {encoding}\r\n{self._key}accept: {PROTOBUF}, {JSON}\r\n"
            f"content-length: {len(body)}\r\n\r\n",
            body,
        )
        if answer.status not in (200, 408):
            raise HttpError(f"{path} was answered {answer.status}: {answer.body[:500]!r}")
        return answer

    async def get(self, path: str) -> Answer:
        return await self._ask(f"GET {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n\r\n", b"")

    async def _ask(self, head: str, body: bytes) -> Answer:
        """Send over an idle connection or a new one; the server may have closed a connection that was idle for long."""
        while self._idle:
            reader, writer = self._idle.pop()
            if reader.at_eof():
                writer.close()
                continue
            try:
                return await self._exchange(reader, writer, head.encode() + body)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                if getattr(error, "partial", b""):
                    raise
        async with self._opening:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        return await self._exchange(reader, writer, head.encode() + body)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> Answer:
        try:
            writer.write(request)
            answer = await _read_answer(reader)
        except BaseException:
            writer.close()
            raise
        self._idle.append((reader, writer))
        return answer

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


async def _read_answer(reader: asyncio.StreamReader) -> Answer:
    head = await reader.readuntil(b"\r\n\r\n")
    status, length = int(head[9:12]), None
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    if length is None:
        raise HttpError(f"an answer without a length: {head[:200]!r}")
    return Answer(status, await reader.readexactly(length) if length else b"")
