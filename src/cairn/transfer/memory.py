"""A rank's pool as transfers see it: where it lies, and when a step may read what has arrived in it."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cairn.transfer.links.contract import Region

Fence: TypeAlias = Callable[[], bool]
"""Whether it has been passed. Never waits: it is called again and again."""


class PoolMemory(Protocol):
    """uint8 [num_pages, page_bytes] on the host or on a device.

    A link writes into it behind the back of everything else. Where that is memory of a device, the host sees no byte of
    it, and a step that is launched later sees what has arrived only once a fence has been passed.
    """

    @property
    def region(self) -> Region:
        """What a link registers."""

    def enter_thread(self) -> None:
        """To be called first in a thread that drives a link on this memory."""

    def fence(self) -> Fence:
        """Passed when all bytes that a link has reported so far are seen by every step that is launched from then
        on."""


class HostPool:
    """A `PoolMemory` on the host, which all threads have, and where what has arrived is seen. `pool`: uint8 [num_pages,
    page_bytes], contiguous."""

    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self.region = Region.of(pool)

    def enter_thread(self) -> None:
        """Nothing to do."""

    def fence(self) -> Fence:
        return lambda: True
