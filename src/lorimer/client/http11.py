"""HTTP/1.1 on asyncio for many small concurrent requests: each gets a connection, which it returns to the pool.

A request finds its connection in a time that does not grow with their number; the pool of httpx2 looks at all of
them, and asks the system about each idle one, twice for every request. Bodies are in memory on both sides. Proxies
are left to httpx2.
"""

import asyncio
import ipaddress
import ssl
import time
from collections import deque

import httpx2

KEEP_SECONDS = 5.0
"""An idle connection is used again within this time, which is less than servers keep it."""
PIECE_BYTES = 256 * 1024
OTHER_ADDRESS_SECONDS = 0.25
"""Until the next address of a host is tried too."""

MAX_HEAD_BYTES = 64 * 1024
MAX_LINE_BYTES = 1024

NO_BODY = (204, 304)

Origin = tuple[str, str, int]
"""Scheme, host and port."""


class AnswerReader:
    """Parses one response as its bytes arrive. The body ends by its length, its last chunk or with the connection."""

    def __init__(self, method: str) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.keeps_alive = False
        """Whether the connection may carry another request."""
        self._method = method
        self._buffer = bytearray()
        self._left: int | None = None
        """Bytes of the body, or of the present chunk, that are missing."""
        self._is_chunked = False
        self._is_last_chunk = False

    @property
    def has_begun(self) -> bool:
        return bool(self.status or self._buffer)

    def feed(self, data: bytes) -> bool:
        """Parse more bytes; return whether the response is complete. Raises ``ValueError`` if it is not HTTP/1.1."""
        self._buffer += data
        if not self.status and not self._read_head():
            return False
        if self._is_chunked:
            is_complete = self._read_chunks()
        else:
            self._take(len(self._buffer) if self._left is None else self._left)
            is_complete = self._left == 0
        if is_complete and self._buffer:
            self.keeps_alive = False  # more than was asked for
        return is_complete

    def end(self) -> bool:
        """Return whether the response is complete, given that the connection has ended."""
        return bool(self.status) and not self._is_chunked and not self._left

    # ── the head ──────────────────────────────────────────────────────────────────────────────────────

    def _read_head(self) -> bool:
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            first, *lines = bytes(self._buffer[:end]).split(b"\r\n")
            del self._buffer[: end + 4]
            version, _, rest = first.partition(b" ")
            if version not in (b"HTTP/1.1", b"HTTP/1.0") or not rest[:3].isdigit():
                raise ValueError(f"it begins with {first[:60]!r}")
            status = int(rest[:3])
            if status >= 200:  # others announce it
                self.status, self.headers = status, [_header(line) for line in lines]
                self._plan_body(version)
                return True
        if len(self._buffer) > MAX_HEAD_BYTES:
            raise ValueError(f"its headers are longer than {MAX_HEAD_BYTES} bytes")
        return False

    def _plan_body(self, version: bytes) -> None:
        found: dict[bytes, bytes] = {}
        for name, value in self.headers:
            key = name.lower()
            found[key] = found[key] + b"," + value if key in found else value
        self._is_chunked = found.get(b"transfer-encoding", b"").lower().endswith(b"chunked")
        lengths = {part.strip() for part in found.get(b"content-length", b"").split(b",") if part.strip()}
        if self._method == "HEAD" or self.status in NO_BODY:
            self._is_chunked, self._left = False, 0
        elif not self._is_chunked and lengths:
            if len(lengths) > 1 or not (length := lengths.pop()).isdigit():
                raise ValueError("its Content-Length is no number")
            self._left = int(length)
        elif self._is_chunked:
            self._left = 0
        connection = found.get(b"connection", b"keep-alive" if version == b"HTTP/1.1" else b"close").lower()
        self.keeps_alive = b"close" not in connection and (self._is_chunked or self._left is not None)

    # ── the body ──────────────────────────────────────────────────────────────────────────────────────

    def _take(self, count: int) -> None:
        part = self._buffer[:count]
        del self._buffer[:count]
        self.body += part
        if self._left is not None:
            self._left -= len(part)

    def _read_chunks(self) -> bool:
        """Each chunk is its size in hexadecimal digits, its bytes and a line break; after the last come headers."""
        while True:
            if self._left:
                self._take(self._left)
                if self._left:
                    return False
            line = self._read_line()
            if line is None:
                return False
            if self._is_last_chunk:
                if not line:
                    return True
            elif line:
                self._left = _chunk_size(line)
                self._is_last_chunk = self._left == 0

    def _read_line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > MAX_LINE_BYTES:
                raise ValueError(f"the size of a chunk is {bytes(self._buffer[:60])!r}")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits or digits.strip(b"0123456789abcdefABCDEF"):
        raise ValueError(f"the size of a chunk is {line[:60]!r}")
    return int(digits, 16)


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon or name.strip() != name or not name:
        raise ValueError(f"it has the header {line[:60]!r}")
    return name, value.strip(b" \t")


class Unanswered(Exception):
    """The connection ended before an answer began."""


