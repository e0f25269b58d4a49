"""Which hosts may be connected to, decided before any connection and without a name server; which do not answer."""

import ipaddress
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TypeAlias, TypeVar

from cairn.errors import ConfigError
from cairn.types import Clock

_MAX_HOST = 253

_Parsed = TypeVar("_Parsed")

Address: TypeAlias = tuple[str, int]
"""Host and port of a peer's side channel."""

_MAX_PEERS = 1024


class PeerPolicy:
    """An allow-list of addresses, networks (`10.0.0.0/8`) and exact host names; loopback is always on it.

    Without a shared secret only loopback is allowed, whatever the list says: a peer learns how to read and write this
    server's memory.
    """

    def __init__(self, allowed: Iterable[str] = (), *, has_secret: bool = False) -> None:
        """Raises ConfigError for an entry that is neither."""
        names, networks = set(), []
        for entry in allowed:
            network = _parsed(entry, ipaddress.ip_network)
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
        address = _parsed(host, ipaddress.ip_address)
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
    address = _parsed(host, ipaddress.ip_address)
    return host.lower() == "localhost" if address is None else address.is_loopback


def _parsed(text: str, kind: Callable[[str], _Parsed]) -> _Parsed | None:
    """The address or network that a text is, None for other texts. One of a zone is none that can be listed."""
    try:
        return None if "%" in text else kind(text)
    except ValueError:
        return None


def _is_name(entry: str) -> bool:
    """Whether this is a host name. One that ends in a number is a mistyped address; `0x` begins an address, too."""
    labels = entry.lower().removesuffix(".").split(".")
    return (
        0 < len(entry) <= _MAX_HOST
        and set(entry.lower()) <= set("abcdefghijklmnopqrstuvwxyz0123456789-._")
        and all(labels)
        and not labels[-1].isdigit()
        and not labels[-1].startswith("0x")
    )


class UnresponsivePeers:
    """Servers that did not answer within the last `seconds`, the latest 1,024 of them: by address and engine id, so one
    that was restarted at the same address is not avoided. `num_skipped`: transfers that were not tried."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._retry_at: OrderedDict[tuple[Address, str], float] = OrderedDict()
        self.num_skipped = 0

    def add(self, address: Address, engine_id: str) -> None:
        """The peer did not answer within the time it had."""
        self._retry_at[address, engine_id] = self._clock.now() + self._seconds
        self._retry_at.move_to_end((address, engine_id))
        if len(self._retry_at) > _MAX_PEERS:
            self._retry_at.popitem(last=False)

    def remove(self, address: Address) -> None:
        """Whoever is at this address has answered."""
        for peer in [peer for peer in self._retry_at if peer[0] == address]:
            del self._retry_at[peer]

    def refuse(self, address: Address, engine_id: str) -> str | None:
        """Why a transfer from this peer is not tried now, or None. After `seconds` one caller gets None: it probes the
        peer, and the others are refused until it was answered, or again not."""
        retry_at = self._retry_at.get((address, engine_id))
        if retry_at is None:
            return None
        if self._clock.now() < retry_at:
            self.num_skipped += 1
            return f"the peer did not answer within the last {self._seconds:g} s"
        self.add(address, engine_id)
        return None
