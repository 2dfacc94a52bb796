"""Limits the concurrent requests of each client address, so that one address cannot take every slot.

A proxy forwards requests for others. If the peer is one of ``trusted_proxies``, the client address is the last entry of
``X-Forwarded-For`` that is not a trusted proxy; from any other peer the header is ignored.
"""

import ipaddress
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.types import Scope

from lorimer.server.settings import Settings

IPV6_PREFIX_BITS = 64
"""Prefix length by which IPv6 addresses are grouped: one machine can choose the remaining bits freely."""


class AddressLimiter:
    """Counts the requests held for each client address."""

    def __init__(self, settings: Settings) -> None:
        self.max_requests = settings.max_requests_per_address
        self._proxies = settings.proxy_networks()
        self._held: Counter[str] = Counter()

    @contextmanager
    def held(self, address: str) -> Iterator[bool]:
        """Count a request while the block runs; yield whether it is within the limit.

        A request without an address is in-process.
        """
        self._held[address] += 1
        try:
            yield not address or self._held[address] <= self.max_requests
        finally:
            self._held[address] -= 1
            if not self._held[address]:
                del self._held[address]

    def address_of(self, scope: Scope) -> str:
        """Return the client address of a request; for IPv6 its /64 network, because one machine has many addresses."""
        address = (scope.get("client") or ("",))[0]
        if self._proxies and self._is_proxy(address):
            forwarded = ",".join(Headers(scope=scope).getlist("x-forwarded-for")).split(",")
            named = [part.strip() for part in forwarded if part.strip()]
            address = next((part for part in reversed(named) if not self._is_proxy(part)), address)
        return network_of(address)

    def _is_proxy(self, address: str) -> bool:
        try:
            found = plain(ipaddress.ip_address(address))
        except ValueError:
            return False
        return any(found in network for network in self._proxies)


def plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the IPv4 address of an IPv4-mapped IPv6 address, which a dual-stack socket reports."""
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


def network_of(address: str) -> str:
    """Return the key by which an address is counted: an IPv4 address, or the /64 network of an IPv6 address."""
    if ":" not in address:
        return address
    try:
        found = plain(ipaddress.ip_address(address))
    except ValueError:
        return address
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, IPV6_PREFIX_BITS), strict=False))
