"""A rank's pool as transfers see it: where it lies, how staged bytes are laid out in it, and when a step may read what
has arrived."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cairn.transfer.geometry import GroupPairing
from cairn.transfer.links.contract import Region
from cairn.transfer.token_copies import TokenCopies, lay_out

Fence: TypeAlias = Callable[[], bool]
"""Whether it has been passed. Never waits: it is called again and again."""


class PoolMemory(Protocol):
    """uint8 [rows, page_bytes] on the host or on a device: the scheduler's pages, and staging pages after them.

    A link writes into it behind the back of everything else. Where that is memory of a device, the host sees no byte of
    it, and a step that is launched later sees what has arrived only once a fence has been passed.
    """

    @property
    def region(self) -> Region:
        """What a link registers."""

    def enter_thread(self) -> None:
        """To be called first in a thread that drives a link on this memory."""

    def lay_out(self, pairing: GroupPairing, copies: TokenCopies, first_page: int) -> None:
        """Carry the copies out, from slots that lie back to back from staging page `first_page` on. They may go on
        after the call: the slots must stay, and the pages are somebody's, until a fence made later has been passed."""

    def fence(self) -> Fence:
        """Passed when all copies so far are done, and those and all bytes that a link has reported so far are seen by
        every step that is launched from then on."""


class HostPool:
    """A `PoolMemory` on the host. `pool`: uint8 [rows, page_bytes], contiguous."""

    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self.region = Region.of(pool)
        self._pool = pool

    def enter_thread(self) -> None:
        """Nothing to do: all threads have the same memory."""

    def lay_out(self, pairing: GroupPairing, copies: TokenCopies, first_page: int) -> None:
        lay_out(pairing, copies, self._pool[first_page:], self._pool)

    def fence(self) -> Fence:
        """What has arrived is seen, and copies are done when they return."""
        return lambda: True
