"""Serves an ASGI application over HTTP/1.1 on this event loop. llhttp, through httptools, parses the requests.

Bounds what a client can make the server keep before the application sees a request: the bytes and number of headers,
the framing around a body, requests sent before the previous one was answered, and the time until the headers are
complete. Passes on the host of an absolute target (``AUTHORITY`` in the scope), which the guard checks like ``Host``.
Drops trailers. ``serve.py`` binds the socket and sets the kernel's limit for clients that do not read. TLS and HTTP/2
are left to a proxy.
"""

import asyncio
import errno
import logging
import socket
import time
from collections import deque
from email.utils import formatdate
from http import HTTPStatus
from typing import cast
from urllib.parse import unquote

import httptools
import orjson
from starlette.types import ASGIApp, Message, Scope

from lorimer.server.settings import Settings

logger = logging.getLogger(__name__)

AUTHORITY = "lorimer.authority"
"""Key of the scope: the host that an absolute target names, as it was sent. Absent if the target is a path."""
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 100
FRAMING_RATIO = 16
"""Bytes of chunk sizes and extensions that each byte of a body may have, besides ``MAX_HEADER_BYTES``."""
FEED_BYTES = 1024
"""Bytes that are parsed together where a request may end and others begin."""
READ_AHEAD_BYTES = 64 * 1024
"""Reading pauses beyond so many bytes that nobody has taken."""
DISCARDED_BYTES = 64 * 1024
"""The rest of a body that the application did not read is discarded to keep the connection, if it is not longer."""
LINGER_SECONDS = 2.0
"""How long a connection is still read after its last response, so that a reset does not destroy the response."""
SPARE_CONNECTIONS = 1000
"""Connections beyond the requests that may be held."""
FULL_SECONDS = 0.1
"""Pause before the next attempt to accept a connection when no file descriptor is left."""
_OUT_OF_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_WITHOUT_BODY = (204, 304)
_NEVER = float("inf")


