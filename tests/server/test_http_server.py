"""The HTTP server by itself, with an application that says what it received; ``test_connections.py`` has attacks."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorimer.server import http_server
from lorimer.server.http_server import AUTHORITY, HttpServer
from lorimer.server.serve import bind
from lorimer.server.settings import Settings

HEAD = b"HTTP/1.1\r\nHost: localhost\r\n"
LARGE = 20_000_000


class Application:
    """Answers with method, path, query and the whole body; some paths behave in other ways."""

    def __init__(self) -> None:
        self.scopes = []
        self.gone, self.may_end = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope, receive, send):
        self.scopes.append(scope)
        path, body = scope["path"], b""
        if path == "/unread":
            await answer(send, b"no")
            return
        if path == "/held":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone.set()
            return
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                await answer(send, b"broken", 400)
                return
            body += message["body"]
            if not message["more_body"]:
                break
        await self.respond(scope, body, send)

    async def respond(self, scope, body, send):
        path = scope["path"]
        if path == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in (b"one ", b"", b"two"):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        elif path == "/slow":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            await self.may_end.wait()
            await send({"type": "http.response.body", "body": b""})
        elif path == "/large":
            await answer(send, bytes(LARGE), headers=[(b"connection", b"close")])
        elif path == "/cancelled":
            raise asyncio.CancelledError
        elif path == "/fails":
            raise RuntimeError("planted")
        elif path == "/short":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            await send({"type": "http.response.body", "body": b"four"})
        elif path == "/injected":
            headers = [(b"location", b"/x\r\nset-cookie: a=b"), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        else:
            query = scope["query_string"].decode()
            await answer(send, json.dumps([scope["method"], path, query, body.decode("latin-1")]).encode())


async def answer(send, body, status=200, headers=()):
    headers = [(b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Running:
    def __init__(self, server, app, address):
        self.server, self.app, self.address = server, app, address

    async def connect(self):
        return await asyncio.open_connection(*self.address)

    async def ask(self, data, *, until=None, parts=()):
        """Send bytes, cut at ``parts``, and return what comes back until the end, or until a count of responses."""
        reader, writer = await self.connect()
        try:
            for start, stop in zip((0, *parts), (*parts, len(data)), strict=True):
                writer.write(data[start:stop])
                await writer.drain()
                if parts:
                    await asyncio.sleep(0)
            received = b""
            async with asyncio.timeout(20):
                while until is None or len(responses(received)) < until:
                    part = await reader.read(65536)
                    if not part:
                        break
                    received += part
            return received
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def running(tmp_path="unused", **changes) -> AsyncIterator[Running]:
    given = Settings(data=tmp_path, port=0, **changes)
    app = Application()
    listener = bind(given)
    address = listener.getsockname()[:2]
    server = HttpServer(app, listener, given)
    serving = asyncio.create_task(server.serve())
    try:
        yield Running(server, app, address)
    finally:
        server.stop()
        done, _ = await asyncio.wait({serving}, timeout=10)
        serving.cancel()
        assert done, "the server did not end"


def responses(data: bytes) -> list[tuple[int, bytes]]:
    """Return status and body of each complete response with a length."""
    found = []
    while b"\r\n\r\n" in data:
        head, _, rest = data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        size = int(length[1]) if length else 0
        if len(rest) < size:
            break
        found.append((int(head.split()[1]), rest[:size]))
        data = rest[size:]
    return found


REQUEST = st.builds(
    lambda path, body, form: (path, body, form),
    st.text("abc", min_size=1, max_size=5),
    st.binary(max_size=40),
    st.sampled_from(["length", "chunked"]),
)


def encoded(number: int, path: str, body: bytes, form: str) -> bytes:
    head = f"POST /{path}?{number} ".encode() + HEAD
    if form == "length":
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    pieces = [body[at : at + 7] for at in range(0, len(body), 7)]
    chunks = b"".join(b"%x;e=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\nTrailer: dropped\r\n\r\n"


@given(st.lists(REQUEST, min_size=1, max_size=12), st.data())
@settings(max_examples=60, deadline=None)
def test_pipelined_requests_are_answered_in_order_however_they_are_cut(asked, data):
    """Whatever the borders of what arrives together, each request is seen once, whole and in order."""
    sent = b"".join(encoded(number, *each) for number, each in enumerate(asked))
    cuts = data.draw(st.lists(st.integers(1, len(sent) - 1), max_size=8, unique=True).map(sorted))

    async def check():
        async with running() as one:
            received = await one.ask(sent, until=len(asked), parts=tuple(cuts))
            assert all(name != b"trailer" for scope in one.app.scopes for name, _ in scope["headers"])
        return responses(received)

    expected = [
        ["POST", f"/{path}", str(number), body.decode("latin-1")] for number, (path, body, _) in enumerate(asked)
    ]
    found = asyncio.run(check())
    assert [json.loads(body) for _, body in found] == expected


async def test_few_pipelined_requests_are_kept_while_one_is_answered():
    """A connection cannot fill memory with requests: the rest stays unparsed, and reading pauses."""
    async with running() as one:
        _, writer = await one.connect()
        writer.write((b"GET /held " + HEAD + b"\r\n") + (b"GET /a " + HEAD + b"\r\n") * 100_000)
        await asyncio.sleep(0.3)
        (connection,) = one.server._connections
        assert len(connection._exchanges) <= http_server.FEED_BYTES // 30
        assert len(connection._unparsed) < 8 * http_server.READ_AHEAD_BYTES
        assert not connection._is_reading
        connection.abort()  # while reading is paused, the end of the client is not seen
        writer.close()


async def test_disconnect_is_told_to_the_request_that_is_being_answered():
    """Also when another was sent behind it."""
    for behind in (b"", b"GET /a " + HEAD + b"\r\n"):
        async with running() as one:
            _, writer = await one.connect()
            writer.write(b"GET /held " + HEAD + b"\r\n" + behind)
            await asyncio.sleep(0.1)
            writer.close()
            async with asyncio.timeout(5):
                await one.app.gone.wait()
            assert len(one.app.scopes) == 1


async def test_targets():
    async with running() as one:
        for target, path, query, authority in (
            (b"/a%20b/%C3%A9?x=%20", "/a b/é", b"x=%20", None),
            (b"http://localhost:1/p?q#f", "/p", b"q", "localhost:1"),
            (b"http://localhost", "/", b"", "localhost"),
            (b"http://localhost?q=/", "/", b"q=/", "localhost"),
            (b"/redirect?to=http://evil.test/", "/redirect", b"to=http://evil.test/", None),
        ):
            await one.ask(b"GET " + target + b" " + HEAD + b"\r\n", until=1)
            scope = one.app.scopes[-1]
            assert (scope["path"], scope["query_string"], scope.get(AUTHORITY)) == (path, query, authority)


async def test_forms_of_responses():
    async with running() as one:
        received = await one.ask(b"GET /stream " + HEAD + b"Connection: close\r\n\r\n")
        assert b"transfer-encoding: chunked" in received and b"connection: close" in received
        assert received.endswith(b"\r\n\r\n4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n")
        old = await one.ask(b"GET /stream HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert b"transfer-encoding" not in old and old.endswith(b"\r\n\r\none two")
        head = await one.ask(b"HEAD /a " + HEAD + b"Connection: close\r\n\r\n")
        assert re.search(rb"content-length: [1-9]", head) and head.endswith(b"\r\n\r\n")
        assert re.search(rb"\r\ndate: \w+, \d\d \w+ \d{4} [\d:]{8} GMT\r\n", head)


@pytest.mark.parametrize("path", [b"/fails", b"/short", b"/injected"])
async def test_what_the_application_may_not_do_ends_the_connection(path, caplog):
    async with running() as one:
        with contextlib.suppress(ConnectionError):
            assert b"set-cookie" not in await one.ask(b"GET " + path + b" " + HEAD + b"\r\n")
        assert [record.message for record in caplog.records] == ["the application failed"]
        caplog.clear()


async def test_a_cancelled_application_ends_the_connection():
    async with running() as one:
        with contextlib.suppress(ConnectionError):
            assert await one.ask(b"GET /cancelled " + HEAD + b"\r\n") == b""


async def test_bodies_that_nobody_reads():
    """A short rest is discarded and the connection kept; after a long one the client still gets the response."""
    async with running() as one:
        reader, writer = await one.connect()
        writer.write(b"POST /unread " + HEAD + b"Content-Length: 5\r\n\r\nab")
        await asyncio.sleep(0.05)
        writer.write(b"cdeGET /next " + HEAD + b"\r\n")
        received = b""
        async with asyncio.timeout(5):
            while len(responses(received)) < 2:
                received += await reader.read(65536)
        assert [scope["path"] for scope in one.app.scopes] == ["/unread", "/next"]
        writer.close()
        long = await one.ask(b"POST /unread " + HEAD + b"Content-Length: 90000000\r\n\r\n" + b"x" * 3_000_000)
        assert responses(long) == [(200, b"no")] and b"connection: close" in long


async def test_continue_is_sent_when_the_body_is_wanted():
    async with running() as one:
        expecting = HEAD + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        reader, writer = await one.connect()
        writer.write(b"POST /a " + expecting)
        async with asyncio.timeout(5):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"hi")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        writer.close()
        # The client may leave its body out, so that what follows cannot be told from it.
        refused = await one.ask(b"POST /unread " + expecting)
        assert b"100 Continue" not in refused and b"connection: close" in refused


@pytest.mark.parametrize("filler", [b"T: %b\r\n\r\n", b"1;e=%b\r\na\r\n0\r\n\r\n"], ids=["trailer", "extension"])
async def test_a_large_body_does_not_allow_a_long_trailer(filler):
    """The parser would copy all of it with every part that arrives: 4 MiB took seconds of the event loop."""
    body = b"%x\r\n%b\r\n" % (2**20, bytes(2**20)) + (b"0\r\n" if filler.startswith(b"T") else b"")
    request = b"POST /a " + HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body
    async with running() as one:
        received = await one.ask(request + filler % (b"x" * (http_server.MAX_HEADER_BYTES + 4096)))
        assert responses(received)[0] == (400, b"broken")
        received = await one.ask(request + filler % (b"x" * (http_server.MAX_HEADER_BYTES // 2)), until=1)
        assert responses(received)[0][0] == 200


async def test_too_many_headers_are_refused_by_their_number():
    async with running() as one:
        received = await one.ask(b"GET /a " + HEAD + b"x: y\r\n" * 200 + b"\r\n")
        assert b"more than 100 headers" in received and received.startswith(b"HTTP/1.1 400 ")


async def test_a_client_that_reads_slowly_gets_the_whole_response(monkeypatch):
    """Although the connection ends after it, and more was sent behind the request."""
    monkeypatch.setattr(http_server, "LINGER_SECONDS", 0.05)
    async with running() as one:
        reader, writer = await one.connect()
        writer.write(b"GET /large " + HEAD + b"\r\n" + b"GET /a " + HEAD + b"x: %b\r\n\r\n" % (b"y" * 2000))
        received = 0
        async with asyncio.timeout(30):
            while part := await reader.read(2**20):
                received += len(part)
                await asyncio.sleep(0.02)
        assert received > LARGE
        writer.close()


async def test_an_upgrade_is_not_offered_and_its_request_is_answered_with_its_body():
    """Java's client asks for HTTP/2 with every first request, bodies included."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    async with running() as one:
        request = b"POST /a " + HEAD + upgrade + b"Content-Length: 5\r\n\r\nhello"
        for cut in ((), (len(request) - 3,)):
            received = await one.ask(request, parts=cut)
            ((status, body),) = responses(received)
            assert (status, json.loads(body)) == (200, ["POST", "/a", "", "hello"])
            assert b"connection: close" in received


async def test_stop_closes_a_connection_whose_response_had_begun():
    async with running() as one:
        reader, writer = await one.connect()
        writer.write(b"GET /slow " + HEAD + b"\r\n")
        async with asyncio.timeout(5):
            await reader.readuntil(b"begun")
            one.server.stop()
            one.app.may_end.set()
            assert (await reader.read()).endswith(b"0\r\n\r\n")
        writer.close()


async def test_stop_lets_a_request_in_flight_end_and_closes_idle_connections():
    async with running() as one:
        idle, idle_writer = await one.connect()
        reader, writer = await one.connect()
        writer.write(b"POST /a " + HEAD + b"Content-Length: 2\r\n\r\na")
        await asyncio.sleep(0.1)
        one.server.stop()
        async with asyncio.timeout(5):
            assert await idle.read() == b""
            writer.write(b"b")
            received = await reader.read()
        assert responses(received)[0][0] == 200 and b"connection: close" in received
        with pytest.raises(OSError):
            await one.connect()
        for each in (writer, idle_writer):
            each.close()
