"""The pool as tiers see it: whole pages, copied out of it and into it beside the steps."""

import mmap
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from cairn.machine import map_memory
from cairn.tiers.lanes import rest
from cairn.tiers.store import PIECE_BYTES, PageBytes
from cairn.types import Pages


class CopyFailed(Exception):
    """Pages have not been copied. `copies`: those that still go on. Never leaves the tiers."""

    def __init__(self, text: str, copies: "Iterable[Future[str]]" = ()) -> None:
        super().__init__(text)
        self._copies = tuple(copies)

    @property
    def is_over(self) -> bool:
        """Whether nothing is written for this copy any more."""
        return all(each.done() for each in self._copies)


class TierMemory(Protocol):
    """The pages of a server's pool. Its methods are called by the threads of `cairn.tiers.lanes`."""

    def copy_out(self, pages: Pages) -> PageBytes:
        """The bytes of `pages`, which may be named more than once, shape [n, page_bytes]. All steps that have written
        them have been applied. Raises CopyFailed."""

    def copy_in(self, pages: Pages, fill: Callable[[Sequence[PageBytes]], bool]) -> bool:
        """Have `fill` write a row of bytes for each of `pages`, which are nobody's, and see to it that steps that are
        launched from now on read them. What `fill` returns; after False the pages may hold anything. Raises
        CopyFailed: then they may be written to until it `is_over`."""


class ReusedMemory:
    """Memory for copies, used again once nobody has an array in it: the first touch of new memory takes longer than the
    copy, and a huge page of it at once, 2 ns a byte on some virtual machines. Keeps `num_kept` pieces at most. One
    thread asks for it, and any lets go of it."""

    def __init__(self, num_kept: int = 2) -> None:
        self._num_kept = num_kept
        self._free = list[mmap.mmap]()

    def rows(self, num_rows: int, row_bytes: int) -> PageBytes:
        """uint8 [num_rows, row_bytes], of any contents."""
        num_bytes = num_rows * row_bytes
        if not num_bytes:
            return np.empty((num_rows, row_bytes), np.uint8)
        memory = self._free.pop() if self._free else None
        if memory is None or len(memory) < num_bytes:
            memory = map_memory(num_bytes)
        # views of it keep it alive, whatever they are views of
        whole = np.frombuffer(memory, np.uint8, num_bytes)
        weakref.finalize(whole, self._take_back, memory).atexit = False
        return whole.reshape(num_rows, row_bytes)

    def _take_back(self, memory: mmap.mmap) -> None:
        if len(self._free) < self._num_kept:
            self._free.append(memory)


class HostTierMemory:
    """A `TierMemory` of a pool on the host, uint8 [num_pages, page_bytes], contiguous."""

    def __init__(self, pool: PageBytes) -> None:
        self._pool = pool
        self._copies = ReusedMemory()

    def copy_out(self, pages: Pages) -> PageBytes:
        copied = self._copies.rows(len(pages), self._pool.shape[1])
        size = max(1, PIECE_BYTES // self._pool.shape[1])
        for first in range(0, len(pages), size):
            piece = slice(first, first + size)
            # unlike an index of pages it lets other threads go on
            np.take(self._pool, pages[piece], axis=0, out=copied[piece], mode="clip")
            rest()
        return copied

    def copy_in(self, pages: Pages, fill: Callable[[Sequence[PageBytes]], bool]) -> bool:
        return fill([self._pool[page] for page in pages.tolist()])
