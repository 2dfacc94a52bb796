"""What an operator's process manager does: a server on one data directory and one port, started again when it ends."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import psutil

from lorimer.engine import fork_server
from tests.conformance.servers import LORIMER, READY_LINE, children, environment
from tests.faults.tenant import MODEL

Kind = Literal["engine", "api", "both"]
WAIT_SECONDS = 240.0


def eventually(condition: Callable[[], object], what: str, seconds: float = WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.002)


class Supervisor:
    """Use as a context. ``exit_codes`` are those of the servers that have ended, in order."""

    def __init__(
        self,
        data: Path,
        *,
        models: Sequence[str] = (MODEL,),
        log: Path | None = None,
        extra: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
        **settings: object,
    ) -> None:
        """``extra`` are environment variables of the server; ``prefix`` is a command that runs it."""
        self.data, self.port = data, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log or data.parent / f"{data.name}.log"
        self.exit_codes: list[int] = []
        self.command = [
            *prefix,
            *LORIMER,
            "serve",
            "--port",
            str(self.port),
            "--data",
            str(data),
            "--dtype",
            "float32",
        ]
        self.command += ["--log-format", "json", *(f"--model={model}" for model in models)]
        for name, value in ({"num_threads": 1} | settings).items():
            self.command += ["--set", f"{name}={value}"]
        self._environment = environment(**(extra or {}))
        if prefix:  # a limit of the server is to hold for its engines too
            self._environment.pop(fork_server.VARIABLE, None)
        self._process: subprocess.Popen[str] | None = None
        self._is_ending = False
        self._ready = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> "Supervisor":
        self._keeper.start()
        self.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending = True
        self.send(signal.SIGTERM)
        self._keeper.join(WAIT_SECONDS)

    def _keep(self) -> None:
        while not self._is_ending:
            with self.log.open("ab") as log:
                self._process = process = subprocess.Popen(
                    self.command, env=self._environment, stdout=subprocess.PIPE, stderr=log, text=True
                )
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(READY_LINE):
                    self._ready.set()
            process.stdout.close()
            self.exit_codes.append(process.wait())
            self._ready.clear()

    def wait_until_ready(self) -> None:
        """Listening, and the engine of a server that has just been started is loaded."""
        assert self._ready.wait(WAIT_SECONDS), self.logged()[-3000:]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def engines(self) -> list[psutil.Process]:
        return children(self.pid)

    def send(self, number: int) -> None:
        """A signal to the API process."""
        assert self._process is not None
        if self._process.poll() is None:
            os.kill(self._process.pid, number)

    def kill(self, kind: Kind) -> None:
        """SIGKILL now, or as soon as there is such a process; a server that was killed is down when this returns."""
        eventually(lambda: self.engines() or kind == "api", f"a process to kill: {kind}")
        ended = len(self.exit_codes)
        engines = self.engines() if kind != "api" else []
        if kind != "engine":
            self.send(signal.SIGKILL)
        for engine in engines:
            try:
                engine.kill()
            except psutil.NoSuchProcess:
                continue
        if kind != "engine":
            self.wait_for_end(ended)

    def wait_for_end(self, before: int) -> int:
        """The exit code of the server that ends after ``before`` others."""
        eventually(lambda: len(self.exit_codes) > before, "the server ended")
        return self.exit_codes[before]

    def stop_restarting(self) -> None:
        """The server that ends next is the last."""
        self._is_ending = True

    def logged(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def disk_bytes(self) -> dict[str, int]:
        """By first part of the path: what lies in the data directory."""
        sizes: dict[str, int] = {}
        for folder, _, names in os.walk(self.data):
            for name in names:
                path = Path(folder, name)
                try:
                    size = path.lstat().st_blocks * 512
                except FileNotFoundError:
                    continue
                place = path.relative_to(self.data).parts[0]
                sizes[place] = sizes.get(place, 0) + size
        return sizes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