class HttpServer:
    """Accepts connections from a listening socket."""

    def __init__(
        self, app: ASGIApp, listener: socket.socket, settings: Settings, max_connections: int | None = None
    ) -> None:
        """Connections beyond ``max_connections`` wait in the backlog."""
        self.app, self.header_seconds = app, settings.header_seconds
        self.is_stopping = False
        self._listener = listener
        # The guard refuses excess requests with a response, so it must see some.
        self._max_connections = max_connections or settings.max_concurrent_requests + SPARE_CONNECTIONS
        self._connections: set[Connection] = set()
        self._stopped, self._has_room, self._is_empty = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._is_empty.set()
        self._date = 0, b""

    async def serve(self) -> None:
        """Serve until ``stop``, and until the requests in flight have been answered; cancelling this aborts them."""
        accepting, stopped = asyncio.create_task(self._accept()), asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait({accepting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if accepting.done():
                accepting.result()
            accepting.cancel()
            await asyncio.wait({accepting})
            self._listener.close()
            await self._is_empty.wait()
        finally:
            accepting.cancel()
            stopped.cancel()
            for connection in list(self._connections):
                connection.abort()

    def stop(self) -> None:
        """Close idle connections now, and the others after their response."""
        self.is_stopping = True
        self._stopped.set()
        for connection in list(self._connections):
            connection.close_if_idle()

    def add(self, connection: "Connection") -> None:
        self._connections.add(connection)
        self._is_empty.clear()

    def remove(self, connection: "Connection") -> None:
        self._connections.discard(connection)
        self._has_room.set()
        if not self._connections:
            self._is_empty.set()

    def date_header(self) -> bytes:
        now = int(time.time())
        if self._date[0] != now:
            self._date = now, b"date: " + formatdate(now, usegmt=True).encode() + b"\r\n"
        return self._date[1]

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while len(self._connections) >= self._max_connections:
                self._has_room.clear()
                await self._has_room.wait()
            try:
                accepted, _ = await loop.sock_accept(self._listener)
                await loop.connect_accepted_socket(lambda: Connection(self, loop), accepted)
            except OSError as error:
                # Else the client has gone before it was accepted.
                await asyncio.sleep(FULL_SECONDS if error.errno in _OUT_OF_FILES else 0)


class Connection(asyncio.Protocol):
    """One client's connection: parses requests, and has them answered one after the other."""

    _transport: asyncio.Transport

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self.server, self._loop = server, loop
        self.can_write = asyncio.Event()
        self.can_write.set()
        self.is_lost = False
        self._parser = httptools.HttpRequestParser(self)
        self._exchanges: deque[Exchange] = deque()
        """The first is being answered, the others wait."""
        self._incoming: Exchange | None = None
        """The exchange whose body is arriving; None before and within headers."""
        self._unparsed = b""
        self._overhead = 0
        """Bytes of the current request that are not its body."""
        self._num_since_body = 0
        """Those of them since its last byte of body. The parser copies a long trailer again with every part of it, so
        the bytes that a body allows are not all allowed in one place."""
        self._upgrade_bytes = 0
        """Bytes of a body that follow a refused upgrade, where the parser does not expect any."""
        self._refusal: tuple[int, str, str] | None = None
        self._is_ending = False
        self._is_reading = True
        self._url, self._headers = b"", list[tuple[bytes, bytes]]()
        self._deadline = loop.time() + server.header_seconds
        self._timer = loop.call_at(self._deadline, self._check_deadline)

    # ── the transport ─────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._client, self._local = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self.server.add(self)
        if self.server.is_stopping:
            transport.close()

    def data_received(self, data: bytes) -> None:
        if self._is_ending:
            return
        self._unparsed = self._unparsed + data if self._unparsed else data
        self._parse()
        self.pause_or_resume()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost, self._is_ending, self._unparsed = True, True, b""
        self._timer.cancel()
        self.can_write.set()
        for exchange in self._exchanges:
            exchange.end_input()
        while len(self._exchanges) > 1:
            self._exchanges.pop()  # nobody waits for their answers
        self.server.remove(self)

    def pause_writing(self) -> None:
        self.can_write.clear()

    def resume_writing(self) -> None:
        self.can_write.set()

    def abort(self) -> None:
        self._transport.abort()

    def close_if_idle(self) -> None:
        if not self._exchanges:
            self._transport.close()

    def pause_or_resume(self) -> None:
        """Read on if what was read before has been taken."""
        num_waiting = len(self._unparsed) + (self._incoming.num_waiting if self._incoming is not None else 0)
        reads = self._is_ending or num_waiting <= READ_AHEAD_BYTES
        if reads != self._is_reading and not self._transport.is_closing():
            self._is_reading = reads
            if reads:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _check_deadline(self) -> None:
        now = self._loop.time()
        if self._deadline <= now:
            self._transport.close()
        else:
            self._timer = self._loop.call_at(
                min(self._deadline, now + self.server.header_seconds), self._check_deadline
            )

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────

    def _parse(self) -> None:
        """Parse what has arrived, but no request behind one that is still being answered."""
        data, at = memoryview(self._unparsed), 0
        while at < len(data) and not self._is_ending and self._refusal is None:
            exchange = self._incoming
            if exchange is None and self._exchanges:
                break
            if self._upgrade_bytes:
                part = data[at : at + self._upgrade_bytes]
                self._take_upgrade_body(part)
                at += len(part)
                continue
            known = exchange.num_missing if exchange is not None else None
            part = data[at : at + max(FEED_BYTES, known or 0)]
            at += len(part)
            self._overhead += len(part)
            self._num_since_body += len(part)
            try:
                self._parser.feed_data(part)
            except httptools.HttpParserUpgrade as upgrade:
                at += upgrade.args[0] - len(part)
            except httptools.HttpParserError as error:
                # What a callback below raised is its context.
                self._refuse(400, "bad_request", f"the request cannot be parsed: {error.__context__ or error}")
            received = self._incoming.num_received if self._incoming is not None else 0
            is_long = self._overhead > MAX_HEADER_BYTES + FRAMING_RATIO * received
            if is_long or self._num_since_body > MAX_HEADER_BYTES:
                self._refuse(431, "too_large", f"at most {MAX_HEADER_BYTES} bytes of headers are accepted")
        self._unparsed = b"" if self._is_ending or self._refusal is not None else bytes(data[at:])

    def _refuse(self, status: int, code: str, detail: str) -> None:
        """Stop parsing. Let the application answer a request whose body broke off, else answer here."""
        if self._refusal is not None:
            return
        self._refusal = status, code, detail
        if self._incoming is not None:
            self._incoming.end_input()
            self._incoming = None
        elif not self._exchanges:
            self._end_with_refusal()

    def _end_with_refusal(self) -> None:
        assert self._refusal is not None
        status, code, detail = self._refusal
        body = orjson.dumps({"detail": detail, "code": code, "request_id": ""})
        self._transport.write(
            b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n%b\r\n%b"
            % (_STATUS_LINES[status], len(body), self.server.date_header(), body)
        )
        self._end()

    def on_message_begin(self) -> None:
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._incoming is not None:
            return  # a trailer
        self._headers.append((name.lower(), value))
        if len(self._headers) > MAX_HEADERS:
            raise ValueError(f"more than {MAX_HEADERS} headers")

    def on_headers_complete(self) -> None:
        version, headers = self._parser.get_http_version(), self._headers
        lengths = [value for name, value in headers if name == b"content-length"]
        is_chunked = any(name == b"transfer-encoding" for name, _ in headers)
        if is_chunked and (version == "1.0" or lengths):
            raise ValueError("Transfer-Encoding is not accepted here")
        keep_alive = version != "1.0" and self._parser.should_keep_alive()
        if self._parser.should_upgrade():  # which is not offered: the request is answered as it is
            if is_chunked:
                raise ValueError("an upgrade with a body in chunks")
            self._upgrade_bytes, keep_alive = int(lengths[0]) if lengths else 0, False
        exchange = Exchange(self, self._scope(version), keep_alive, int(lengths[0]) if lengths else None)
        if version != "1.0":
            exchange.expects_continue = any(
                name == b"expect" and value.lower() == b"100-continue" for name, value in headers
            )
        self._incoming, self._deadline = exchange, _NEVER
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1:
            exchange.start(self._loop)

    def _scope(self, version: str) -> Scope:
        target, authority = self._url, None
        if not target.startswith(b"/") and (found := target.partition(b"://"))[1]:
            authority, slash, rest = found[2].partition(b"/")
            authority, question, query = authority.partition(b"?")
            target = slash + rest if slash and not question else b"/" + question + query + slash + rest
        path, _, query = target.partition(b"#")[0].partition(b"?")
        text = path.decode("latin-1")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self._local[:2],
            "client": self._client[:2] if self._client else None,
            "scheme": "http",
            "root_path": "",
            "method": self._parser.get_method().decode(),
            "path": unquote(text) if "%" in text else text,
            "raw_path": path,
            "query_string": query,
            "headers": self._headers,
        }
        if authority is not None:
            scope[AUTHORITY] = authority.decode("latin-1")
        return scope

    def on_body(self, data: bytes) -> None:
        self._overhead -= len(data)
        self._num_since_body = 0
        assert self._incoming is not None
        self._incoming.add_input(data)

    def _take_upgrade_body(self, part: memoryview) -> None:
        assert self._incoming is not None
        self._upgrade_bytes -= len(part)
        self._incoming.add_input(bytes(part))
        if not self._upgrade_bytes:
            self.on_message_complete()

    def on_message_complete(self) -> None:
        if self._upgrade_bytes:
            return
        assert self._incoming is not None
        self._incoming.complete_input()
        self._incoming, self._overhead, self._num_since_body = None, 0, 0
        if not self._exchanges:  # the rest of a body was discarded
            self._await_request()

    # ── responses ─────────────────────────────────────────────────────────────────────────────────────

    def write(self, data: bytes) -> None:
        if not self.is_lost:
            self._transport.write(data)

    def finish(self, exchange: "Exchange", keep_alive: bool) -> None:
        """Go on after a response: with the next request, or end the connection."""
        if self.is_lost or self._is_ending:
            return
        assert self._exchanges[0] is exchange
        self._exchanges.popleft()
        if not keep_alive:
            self._end()
        elif self._exchanges:
            self._exchanges[0].start(self._loop)
        elif self._refusal is not None:
            self._end_with_refusal()
        elif self.server.is_stopping:  # since this response began
            self._end()
        else:
            self._await_request()
            self._parse()
            self.pause_or_resume()

    def _await_request(self) -> None:
        self._deadline = self._loop.time() + self.server.header_seconds

    def _end(self) -> None:
        """Close the connection; if the client may still be sending, after it has had time to read the response."""
        is_complete = self._incoming is None and self._refusal is None and not self._unparsed
        self._is_ending, self._unparsed = True, b""
        if is_complete or self._transport.is_closing():
            self._transport.close()
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self.pause_or_resume()
        self._timer.cancel()
        self._timer = self._loop.call_later(LINGER_SECONDS, self._linger)

    def _linger(self) -> None:
        if self._transport.get_write_buffer_size():  # the kernel ends a connection whose client reads nothing
            self._timer = self._loop.call_later(LINGER_SECONDS, self._linger)
        else:
            self._transport.abort()


class Exchange:
    """One request and its response, as the application sees them."""

    def __init__(self, connection: Connection, scope: Scope, keep_alive: bool, length: int | None) -> None:
        self.scope = scope
        self.expects_continue = False
        self.num_received = 0
        """Bytes of the body."""
        self.num_waiting = 0
        """Bytes of it that the application has not read."""
        self._connection, self._keep_alive, self._length = connection, keep_alive, length
        self._chunks: list[bytes] = []
        self._has_all_input = self._has_told_end = self._is_broken = self._is_answered = False
        self._changed = asyncio.Event()
        self._head: bytes | None = None
        """Status and headers, sent with the first part of the body; None before they are known and when sent."""
        self._has_begun = self._is_chunked = False
        self._num_owed: int | None = None
        """Bytes of the announced length that have not been sent."""
        self._task: asyncio.Task[None] | None = None

    @property
    def num_missing(self) -> int | None:
        """Bytes of the body that have not arrived, where its length is known."""
        return None if self._length is None else self._length - self.num_received

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(self._run())

    async def _run(self) -> None:
        connection = self._connection
        try:
            await connection.server.app(self.scope, self.receive, self.send)
        except Exception:
            logger.exception("the application failed", extra={"path": self.scope["path"][:200]})
        finally:
            if not (self._is_answered or connection.is_lost):
                connection.abort()

    # ── the request ───────────────────────────────────────────────────────────────────────────────────

    def add_input(self, data: bytes) -> None:
        self.num_received += len(data)
        if not self._is_answered:
            self.num_waiting += len(data)
            self._chunks.append(data)
            self._changed.set()

    def complete_input(self) -> None:
        self._has_all_input = True
        self._changed.set()

    def end_input(self) -> None:
        """The client has gone, or its body cannot be read on."""
        self._is_broken = True
        self._changed.set()

    async def receive(self) -> Message:
        if self.expects_continue and not (self.num_received or self._has_begun):
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.expects_continue = False
        while not (self._is_broken or self._is_answered):
            if self._chunks or (self._has_all_input and not self._has_told_end):
                body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
                self._chunks, self.num_waiting, self._has_told_end = [], 0, self._has_all_input
                self._connection.pause_or_resume()
                return {"type": "http.request", "body": body, "more_body": not self._has_all_input}
            self._changed.clear()
            await self._changed.wait()
        return {"type": "http.disconnect"}

    # ── the response ──────────────────────────────────────────────────────────────────────────────────

    async def send(self, message: Message) -> None:
        if self._connection.is_lost:
            return
        if message["type"] == "http.response.start":
            self._begin(message)
            return
        assert self._has_begun and not self._is_answered, "the body of a response that has not begun, or has ended"
        self._write(message.get("body", b""), is_last=not message.get("more_body", False))
        if not self._connection.can_write.is_set():
            await self._connection.can_write.wait()

    def _begin(self, message: Message) -> None:
        assert not self._has_begun, "a response has one beginning"
        status, is_1_0 = message["status"], self.scope["http_version"] == "1.0"
        parts, has_length = [_STATUS_LINES[status]], False
        for name, value in message.get("headers", ()):
            parts += name, b": ", value, b"\r\n"
            if name == b"content-length":
                has_length, self._num_owed = True, int(value)
            elif name == b"connection" and value.lower() == b"close":
                self._keep_alive = False
        num_lines = (len(parts) - 1) // 4 + 1
        if self.scope["method"] == "HEAD" or status in _WITHOUT_BODY:
            self._num_owed = 0
        elif not has_length:
            self._is_chunked, self._keep_alive = not is_1_0, self._keep_alive and not is_1_0
        # A client that was not told to continue may leave its body out.
        if not self._has_all_input and (self.expects_continue or not self._can_discard()):
            self._keep_alive = False
        head = b"".join(parts)
        if head.count(b"\n") != num_lines or head.count(b"\r") != num_lines or b"\0" in head:
            raise ValueError("a header of the response has a line break")
        if not self._keep_alive or self._connection.server.is_stopping:
            self._keep_alive = False
            head += b"" if b"\r\nconnection: close\r\n" in head else b"connection: close\r\n"
        if self._is_chunked:
            head += b"transfer-encoding: chunked\r\n"
        self._head, self._has_begun = head + self._connection.server.date_header() + b"\r\n", True

    def _can_discard(self) -> bool:
        missing = self.num_missing
        return not self._is_broken and missing is not None and missing <= DISCARDED_BYTES

    def _write(self, body: bytes, is_last: bool) -> None:
        head, self._head = self._head or b"", None
        if self.scope["method"] == "HEAD":
            body = b""
        if self._is_chunked:
            end = b"0\r\n\r\n" if is_last else b""
            data = b"%b%x\r\n%b\r\n%b" % (head, len(body), body, end) if body else head + end
        else:
            if self._num_owed is not None:
                self._num_owed -= len(body)
                if self._num_owed < 0 or (is_last and self._num_owed):
                    raise ValueError("the response has another length than it announced")
            data = head + body if head else body
        if data:
            self._connection.write(data)
        if is_last:
            self._is_answered, self._chunks, self.num_waiting = True, [], 0
            self._changed.set()
            self._connection.finish(self, self._keep_alive)
