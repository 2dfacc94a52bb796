"""Runs commands of ``lorimer`` in child processes: trainings and checks of data, whose code the server does not load.

A child talks to the server over HTTP as any client does. Its environment has a credential and none of the server's own
variables. It ends with the server, also if that is killed (``cli/child.py``).
"""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lorimer.server.errors import Refusal

MODULE = "lorimer.cli.child"
KEPT = ("PATH", "PYTHONPATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "XDG_CACHE_HOME", "HF_HOME")
"""Variables of the server that a child gets: where programs and caches are, and no credentials."""
MAX_ERROR_CHARS = 2000
TAIL_BYTES = 16 * 1024
NO_MEMORY = re.compile("MemoryError|allocate memory|memory allocation|start new thread", re.IGNORECASE)
"""What a process says last when an allocation fails."""


class ChildCommand:
    """A command that runs in ``directory``; what it prints goes to the files ``result`` and ``output`` there."""

    RESULT, OUTPUT = "result.json", "output.log"

    def __init__(
        self, process: asyncio.subprocess.Process, lifeline: int, directory: Path, max_memory_bytes: int
    ) -> None:
        self._process, self._lifeline, self._directory = process, lifeline, directory
        self._max_memory_bytes = max_memory_bytes

    @classmethod
    async def start(
        cls, arguments: Sequence[str], directory: Path, url: str, credential: str, max_memory_bytes: int = 0
    ) -> "ChildCommand":
        """Start a command; 0 bytes set no limit. What a recipe prints is all for people, and goes to the output."""
        variables = {name: os.environ[name] for name in KEPT if name in os.environ}
        # Without a credential a client would look for one in the home directory of the server's user.
        variables |= {"LORIMER_BASE_URL": url, "LORIMER_API_KEY": credential or "tml-local", "OMP_NUM_THREADS": "1"}
        variables |= {"PYTHONSAFEPATH": "1"}  # files of users are in the directory
        variables |= {"TYPER_USE_RICH": "0"}  # an error is the last line, not a box around it
        is_recipe = arguments[:2] == ["recipe", "run"]
        read, write = os.pipe()
        try:
            with (directory / cls.RESULT).open("wb") as result, (directory / cls.OUTPUT).open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-u", "-m", MODULE, str(read), str(max_memory_bytes), *arguments),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output if is_recipe else result,
                    stderr=output,
                    cwd=directory,
                    env=variables,
                    pass_fds=[read],
                    start_new_session=True,
                )
        except BaseException:
            os.close(write)
            raise
        finally:
            os.close(read)
        return cls(process, write, directory, max_memory_bytes)

    async def wait(self) -> int:
        """Return the exit code, after all processes of the command have ended."""
        try:
            return await self._process.wait()
        finally:
            self.kill()
            os.close(self._lifeline)

    def interrupt(self) -> None:
        """Ask the command to end, as Ctrl-C does."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill the command and the processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def error(self) -> str:
        """Return the sentence with which the command failed: its last line."""
        lines = [line for line in read_tail(self._directory / self.OUTPUT).splitlines() if line.strip()]
        if not lines:
            return "it printed nothing"
        last = lines[-1].removeprefix("lorimer: ").removeprefix("Error: ")[-MAX_ERROR_CHARS:]
        if self._max_memory_bytes and NO_MEMORY.search(last):
            return f"it needed more than the {self._max_memory_bytes} bytes it may have (training_memory_bytes): {last}"
        return last


async def run_briefly(
    arguments: Sequence[str], directory: Path, url: str, credential: str, timeout_seconds: float
) -> tuple[int, bytes, str]:
    """Run a command to its end. Return its exit code, what it printed, and its last words; 503 if it takes too long."""
    child = await ChildCommand.start(arguments, directory, url, credential)
    waiting = asyncio.create_task(child.wait())
    try:
        async with asyncio.timeout(timeout_seconds):
            code = await asyncio.shield(waiting)
    except TimeoutError:
        detail = f"this took longer than {timeout_seconds:g} s (data_check_seconds) and was given up"
        raise Refusal(503, "too_slow", detail) from None
    finally:
        child.kill()
        await asyncio.wait({waiting})
    printed = await asyncio.to_thread((directory / ChildCommand.RESULT).read_bytes)
    return code, printed, child.error()


def read_tail(path: Path, max_bytes: int = TAIL_BYTES) -> str:
    """Return the last whole lines of a file; nothing if there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            found = file.read(max_bytes)
    except FileNotFoundError:
        return ""
    whole = found if size <= max_bytes else found.partition(b"\n")[2]
    return whole.decode("utf-8", "replace").replace("\r", "\n")


def own_address(url: str) -> str:
    """Return the address at which a child on this machine reaches the server."""
    if not url:
        detail = "this server is part of a program and listens on no address; start one with `lorimer serve`"
        raise Refusal(409, "not_listening", detail)
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