class HTTPConnection(asyncio.Protocol):
    """One connection. Carries one request after another; data that arrives between them closes it."""

    def __init__(self) -> None:
        self.is_usable = True
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._reader: AnswerReader | None = None
        self._done: asyncio.Future[None] | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._limit: asyncio.Timeout | None = None
        self._seconds: float | None = None

    async def exchange(self, head: bytes, body: bytes, method: str, seconds: float | None) -> AnswerReader:
        """Send a request and read its answer; ``TimeoutError`` after ``seconds`` in which nothing moved."""
        assert self._transport is not None and self._reader is None
        reader = self._reader = AnswerReader(method)
        self._done = asyncio.get_running_loop().create_future()
        self._seconds = seconds
        try:
            async with asyncio.timeout(seconds) as self._limit:
                await self._write(head, body)
                await self._done
        except BaseException:
            self.end()
            raise
        finally:
            self._reader = self._done = self._limit = None
        return reader

    async def _write(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None and self._done is not None
        if len(body) <= PIECE_BYTES:
            self._transport.write(head + body)
            return
        self._transport.write(head)
        content = memoryview(body)
        for start in range(0, len(content), PIECE_BYTES):
            if self._done.done():  # an answer before the end, which is a refusal
                self.is_usable = False
                return
            self._transport.write(content[start : start + PIECE_BYTES])
            await self._room.wait()
            self._moved()

    def _moved(self) -> None:
        if self._limit is not None and self._seconds is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + self._seconds)

    def end(self) -> None:
        self.is_usable = False
        if self._transport is not None:
            self._transport.abort()

    # ── called by the loop ────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._reader is None or self._done is None or self._done.done():
            self.end()
            return
        self._moved()
        try:
            if self._reader.feed(data):
                self.is_usable &= self._reader.keeps_alive
                self._done.set_result(None)
        except ValueError as error:
            self._fail(httpx2.RemoteProtocolError(f"the answer is not HTTP/1.1: {error}"))

    def eof_received(self) -> None:
        self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_usable = False
        self._room.set()
        if self._reader is None:
            return
        if self._reader.end():
            if self._done is not None and not self._done.done():
                self._done.set_result(None)
        elif self._reader.has_begun:
            self._fail(httpx2.RemoteProtocolError(f"the answer was cut off: {error or 'the connection was closed'}"))
        else:
            self._fail(Unanswered(str(error or "the connection was closed")))

    def _fail(self, error: Exception) -> None:
        self.is_usable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()


class HttpTransport(httpx2.AsyncBaseTransport):
    """Pools the connections of one client and keeps idle ones for a few seconds."""

    def __init__(self) -> None:
        self._idle: dict[Origin, deque[HTTPConnection]] = {}
        self._tls: ssl.SSLContext | None = None
        self._is_closed = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        url, limits = request.url, request.extensions.get("timeout", {})
        origin = (url.scheme, url.raw_host.decode("ascii"), url.port or (443 if url.scheme == "https" else 80))
        head, body = head_of(request), await request.aread()
        while (connection := self._take(origin)) is not None:
            try:
                return await self._exchange(connection, origin, request, head, body)
            except Unanswered:
                continue  # closed by the server while it was idle
        try:
            connection = await self._open(origin, limits.get("connect"))
        except TimeoutError:
            raise httpx2.ConnectTimeout(f"no connection to {origin[1]}:{origin[2]} in time") from None
        except OSError as error:
            raise httpx2.ConnectError(str(error)) from error
        try:
            return await self._exchange(connection, origin, request, head, body)
        except Unanswered as error:
            raise httpx2.RemoteProtocolError(f"no answer: {error}") from None

    async def _exchange(
        self, connection: HTTPConnection, origin: Origin, request: httpx2.Request, head: bytes, body: bytes
    ) -> httpx2.Response:
        try:
            answer = await connection.exchange(
                head, body, request.method, request.extensions.get("timeout", {}).get("read")
            )
        except TimeoutError:
            raise httpx2.ReadTimeout("no answer in time") from None
        if connection.is_usable and not self._is_closed:
            connection.idle_since = time.monotonic()
            self._idle.setdefault(origin, deque()).append(connection)
        else:
            connection.end()
        return httpx2.Response(answer.status, headers=answer.headers, content=bytes(answer.body), request=request)

    def _take(self, origin: Origin) -> HTTPConnection | None:
        """Return the connection used last, and close those that have been idle for too long."""
        idle = self._idle.get(origin)
        if not idle:
            return None
        oldest = time.monotonic() - KEEP_SECONDS
        while idle and idle[0].idle_since < oldest:
            idle.popleft().end()
        while idle:
            if (connection := idle.pop()).is_usable:
                return connection
        return None

    async def _open(self, origin: Origin, seconds: float | None) -> HTTPConnection:
        scheme, host, port = origin
        if scheme == "https" and self._tls is None:
            self._tls = httpx2.create_ssl_context()
        async with asyncio.timeout(seconds):
            _, connection = await asyncio.get_running_loop().create_connection(
                HTTPConnection,
                host,
                port,
                ssl=self._tls if scheme == "https" else None,
                # asyncio's race of addresses forgets to close a socket if it is cancelled just when that connects.
                happy_eyeballs_delay=None if is_address(host) else OTHER_ADDRESS_SECONDS,
            )
        return connection

    async def aclose(self) -> None:
        self._is_closed = True
        for idle in self._idle.values():
            while idle:
                idle.pop().end()


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def head_of(request: httpx2.Request) -> bytes:
    lines = [request.method.encode("ascii") + b" " + request.url.raw_path + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in request.headers.raw]
    if any(b"\n" in line or b"\r" in line for line in lines):
        raise httpx2.LocalProtocolError("a header has a line break, which HTTP does not allow")
    return b"\r\n".join(lines) + b"\r\n\r\n"
