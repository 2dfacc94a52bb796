"""From which address a request comes, and how many of each are held: one address must not take every place.

A proxy asks for others. Where it is one of ``trusted_proxies``, the address is the last in ``X-Forwarded-For`` that is
no such proxy; from anybody else that header says nothing.
"""

import ipaddress
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.types import Scope

from lorimer.server.settings import Settings

HOME_BITS = 64
"""Of an IPv6 address: the rest of it one machine can choose as it likes."""


class AddressLimiter:
    """Counts the requests that are held for each address."""

    def __init__(self, settings: Settings) -> None:
        self.most = settings.max_requests_per_address
        self._proxies = settings.proxy_networks()
        self._held: Counter[str] = Counter()

    @contextmanager
    def held(self, address: str) -> Iterator[bool]:
        """Count a request while it is held; gives whether there is room for it. Without an address it is our own."""
        self._held[address] += 1
        try:
            yield not address or self._held[address] <= self.most
        finally:
            self._held[address] -= 1
            if not self._held[address]:
                del self._held[address]

    def address_of(self, scope: Scope) -> str:
        """Where a request comes from; for IPv6 the network of a household, as one machine has many addresses."""
        address = (scope.get("client") or ("",))[0]
        if self._proxies and self._is_proxy(address):
            forwarded = ",".join(Headers(scope=scope).getlist("x-forwarded-for")).split(",")
            named = [part.strip() for part in forwarded if part.strip()]
            address = next((part for part in reversed(named) if not self._is_proxy(part)), address)
        return home_of(address)

    def _is_proxy(self, address: str) -> bool:
        try:
            found = plain(ipaddress.ip_address(address))
        except ValueError:
            return False
        return any(found in network for network in self._proxies)


def plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An IPv4 address that a socket for both kinds shows as IPv6, as itself."""
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


def home_of(address: str) -> str:
    if ":" not in address:
        return address
    try:
        found = plain(ipaddress.ip_address(address))
    except ValueError:
        return address
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, HOME_BITS), strict=False))
