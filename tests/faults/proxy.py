"""A wire that breaks: passes bytes on between clients and a server, and once cuts a chosen exchange."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from tests.faults.supervisor import free_port

Cut = Literal["request", "answer"]


class BreakingWire:
    """Use as a context; clients connect to ``url``."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._listener = socket.create_server(("127.0.0.1", free_port()))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._path, self._cut, self._then = b"", "answer", lambda: None
        self.num_cuts = 0

    def __enter__(self) -> "BreakingWire":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def arm(self, path: str, cut: Cut, then: Callable[[], None]) -> None:
        """At the next exchange with ``path``: do ``then`` once the request has passed, or once the answer has come;
        the client gets no answer."""
        with self._lock:
            self._path, self._cut, self._then = path.encode(), cut, then

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._upstream))
        except OSError:
            client.close()
            return
        chosen: list[Callable[[], None]] = []
        back = threading.Thread(target=self._answers, args=(server, client, chosen), daemon=True)
        back.start()
        with suppress(OSError):
            while data := client.recv(1 << 20):
                then = self._choose(data)
                if then is not None and self._cut == "answer":
                    chosen.append(then)
                server.sendall(data)
                if then is not None and self._cut == "request":
                    then()
        _close(server, client)

    def _choose(self, data: bytes) -> Callable[[], None] | None:
        with self._lock:
            if not self._path or not data.startswith(b"POST " + self._path + b" "):
                return None
            self._path = b""
            self.num_cuts += 1
            return self._then

    def _answers(self, server: socket.socket, client: socket.socket, chosen: list[Callable[[], None]]) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 20):
                if chosen:
                    chosen.pop()()
                    break
                client.sendall(data)
        _close(server, client)


def _close(*connections: socket.socket) -> None:
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
