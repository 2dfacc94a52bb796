"""``lorimer serve`` in a process of its own, for tests of what only a process has: sockets, signals, limits, an end."""

import os
import re
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import psutil

from tests.conformance.servers import LORIMER, children


class Process:
    """``lorimer serve`` with a debug model on a free port."""

    def __init__(self, folder: Path, *flags: str, max_files: int = 0, variables: dict[str, str] | None = None) -> None:
        """``max_files``: as many as the system lets it open; ``variables`` of its environment, empty ones are unset."""
        self.log = (folder / "log").open("w+")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LORIMER_")}
        environment = {name: value for name, value in (environment | (variables or {})).items() if value}
        command = [*LORIMER, "serve", "--port", "0", "--data", str(folder / "data"), "--set", "num_threads=1", *flags]
        if max_files:
            command = ["sh", "-c", f'ulimit -n {max_files}; exec "$@"', "sh", *command]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment, start_new_session=True
        )
        self.output = ""
        self.url = ""

    def read_until(self, pattern: str) -> str:
        while not (found := re.search(pattern, self.output)):
            line = self.process.stdout.readline()
            assert line, (self.output, self.stderr())
            self.output += line
        return found[1]

    def wait_until_listening(self) -> "Process":
        self.url = self.read_until(r"at (http://\S+)")
        return self

    def wait_until_ready(self) -> "Process":
        self.wait_until_listening()
        self.read_until(r"(lorimer key create)")
        return self

    def connect(self, receive_bytes: int = 0) -> socket.socket:
        """A connection; ``receive_bytes`` is what it takes of an answer before somebody reads."""
        connection = socket.socket()
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", int(self.url.rsplit(":", 1)[1])))
        return connection

    def stderr(self) -> str:
        self.log.flush()
        return Path(self.log.name).read_text()

    def engines(self) -> list[psutil.Process]:
        return children(self.process.pid, recursive=True)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


def is_well(server: Process) -> bool:
    return httpx2.get(f"{server.url}/api/v1/healthz", timeout=30).status_code == 200


def statuses(answer: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def eventually(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"not {what} within 30 s"
        time.sleep(0.05)


def is_connected(server: Process, port: int) -> bool:
    connections = psutil.Process(server.process.pid).net_connections("tcp")
    return any(one.raddr and one.raddr.port == port for one in connections)
