"""What goes over a socket and is no proper request: half of one, two in one, one that is never read; and idle ones."""

import socket
import time
from collections.abc import Iterator

import pytest

from tests.server.processes import Process, eventually, is_connected, is_well, statuses

HEADER_SECONDS, ANSWER_SECONDS, BODY_SECONDS = 1.0, 1.0, 0.7
HEALTH = b"GET /api/v1/healthz HTTP/1.1\r\n"
HOST = b"Host: localhost\r\n"
POST = b"POST /api/v1/telemetry HTTP/1.1\r\n" + HOST
JSON = b"Content-Type: application/json\r\n"
SECRET = b"GET /api/v1/smuggled HTTP/1.1\r\n" + HOST + b"\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One server for all, with short times."""
    times = {"header_seconds": HEADER_SECONDS, "answer_seconds": ANSWER_SECONDS, "body_seconds": BODY_SECONDS}
    flags = [f"--set={name}={value}" for name, value in times.items()]
    process = Process(tmp_path_factory.mktemp("connections"), "--lazy", *flags).wait_until_listening()
    yield process
    process.close()


def whole_answer(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


# ── slow and idle ─────────────────────────────────────────────────────────────────────────────────────


def test_half_sent_headers_are_dropped_and_others_served(server):
    slow = [server.connect() for _ in range(200)]
    for connection in slow:
        connection.sendall(b"GET /api/v1/healthz HT")
    assert is_well(server)
    for connection in slow:
        assert connection.recv(100) == b""
        connection.close()


def test_headers_that_trickle_in_have_the_same_time(server):
    with server.connect() as connection:
        began = time.monotonic()
        with pytest.raises(OSError):
            for _ in range(40):
                connection.sendall(b"G")
                time.sleep(0.1)
        assert time.monotonic() - began < 3 * HEADER_SECONDS + 1


def test_idle_connection_serves_again_until_its_time_is_over(server):
    with server.connect() as connection:
        for _ in range(3):
            connection.sendall(HEALTH + HOST + b"\r\n")
            assert statuses(connection.recv(65536)) == [200]
            time.sleep(HEADER_SECONDS / 3)
        began = time.monotonic()
        assert connection.recv(1) == b"", "closed without a word, which every client takes for the end of keep-alive"
        assert time.monotonic() - began < 3 * HEADER_SECONDS


def test_a_thousand_idle_connections_hold_nobody_up(server):
    idle = [server.connect() for _ in range(1000)]
    try:
        began = time.monotonic()
        assert all(is_well(server) for _ in range(5))
        assert time.monotonic() - began < 5
        assert idle[0].recv(1) == b"" and idle[-1].recv(1) == b""
    finally:
        for connection in idle:
            connection.close()


@pytest.mark.parametrize("pause", [0.0, 0.1], ids=["stops", "trickles"])
def test_body_that_does_not_arrive_is_answered_in_time(server, pause):
    with server.connect() as connection:
        connection.sendall(b"POST /api/v1/create_session HTTP/1.1\r\n" + HOST + JSON + b"Content-Length: 100\r\n\r\n{")
        began = time.monotonic()
        connection.settimeout(0.05)
        answer = b""
        while not answer and time.monotonic() < began + 10:
            if pause:
                connection.sendall(b" ")
                time.sleep(pause)
            try:
                answer = connection.recv(65536)
            except TimeoutError:
                continue
        assert statuses(answer) == [408]
        assert b"body_timeout" in answer
        assert BODY_SECONDS * 0.9 < time.monotonic() - began < BODY_SECONDS + 3


def test_client_that_reads_nothing_is_cut_off(server):
    """Its requests are many and their answers large, so that they fill what the system keeps for it."""
    asked = (b"GET /openapi.json HTTP/1.1\r\n" + HOST + b"\r\n") * 300
    with server.connect(receive_bytes=4096) as connection:
        connection.sendall(asked)
        port = connection.getsockname()[1]
        eventually(lambda: is_connected(server, port), "connected")
        assert is_well(server)
        eventually(lambda: not is_connected(server, port), "cut off")
        with pytest.raises(ConnectionError):
            while connection.recv(65536):
                pass
    assert is_well(server)


# ── framing ───────────────────────────────────────────────────────────────────────────────────────────

CHUNKED = b"Transfer-Encoding: chunked\r\n"
LENGTH = b"Content-Length: 4\r\n"
EMPTY = b"0\r\n\r\n"
REFUSED = {
    "two lengths": POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "list of lengths": POST + b"Content-Length: 4, 4\r\n\r\nabcd",
    "signed length": POST + b"Content-Length: +4\r\n\r\nabcd",
    "length in another base": POST + b"Content-Length: 0x4\r\n\r\nabcd",
    "length, then encoding": POST + JSON + LENGTH + CHUNKED + b"\r\n3\r\n[1]\r\n" + EMPTY,
    "encoding, then length": POST + JSON + CHUNKED + LENGTH + b"\r\n3\r\n[1]\r\n" + EMPTY,
    "two encodings": POST + CHUNKED + CHUNKED + b"\r\n" + EMPTY,
    "encoding that does not end": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n" + EMPTY,
    "unknown encoding": POST + b"Transfer-Encoding: xchunked\r\n\r\n" + EMPTY,
    "encoding of HTTP/1.0": POST.replace(b"/1.1", b"/1.0") + CHUNKED + b"\r\n" + EMPTY,
    "space in name": HEALTH + b"Host : localhost\r\n\r\n",
    "folded": HEALTH + HOST + b"A: b\r\n c: d\r\n\r\n",
    "bare CR": HEALTH + HOST + b"A: b\rC: d\r\n\r\n",
    "NUL": HEALTH + HOST + b"A: b\0c\r\n\r\n",
    "long header": HEALTH + HOST + b"A: " + b"b" * 300_000 + b"\r\n\r\n",
    "many headers": HEALTH + HOST + b"A: b\r\n" * 1000 + b"\r\n",
    "no request": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100 + b"\r\n\r\n",
}


@pytest.mark.parametrize("request_", REFUSED.values(), ids=REFUSED)
def test_ambiguous_requests_are_refused_and_what_follows_is_not_read(server, request_):
    with server.connect() as connection:
        connection.sendall(request_ + SECRET)
        answer = whole_answer(connection)
        assert len(statuses(answer)) == 1, answer
        assert 400 <= statuses(answer)[0] < 500, answer


@pytest.mark.parametrize("hosts", [b"", HOST + b"Host: evil.test\r\n"], ids=["none", "two"])
def test_a_request_has_one_host(server, hosts):
    with server.connect() as connection:
        connection.sendall(HEALTH + hosts + b"\r\n")
        assert statuses(connection.recv(65536)) == [421]


ELSEWHERE = b"GET http://evil.test/api/v1/healthz HTTP/1.1\r\n"
MISDIRECTED = {
    "another host beside an own Host": ELSEWHERE + HOST,
    "another host with a port beside an own Host": ELSEWHERE.replace(b"evil.test", b"evil.test:80") + HOST,
    "user and host beside an own Host": ELSEWHERE.replace(b"evil.test", b"localhost@evil.test") + HOST,
    "no path beside an own Host": ELSEWHERE.replace(b"/api/v1/healthz", b"") + HOST,
    "the same host": ELSEWHERE + b"Host: evil.test\r\n",
    "no host": ELSEWHERE,
    "no host in HTTP/1.0": ELSEWHERE.replace(b"/1.1", b"/1.0"),
    "user and host": ELSEWHERE.replace(b"evil.test", b"localhost@evil.test"),
    "own target, foreign host": ELSEWHERE.replace(b"evil.test", b"localhost") + b"Host: evil.test\r\n",
}


@pytest.mark.parametrize("head", MISDIRECTED.values(), ids=MISDIRECTED)
def test_a_target_of_another_host_is_refused(server, head):
    with server.connect() as connection:
        connection.sendall(head + b"\r\n")
        answer = connection.recv(65536)
    assert b" 421 " in answer.partition(b"\r\n")[0] and b"bad_host" in answer, answer


@pytest.mark.parametrize("target", [b"CONNECT evil.test:80", b"OPTIONS *", b"GET evil.test/api/v1/healthz"])
def test_a_target_without_a_path_is_refused(server, target):
    with server.connect() as connection:
        connection.sendall(target + b" HTTP/1.1\r\n" + HOST + b"\r\n")
        assert statuses(connection.recv(65536)) == [400]


def test_a_target_of_this_host_is_served(server):
    with server.connect() as connection:
        connection.sendall(ELSEWHERE.replace(b"evil.test", b"localhost") + HOST + b"\r\n")
        assert statuses(connection.recv(65536)) == [200]


BROKEN_CHUNKS = {
    "signed size": b"-1\r\nabc\r\n",
    "large size": b"F" * 17 + b"\r\nabc\r\n",
    "no number": b"xyz\r\nabc\r\n",
    "longer than said": b"2\r\nabcd\r\n" + EMPTY,
    "long extension": b"3;" + b"a" * 100_000 + b"\r\nabc\r\n" + EMPTY,
    "folded trailer": b"3\r\nabc\r\n0\r\nA: b\r\n c\r\n\r\n",
}


@pytest.mark.parametrize("chunks", BROKEN_CHUNKS.values(), ids=BROKEN_CHUNKS)
def test_broken_chunks_end_the_connection(server, chunks):
    with server.connect() as connection:
        connection.sendall(POST + JSON + CHUNKED + b"\r\n" + chunks + SECRET)
        answer = whole_answer(connection)
    assert statuses(answer) == [400], answer
    assert b"bad_body" in answer
    assert is_well(server)


def test_a_body_in_very_many_chunks_is_read(server):
    """A thousand of one byte each, every one with an extension."""
    content = b'{"tags": [], "user_metadata": {"a": "' + b"x" * 1000 + b'"}, "sdk_version": "0"}'
    request = b"POST /api/v1/create_session HTTP/1.1\r\n" + HOST + JSON + CHUNKED + b"\r\n"
    chunks = b"".join(b"1;a=b\r\n%c\r\n" % byte for byte in content) + EMPTY
    with server.connect() as connection:
        connection.sendall(request + chunks)
        assert statuses(whole_answer(connection)) == [200]


def test_few_open_files_degrade_and_do_not_kill(tmp_path):
    """The system allows it fewer files than connections come in."""
    server = Process(tmp_path, "--lazy", max_files=80).wait_until_listening()
    try:
        crowd = [server.connect() for _ in range(120)]
        for connection in crowd:
            connection.sendall(HEALTH + HOST + b"\r\n")
        assert statuses(crowd[0].recv(65536)) == [200]
        for connection in crowd:
            connection.close()
        assert is_well(server)
        assert server.process.poll() is None
        assert "at most 80 files can be open" in server.stderr()
    finally:
        server.close()
