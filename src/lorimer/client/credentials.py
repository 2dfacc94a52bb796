"""Which key a client shows: its argument, ``LORIMER_API_KEY``, ``TINKER_API_KEY``, a command's output, a stored one.

None at all is fine for a server that asks for no key. Keys are sent as they are; a token is fetched for one only to
read from it who is calling.
"""

import asyncio
import json
import os
import time
from pathlib import Path

from lorimer.client.errors import TinkerError

KEY_VARIABLES = ("LORIMER_API_KEY", "TINKER_API_KEY")
COMMAND_VARIABLE = "TINKER_CREDENTIAL_CMD"
COMMAND_SECONDS = 300.0
"""How long the output of a command is used."""


def static_key(api_key: str | None = None) -> str | None:
    """The key given or configured, without running a command."""
    given = api_key or next((value for name in KEY_VARIABLES if (value := os.environ.get(name))), None)
    return given or stored_key()


def stored_key() -> str | None:
    """The default key of ``~/.tinker/credentials.json``, which ``tinker auth login`` writes."""
    try:
        stored = json.loads(Path("~/.tinker/credentials.json").expanduser().read_text("utf-8"))
        key = stored["keys"][stored["default"]]["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return key if isinstance(key, str) and key else None


class Credentials:
    def __init__(self, api_key: str | None = None) -> None:
        has_key = bool(api_key or any(os.environ.get(name) for name in KEY_VARIABLES))
        self._command = "" if has_key else os.environ.get(COMMAND_VARIABLE, "")
        self._key = "" if self._command else static_key(api_key) or ""
        self._until = 0.0
        self._lock = asyncio.Lock()

    @property
    def key(self) -> str | None:
        """The key for a copy of the client in another process; a command is run there again."""
        return None if self._command else self._key or None

    async def header(self) -> dict[str, str]:
        if self._command and time.monotonic() >= self._until:
            async with self._lock:
                if time.monotonic() >= self._until:
                    self._key = await _output(self._command)
                    self._until = time.monotonic() + COMMAND_SECONDS
        return {"X-API-Key": self._key} if self._key else {}


async def _output(command: str) -> str:
    process = await asyncio.create_subprocess_shell(
        command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    credential = output.decode("utf-8", "replace").strip()
    if process.returncode or not credential:
        reason = errors.decode("utf-8", "replace").strip()[-500:]
        raise TinkerError(f"{COMMAND_VARIABLE} gave no credential (exit code {process.returncode}): {reason}")
    return credential
