"""The pool as tiers see it: whole pages, copied out of it and into it beside the steps."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from cairn.tiers.lanes import rest
from cairn.tiers.store import PIECE_BYTES, PageBytes
from cairn.types import Pages


class TierMemory(Protocol):
    """The pages of one rank's pool. Its methods are called by the threads of `cairn.tiers.lanes`."""

    def copy_out(self, pages: Pages) -> PageBytes:
        """The bytes of `pages`, which may be named more than once, shape [n, page_bytes]. All steps that have written
        them have been applied."""
        ...

    def copy_in(self, pages: Pages, fill: Callable[[Sequence[PageBytes]], bool]) -> bool:
        """Have `fill` write a row of bytes for each of `pages`, which are nobody's, and see to it that steps that are
        launched from now on read them. What `fill` returns; after False the pages may hold anything."""
        ...


class HostTierMemory:
    """A `TierMemory` of a pool on the host, uint8 [num_pages, page_bytes], contiguous."""

    def __init__(self, pool: PageBytes) -> None:
        self._pool = pool

    def copy_out(self, pages: Pages) -> PageBytes:
        copied = np.empty((len(pages), self._pool.shape[1]), np.uint8)
        size = max(1, PIECE_BYTES // self._pool.shape[1])
        for first in range(0, len(pages), size):
            piece = slice(first, first + size)
            # unlike an index of pages it lets other threads go on
            np.take(self._pool, pages[piece], axis=0, out=copied[piece], mode="clip")
            rest()
        return copied

    def copy_in(self, pages: Pages, fill: Callable[[Sequence[PageBytes]], bool]) -> bool:
        return fill([self._pool[page] for page in pages.tolist()])
