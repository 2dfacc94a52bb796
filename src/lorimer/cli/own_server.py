"""A ``lorimer serve`` beside this program, on a free port of this machine, for as long as it is needed.

It is a process of its own, so that its console can be opened in a browser, and so that it may be killed: it is then
started again on the same port and data, and clients only pause.
"""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lorimer.errors import LorimerError

ADDRESS = re.compile(r" at (http://\S+:(\d+)) ")
END_SECONDS = 60
MAX_RESTARTS = 5
IN_ORDER = {0, 130}


@contextmanager
def own_server(model: str, log: Path, tell: Callable[[str], None], data: Path | None = None) -> Iterator[str]:
    """The address of a server of ``model``; its log goes to ``log``, ``tell`` gets what people should know.

    Without ``data`` it has the data directory of the settings.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    flags = ["--model", model, *(["--data", str(data)] if data else [])]
    server = OwnServer(flags, log, tell)
    try:
        yield server.start()
    finally:
        server.stop()


class OwnServer:
    def __init__(self, flags: list[str], log: Path, tell: Callable[[str], None]) -> None:
        self._flags, self._log, self._tell = flags, log, tell
        self._process: subprocess.Popen[str] | None = None
        self._is_ending = threading.Event()
        self._watch = threading.Thread(target=self._restart_when_killed, daemon=True)
        self._port = "0"

    def start(self) -> str:
        """Begin, and watch from now on."""
        url, self._port = self._begin()
        self._watch.start()
        return url

    def stop(self) -> None:
        """End it in order; killed if it takes too long."""
        self._is_ending.set()
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._watch.is_alive():
            self._watch.join(END_SECONDS)

    def _begin(self) -> tuple[str, str]:
        command = [sys.executable, "-m", "lorimer.cli.main", "serve", "--port", self._port, *self._flags]
        with self._log.open("ab") as log:
            # A session of its own: Ctrl-C ends this program first, which then ends the server in order.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := ADDRESS.search(line):
                threading.Thread(target=self._drain, args=(self._process,), daemon=True).start()
                return found[1], found[2]
        self._process.stdout.close()
        self._process.wait()
        raise LorimerError(f"the server of this program could not start: {self._last_words()}")

    def _drain(self, process: "subprocess.Popen[str]") -> None:
        """Its other lines are of no use here, but a full pipe would stop it."""
        assert process.stdout is not None
        with process.stdout:
            for _ in process.stdout:
                pass

    def _restart_when_killed(self) -> None:
        for _ in range(MAX_RESTARTS):
            assert self._process is not None
            code = self._process.wait()
            if self._is_ending.is_set() or code in IN_ORDER:
                return
            self._tell(f"the server was ended ({code}) and is started again; the run goes on")
            try:
                self._begin()
            except LorimerError as error:
                self._tell(str(error))
                return

    def _last_words(self) -> str:
        lines = self._log.read_text("utf-8", "replace").strip().splitlines()
        return lines[-1].removeprefix("lorimer: ") if lines else "it said nothing"
