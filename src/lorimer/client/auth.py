"""``lorimer.auth``, and the key a client sends: its argument, ``LORIMER_API_KEY``, ``TINKER_API_KEY``, the output of
a command, or a stored key, in this order.

A server that asks for no key needs none. Keys are sent unchanged; a token is fetched for a key only to read the
caller's identity from its claims.
"""

import asyncio
import base64
import binascii
import json
import os
import time
from pathlib import Path
from typing import Any

from lorimer.client.errors import TinkerError

__all__ = ["get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]

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


def claims_of(token: str) -> dict[str, Any]:
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, ValueError, binascii.Error):
        raise TinkerError("the server's token is no JWT") from None
    if not isinstance(claims, dict):
        raise TinkerError("the server's token has no claims")
    return claims


def get_tinker_token() -> str | None:
    """The configured key; runs no command and asks no server."""
    return static_key()


def tinker_has_credentials() -> bool:
    """Whether a key, or a command that prints one, is configured."""
    return bool(static_key() or os.environ.get(COMMAND_VARIABLE))


def raise_if_tinker_not_accessible() -> None:
    """Ask the configured server once; raises a ``TinkerError`` that says why it cannot be used."""
    from lorimer.client.connection import Connection  # which imports this module

    connection = Connection()
    try:
        connection.run(connection.transport.call("GET", "/api/v1/get_server_capabilities", patience=0)).result()
    except TinkerError:
        raise
    except Exception as error:
        raise TinkerError(str(error)) from error
    finally:
        connection.close()
