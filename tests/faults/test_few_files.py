"""A server that may open 64 files, and more clients than that: it answers those it can and recovers."""

import socket
import threading

import httpx2
import psutil
import pytest

from tests.conformance.servers import create_key
from tests.faults.caller import Caller
from tests.faults.supervisor import Supervisor, eventually

FILES, CLIENTS = 64, 160
FEW = ["sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh"]
WATCH_SECONDS = 3.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_clients_than_files(tmp_path, tell):
    key = create_key(tmp_path / "data", "alice")
    with Supervisor(tmp_path / "data", prefix=FEW, poll_seconds=2) as server, Caller(server.url, key) as alice:
        run = alice.run()
        assert alice.step(run) == 1
        crowd = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(CLIENTS)]
        request = f"GET /api/v1/healthz HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode()
        try:
            for connection in crowd:
                connection.sendall(request)
            assert crowd[0].recv(65536).startswith(b"HTTP/1.1 200")
            process = psutil.Process(server.pid)
            assert process.num_fds() <= FILES
            busy = process.cpu_percent(WATCH_SECONDS)
            assert alice.step(run) == 2, "a connection that was there is served"
        finally:
            for connection in crowd:
                connection.close()
        eventually(lambda: is_answered(server), "new connections are answered")
        statuses = hurried(server, key)
        assert statuses.count(200) == CLIENTS, statuses
        server.kill("engine")
        assert alice.step(run) == 3, "an engine can be started again"
        assert server.exit_codes == []
    assert busy < 60, f"{busy:g} % of a processor while nothing could be accepted"
    tell(f"{FILES} open files, {CLIENTS} clients", f"a wait; {busy:.0f} % of a core while full")


def is_answered(server: Supervisor) -> bool:
    try:
        return httpx2.get(f"{server.url}/api/v1/healthz", timeout=10).status_code == 200
    except httpx2.HTTPError:
        return False


def hurried(server: Supervisor, key: str) -> list[int]:
    """The answers to so many clients of one request each, all at the same time."""
    found: list[int] = []

    def ask() -> None:
        headers = {"X-API-Key": key, "connection": "close"}
        answer = httpx2.get(f"{server.url}/api/v1/get_server_capabilities", headers=headers, timeout=120)
        found.append(answer.status_code)

    threads = [threading.Thread(target=ask) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
