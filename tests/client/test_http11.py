"""Our HTTP/1.1 against servers that answer in every way HTTP allows, and in some that it does not."""

import asyncio
import gzip
import random
import subprocess
from contextlib import asynccontextmanager

import httpx2
import pytest

from lorimer.client.http11 import AnswerReader, HttpTransport
from lorimer.client.transport import is_proxied

ANSWERS = {
    "a length": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", True),
    "chunks": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nX-Sum: 5\r\n\r\n",
        True,
    ),
    "the end of the connection": (b"HTTP/1.1 200 OK\r\n\r\nhello", False),
    "an announcement before": (
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        True,
    ),
    "the wish to close": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello", False),
    "an older version": (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", False),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("data", "keeps_alive"), ANSWERS.values(), ids=ANSWERS)
def test_answers_are_read_however_they_are_cut(data, keeps_alive, seed):
    rng, reader, complete = random.Random(seed), AnswerReader("POST"), False
    while data:
        assert not complete
        size = rng.randint(1, 12)
        complete, data = reader.feed(data[:size]), data[size:]
    assert complete or reader.end()
    assert (reader.status, bytes(reader.body), reader.keeps_alive) == (200, b"hello", keeps_alive)


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 304), ("POST", 204)])
def test_answers_without_a_body(method, status):
    reader = AnswerReader(method)
    assert reader.feed(b"HTTP/1.1 %d Fine\r\nContent-Length: 5\r\n\r\n" % status)
    assert (bytes(reader.body), reader.keeps_alive) == (b"", True)


WRONG = {
    "another protocol": b"SSH-2.0-OpenSSH\r\n\r\n",
    "no status": b"HTTP/1.1 fine\r\n\r\n",
    "no header": b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n",
    "a space before the colon": b"HTTP/1.1 200 OK\r\nContent-Length : 5\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    "a negative chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
    "a chunk without end": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 5000,
    "endless headers": b"HTTP/1.1 200 OK\r\n" + b"x" * 100_000,
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG)
def test_what_is_no_answer_is_refused(data):
    with pytest.raises(ValueError, match=r"it |its |chunk"):
        AnswerReader("GET").feed(data)


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell", ANSWERS["chunks"][0][:-4]])
def test_cut_answers_are_not_complete(data):
    reader = AnswerReader("GET")
    assert not reader.feed(data)
    assert not reader.end()


