"""Starts a program of ``bench/drivers`` in its peer's environment and asks it, a line of JSON each way.

Its log goes to a file. If it fails, the first exception that was logged during the call is the likeliest reason:
libraries with several processes raise another one where they notice.
"""

import json
import os
import re
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.environments import ROOT
from bench.timing import PeerFailed

MAX_CALL_SECONDS = 1200
END_SECONDS = 60
MAX_REASON = 240
_EXCEPTION = re.compile(r"\b([A-Z]\w*(?:Error|Exception): .+)$", re.MULTILINE)
_FOLDERS = re.compile(r"(?:/[\w.+-]+)+/")


class DriverProcess:
    def __init__(
        self, python: Path, module: str, log: Path, variables: dict[str, str], settings: dict[str, Any]
    ) -> None:
        """Start the program and wait until its peer is open."""
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [python, "-m", module],
                cwd=ROOT,
                env=inherited | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                # Peers start processes of their own; ``close`` ends the whole group.
                start_new_session=True,
            )
        try:
            self._exchange(settings)
        except PeerFailed:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, call: str, **arguments: Any) -> Any:
        """Return the result of a call. Raise ``PeerFailed`` if it has none."""
        return self._exchange({"call": call} | arguments)

    def _exchange(self, message: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        start = self._log.stat().st_size
        alarm = threading.Timer(MAX_CALL_SECONDS, self._process.kill)
        alarm.start()
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            alarm.cancel()
        answer = json.loads(line) if line else {"error": f"its process ended with {self._process.wait()}"}
        if "error" in answer:
            with self._log.open(errors="replace") as file:
                file.seek(start)
                logged = _EXCEPTION.search(file.read())
            raise PeerFailed(shorten(logged[1] if logged else answer["error"]))
        return answer["result"]

    def close(self) -> None:
        """End the program, and by force what it leaves behind."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


def shorten(reason: str) -> str:
    """Return a reason as it fits into a table: one line, without folders of this machine."""
    text = _FOLDERS.sub("", " ".join(reason.split())).replace("|", "/")
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}…"
