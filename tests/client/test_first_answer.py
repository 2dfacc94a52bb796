"""An address that never answered is given up soon; a server that has answered is waited for while it restarts."""

import http.server
import socket
import threading
import time

import pytest

import lorimer
from lorimer.client import transport
from lorimer.client.errors import APIConnectionError


class Answering(http.server.BaseHTTPRequestHandler):
    """Says which models there are, whatever it is asked."""

    def do_GET(self) -> None:
        body = b'{"supported_models": []}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def begin(port: int = 0) -> http.server.ThreadingHTTPServer:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Answering)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def end(server: http.server.ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("ask", ["capabilities", "training", "sampling"])
def test_address_that_never_answered_is_given_up(ask, monkeypatch):
    assert transport.FIRST_ANSWER_SECONDS == 10
    monkeypatch.setattr(transport, "FIRST_ANSWER_SECONDS", 0.5)
    free = begin()
    end(free)
    url = f"http://127.0.0.1:{free.server_port}"
    service = lorimer.ServiceClient(base_url=url)
    calls = {
        "capabilities": service.get_server_capabilities,
        "training": lambda: service.create_lora_training_client("lorimer/debug"),
        "sampling": lambda: service.create_sampling_client(base_model="lorimer/debug"),
    }
    began = time.monotonic()
    with pytest.raises(APIConnectionError, match=f"^no server answers at {url} .*; start one with `lorimer serve`, or"):
        calls[ask]()
    assert time.monotonic() - began < 5


def test_address_that_takes_requests_and_never_answers_is_given_up_too(monkeypatch):
    """The limit includes the last attempt, whose own timeout is a minute."""
    monkeypatch.setattr(transport, "FIRST_ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        asked = lorimer.ServiceClient(base_url=url)._capabilities()
        with pytest.raises(APIConnectionError, match=f"^no server answers at {url} .*; start one with"):
            asked.result(timeout=transport.TIMEOUT_SECONDS / 2)


def test_server_that_takes_long_for_the_first_request_is_waited_for(monkeypatch):
    """It says that it is there when it is asked for that, and it is not asked again for the rest."""
    monkeypatch.setattr(transport, "FIRST_ANSWER_SECONDS", 0.4)
    paths: list[str] = []

    class Slow(Answering):
        def do_GET(self) -> None:
            paths.append(self.path)
            if "healthz" not in self.path:
                time.sleep(2)
            super().do_GET()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        service = lorimer.ServiceClient(base_url=f"http://127.0.0.1:{server.server_port}")
        assert service.get_server_capabilities().supported_models == []
    finally:
        end(server)
    assert sorted(paths) == ["/api/v1/get_server_capabilities", transport.HEALTH_PATH]


def test_server_that_answered_is_waited_for_also_by_new_clients(monkeypatch):
    monkeypatch.setattr(transport, "FIRST_ANSWER_SECONDS", 0.2)
    server = begin()
    url = f"http://127.0.0.1:{server.server_port}"
    assert lorimer.ServiceClient(base_url=url).get_server_capabilities().supported_models == []
    end(server)
    waiting = lorimer.ServiceClient(base_url=url)._capabilities()
    with pytest.raises(TimeoutError):
        waiting.future().result(2)
    server = begin(server.server_port)
    try:
        assert waiting.result().supported_models == []
    finally:
        end(server)
