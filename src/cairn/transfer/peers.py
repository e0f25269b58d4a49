"""Which hosts may be spoken to at all, decided before any connection and without asking a name server."""

import ipaddress
from collections.abc import Iterable

from cairn.errors import ConfigError

_LOOPBACK_NAMES = frozenset({"localhost"})
_MAX_HOST = 253

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class PeerPolicy:
    """An allow-list of addresses, networks (`10.0.0.0/8`) and exact host names; loopback is always on it.

    Without a shared secret nothing but loopback is allowed, whatever the list says: whoever may connect learns how
    to read and write this server's memory.
    """

    def __init__(self, allowed: Iterable[str] = (), *, has_secret: bool = False) -> None:
        """Raises ConfigError for an entry that is neither."""
        names, networks = set(), []
        for entry in allowed:
            network = _network(entry)
            if network is not None:
                networks.append(network)
            elif _is_name(entry):
                names.add(entry.lower())
            else:
                raise ConfigError(f"--kv-peer-allowlist: {entry!r} is no host name, address or network like 10.0.0.0/8")
        self._names = frozenset(names)
        self._networks = tuple(networks)
        self._has_secret = has_secret

    def refusal(self, host: str) -> str | None:
        """Why this host is refused, or None when it may be connected to (or bound to)."""
        if is_loopback(host):
            return None
        address = _address(host)
        if address is None:
            listed = host.lower() in self._names
        else:
            listed = any(address in network for network in self._networks)
        if not listed:
            return "is not on --kv-peer-allowlist"
        if not self._has_secret:
            return "is not loopback, and without --kv-secret-file only loopback peers are allowed"
        return None


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, judged by its text alone."""
    address = _address(host)
    return host.lower() in _LOOPBACK_NAMES if address is None else address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    if len(host) > _MAX_HOST or "%" in host:
        return None
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _network(entry: str) -> _Network | None:
    try:
        return None if "%" in entry else ipaddress.ip_network(entry)
    except ValueError:
        return None


def _is_name(entry: str) -> bool:
    """What ends in a number is an address that somebody has mistyped, and what follows `0x` one in disguise."""
    labels = entry.lower().removesuffix(".").split(".")
    return (
        0 < len(entry) <= _MAX_HOST
        and set(entry.lower()) <= set("abcdefghijklmnopqrstuvwxyz0123456789-._")
        and all(labels)
        and not labels[-1].isdigit()
        and not labels[-1].startswith("0x")
    )
