"""The SSRF guard: the URLs of clients may lead to public addresses only.

A name may resolve to an address of the private network, or to another one when it is resolved again. So all of its
addresses are checked, and one of these is connected to.
"""

import asyncio
import ipaddress
import socket
from typing import Protocol

from cairn.errors import InvalidRequest

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_METADATA = frozenset(map(ipaddress.ip_address, ("168.63.129.16", "100.100.100.200", "192.0.0.192")))
"""Metadata services of clouds outside the private ranges."""


class Resolver(Protocol):
    """Resolves host names."""

    async def addresses(self, host: str, port: int) -> list[str]:
        """All addresses of a host. Raises OSError or UnicodeError if there are none."""


class SystemResolver:
    """The machine's own resolver."""

    async def addresses(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        entries = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def is_public(address: str) -> bool:
    """Whether this is no private, loopback, link-local, multicast, reserved or metadata address, in any notation."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.sixtofour is not None or ip.teredo is not None or ip.scope_id is not None or ip.is_site_local:
            return False
        if ip in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
    inner = ip.is_private or ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_reserved
    return ip.is_global and not inner and not ip.is_unspecified and ip not in _METADATA


async def resolve_public(resolver: Resolver, host: str, port: int) -> list[str]:
    """The host's addresses. Raises InvalidRequest unless it has some and all are public."""
    try:
        addresses = await resolver.addresses(host, port)
    except (OSError, UnicodeError):
        addresses = []
    if not addresses:
        raise InvalidRequest(f"the host {host!r} cannot be resolved")
    if not all(map(is_public, addresses)):
        raise InvalidRequest(f"the host {host!r} is no public one: private addresses are not fetched from")
    return addresses
