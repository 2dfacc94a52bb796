"""Validates ``Host`` and ``Origin``, so that a web page cannot reach the server through a browser.

A page of another site can make its own name resolve to 127.0.0.1 (DNS rebinding); its requests then carry that name as
``Host``. A page can also post to this server directly; those requests carry its ``Origin``.
"""

import ipaddress
import re
import socket
from urllib.parse import urlsplit

from lorimer.server.settings import Settings

LOOPBACK = {"localhost", "127.0.0.1", "::1"}
EVERY_ADDRESS = {"0.0.0.0", "::"}
_NAME = re.compile(r"([a-z0-9._-]+)(?::[0-9]{0,5})?", re.IGNORECASE | re.ASCII)
_BRACKETED = re.compile(r"\[([^\[\]]+)\](?::[0-9]{0,5})?")


class HostRule:
    """The host names that this server answers to."""

    def __init__(self, settings: Settings) -> None:
        allowed = {host.lower() for host in settings.allowed_hosts}
        self._any = "*" in allowed
        self._suffixes = tuple(host[1:] for host in allowed if host.startswith("*."))
        self._names = LOOPBACK | {settings.host.lower()} | allowed
        self._addresses = settings.host in EVERY_ADDRESS
        if self._addresses:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    def allows(self, host: str) -> bool:
        """Return whether a ``Host`` header is allowed, on any port."""
        name = host_name(host)
        if name is None:
            return False
        if self._any or name in self._names or name.endswith(self._suffixes or ("\0",)):
            return True
        return self._addresses and is_address(name)  # an address needs no DNS, so it cannot be rebound


def host_name(host: str) -> str | None:
    """Return the name in ``name:port`` or ``[address]:port`` in lower case, or none if ``host`` is neither.

    The whole text must match: ``urlsplit`` reads ``[::1].evil.test`` as ``::1``.
    """
    if found := _NAME.fullmatch(host):
        return found[1].lower().rstrip(".") or None
    if (found := _BRACKETED.fullmatch(host)) and is_address(found[1]):
        return found[1].lower()
    return None


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_same_origin(origin: str, host: str) -> bool:
    """Return whether ``Origin`` names the same server as ``Host``. The scheme may differ, as behind a TLS proxy."""
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False