# ── connections ───────────────────────────────────────────────────────────────────────────────────────

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """The body of a request."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    return await reader.readexactly(length)


@asynccontextmanager
async def serving(handle, **options):
    """A server whose connections are given to ``handle(number, reader, writer)``; its port, and a transport."""
    tasks = []

    async def connected(reader, writer):
        tasks.append(asyncio.current_task())
        try:
            await handle(len(tasks), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    transport = HttpTransport()
    async with await asyncio.start_server(connected, "127.0.0.1", 0, **options) as server:
        yield server.sockets[0].getsockname()[1], transport
        await transport.aclose()
        await asyncio.gather(*tasks)


async def post(transport, port, content=b"hello", *, scheme="http", host="127.0.0.1", read=5.0, **headers):
    request = httpx2.Request(
        "POST",
        f"{scheme}://{host}:{port}/path",
        content=content,
        headers=headers,
        extensions={"timeout": {"connect": 5.0, "read": read}},
    )
    return await transport.handle_async_request(request)


async def echo(number, reader, writer):
    while True:
        body = await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nX-Connection: %d\r\nContent-Length: %d\r\n\r\n" % (number, len(body)) + body)
        await writer.drain()


async def test_connection_is_used_again_and_many_at_once_have_one_each():
    async with serving(echo) as (port, transport):
        one_by_one = [(await post(transport, port)).headers["x-connection"] for _ in range(3)]
        assert one_by_one == ["1", "1", "1"]
        answers = await asyncio.gather(*(post(transport, port, b"%d" % number) for number in range(50)))
        assert [answer.content for answer in answers] == [b"%d" % number for number in range(50)]
        assert len({answer.headers["x-connection"] for answer in answers}) == 50


async def test_large_bodies_go_both_ways():
    async with serving(echo) as (port, transport):
        content = random.Random(0).randbytes(9_000_000)
        assert (await post(transport, port, content)).content == content


async def test_compressed_answers_are_unpacked():
    async def compressed(number, reader, writer):
        await read_request(reader)
        body = gzip.compress(b"hello")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async with serving(compressed) as (port, transport):
        assert (await post(transport, port)).content == b"hello"


async def test_connection_that_the_server_closed_meanwhile_is_not_noticed():
    async def once(number, reader, writer):
        await read_request(reader)
        writer.write(OK)
        await writer.drain()
        await reader.read(1)  # the next request is not answered

    async with serving(once) as (port, transport):
        for _ in range(4):
            assert (await post(transport, port)).content == b"ok"


async def test_what_comes_unasked_is_no_answer_to_the_next_request():
    async def late(number, reader, writer):
        await read_request(reader)
        writer.write(OK)
        if number == 1:
            await asyncio.sleep(0.05)
            writer.write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
            return
        await reader.read()

    async with serving(late) as (port, transport):
        assert (await post(transport, port)).status_code == 200
        await asyncio.sleep(0.2)
        assert (await post(transport, port)).status_code == 200


async def test_refusal_before_the_body_has_arrived_is_read():
    async def refuse(number, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig")
        await writer.drain()
        await reader.read()

    async with serving(refuse) as (port, transport):
        answer = await post(transport, port, b"x" * 9_000_000)
        assert (answer.status_code, answer.content) == (413, b"big")


BROKEN = {
    "nothing": (b"", httpx2.RemoteProtocolError, "no answer"),
    "half an answer": (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", httpx2.RemoteProtocolError, "cut off"),
    "another protocol": (b"SSH-2.0\r\n\r\n", httpx2.RemoteProtocolError, "not HTTP/1.1"),
}


@pytest.mark.parametrize(("data", "kind", "message"), BROKEN.values(), ids=BROKEN)
async def test_broken_answers(data, kind, message):
    async def broken(number, reader, writer):
        await read_request(reader)
        writer.write(data)

    async with serving(broken) as (port, transport):
        with pytest.raises(kind, match=message):
            await post(transport, port)


async def test_silence_ends_and_slowness_does_not():
    async def slow(number, reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n")
        for _ in range(4):
            await asyncio.sleep(0.15)
            writer.write(b"x")
        await read_request(reader)
        await reader.read()

    async with serving(slow) as (port, transport):
        assert (await post(transport, port, read=0.4)).content == b"xxxx"
        with pytest.raises(httpx2.ReadTimeout):
            await post(transport, port, read=0.1)


async def test_given_up_request_takes_its_connection_with_it():
    async def silent(number, reader, writer):
        if number > 1:
            return await echo(number, reader, writer)
        return await reader.read()

    async with serving(silent) as (port, transport):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(post(transport, port), 0.1)
        assert (await post(transport, port)).headers["x-connection"] == "2"


async def test_nobody_listens():
    async with serving(echo) as (port, transport):
        pass
    with pytest.raises(httpx2.ConnectError):
        await post(transport, port)


async def test_line_breaks_in_headers_are_refused():
    async with serving(echo) as (port, transport):
        with pytest.raises(httpx2.LocalProtocolError, match="line break"):
            await post(transport, port, x="a\r\nX-Admin: yes")


async def test_tls_is_checked(tmp_path, monkeypatch):
    """The certificate is one of our own, which is known only where a variable names it."""
    ssl = pytest.importorskip("ssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs the command openssl, to make a certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    async with serving(echo, ssl=context) as (port, transport):
        with pytest.raises(httpx2.ConnectError, match="certificate"):
            await post(transport, port, scheme="https", host="localhost")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        trusting = HttpTransport()
        answers = [await post(trusting, port, b"x" * 900_000, scheme="https", host="localhost") for _ in range(2)]
        await trusting.aclose()
        assert [answer.content for answer in answers] == [b"x" * 900_000] * 2
        assert len({answer.headers["x-connection"] for answer in answers}) == 1


def test_proxies_of_the_environment_are_seen(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert not is_proxied("http://server:8000")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    assert is_proxied("http://server:8000")
    assert not is_proxied("https://server")
    monkeypatch.setenv("NO_PROXY", "server,127.0.0.1")
    assert not is_proxied("http://server:8000")
    assert is_proxied("http://other")
