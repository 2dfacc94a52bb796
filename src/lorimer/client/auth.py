"""``lorimer.auth``: whether a credential is configured, and whether the server takes it."""

import os

from lorimer.client.connection import Connection
from lorimer.client.credentials import COMMAND_VARIABLE, static_key
from lorimer.client.errors import TinkerError

__all__ = ["get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]


def get_tinker_token() -> str | None:
    """The configured key; runs no command and asks no server."""
    return static_key()


def tinker_has_credentials() -> bool:
    """Whether a key, or a command that prints one, is configured."""
    return bool(static_key() or os.environ.get(COMMAND_VARIABLE))


def raise_if_tinker_not_accessible() -> None:
    """Ask the configured server once; raises a ``TinkerError`` that says why it cannot be used."""
    connection = Connection()
    try:
        connection.run(connection.transport.call("GET", "/api/v1/get_server_capabilities", patience=0)).result()
    except TinkerError:
        raise
    except Exception as error:
        raise TinkerError(str(error)) from error
    finally:
        connection.close()
