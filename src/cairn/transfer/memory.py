"""A rank's pool as transfers see it: where it lies, and when a step may read what has arrived in it."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cairn.transfer.links.contract import Region

Fence: TypeAlias = Callable[[], bool]
"""Whether it has been passed. Never waits: it is called again and again."""


class PoolMemory:
    """`pool`: uint8 [num_pages, page_bytes], contiguous, on the host. `region`: what a link registers.

    A link writes into it behind the back of everything else. Memory of the host all threads have, and what has arrived
    is seen. Where it is memory of a device, in a subclass, the host sees no byte of it, and a step that is launched
    later sees what has arrived only once a fence has been passed.
    """

    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self.region = Region.of(pool)

    def enter_thread(self) -> None:
        """To be called first in a thread that drives a link on this memory."""

    def fence(self) -> Fence:
        """Passed when all bytes that a link has reported so far are seen by every step that is launched from then
        on."""
        return lambda: True
