"""A private PostgreSQL server for tests: its own directory, its own port on loopback, gone afterwards."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

import psycopg
import pytest

PLACES = "/usr/lib/postgresql/*/bin"
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "max_connections": "60",
}

CLEAN_UP = 'read -r _; "$1" -D "$2" stop -m immediate > /dev/null; rm -rf "$3"/*; rmdir "$3" 2> /dev/null'


def find_binaries() -> Path | None:
    """The directory that has ``initdb``, newest version first."""
    places = [*sorted(glob(PLACES), reverse=True), *os.get_exec_path()]
    return next((Path(place) for place in places if Path(place, "initdb").exists()), None)


class PostgresServer:
    """A running server; ``url(name)`` is what the store is given."""

    def __init__(self, binaries: Path, directory: Path) -> None:
        self.binaries = binaries
        self.data = directory / "data"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        # The server refuses to run as root; Debian's package has a user for it.
        self.user: dict[str, Any] = (
            {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
        )
        if self.user:
            shutil.chown(directory, "postgres", "postgres")
        self._run("initdb", "--auth=trust", "--username=lorimer", "--encoding=UTF8", "--locale=C", "--no-sync")
        options = "\n".join(f"{name} = '{value}'" for name, value in SETTINGS.items() | {("port", str(self.port))})
        with open(self.data / "postgresql.conf", "a") as file:
            file.write(options)

    def _run(self, command: str, *arguments: str) -> None:
        line = [str(self.binaries / command), "-D", str(self.data), *arguments]
        done = subprocess.run(
            line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=self.data.parent, **self.user
        )
        assert done.returncode == 0, done.stderr.decode()

    def start(self) -> None:
        # Without a log file the server would hold on to our pipe.
        self._run("pg_ctl", "start", "-w", "-l", str(self.data.parent / "log"))

    def stop(self, how: str = "fast") -> None:
        self._run("pg_ctl", "stop", "-w", "-m", how)

    def url(self, name: str = "postgres") -> str:
        return f"postgresql://lorimer@127.0.0.1:{self.port}/{name}"

    def execute(self, statement: str, database: str = "postgres") -> list[tuple]:
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []


@contextlib.contextmanager
def running() -> Iterator[PostgresServer]:
    """A server until the block ends; where PostgreSQL is not installed, the test is skipped."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL's initdb is not installed (Debian: apt-get install postgresql)")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="lorimer-postgres-", dir=memory))
    server = PostgresServer(binaries, directory)
    # The shell reads until our end of the pipe closes, so the server also goes when the tests are killed.
    line = ["sh", "-c", CLEAN_UP, "sh", str(binaries / "pg_ctl"), str(server.data), str(directory)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, cwd="/", start_new_session=True, **server.user):
        server.start()
        yield server
    with contextlib.suppress(FileNotFoundError):
        directory.rmdir()  # the server's user may empty the directory, but not take it out of its parent
