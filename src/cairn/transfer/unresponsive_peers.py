"""Peers that did not answer lately: one transfer in a while tries them again, the others are spared the wait."""

from collections import OrderedDict
from typing import TypeAlias

from cairn.types import Clock

Address: TypeAlias = tuple[str, int]
"""Host and port of a peer's side channel."""

_MAX_PEERS = 1024


class UnresponsivePeers:
    """The addresses that were silent within the last `seconds`, at most 1,024 of them; the oldest is forgotten first.
    `num_skipped`: transfers that were not tried."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._retry_at: OrderedDict[Address, float] = OrderedDict()
        self.num_skipped = 0

    def __len__(self) -> int:
        return len(self._retry_at)

    def add(self, address: Address) -> None:
        """The peer did not answer within the time it had."""
        self._retry_at[address] = self._clock.now() + self._seconds
        self._retry_at.move_to_end(address)
        if len(self._retry_at) > _MAX_PEERS:
            self._retry_at.popitem(last=False)

    def remove(self, address: Address) -> None:
        """The peer has answered."""
        self._retry_at.pop(address, None)

    def refuse(self, address: Address) -> str | None:
        """Why a transfer from this peer is not worth a try now, or None. Whoever is told None for a peer that was
        silent is its probe: until that is answered, or again not, the others are refused."""
        retry_at = self._retry_at.get(address)
        if retry_at is None:
            return None
        if self._clock.now() < retry_at:
            self.num_skipped += 1
            return f"the peer did not answer within the last {self._seconds:g} s"
        self.add(address)
        return None
