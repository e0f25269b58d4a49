"""The pool of pages: reference counts by page number, and the free list."""

import numpy as np
from numpy.typing import NDArray

from cairn.types import Pages

_ONE = np.array(1, np.int32)
"""A Python number takes twice as long to add."""


class PagePool:
    """`num_pages` interchangeable pages. A page is free exactly when its count is 0.

    The free pages are a stack in `_free[:num_free]`, so that pages in recent use are used again first.
    """

    def __init__(self, num_pages: int) -> None:
        if not 1 <= num_pages <= np.iinfo(np.int32).max:
            raise ValueError(f"num_pages must be between 1 and 2**31 - 1, not {num_pages}")
        self.num_pages = num_pages
        self.num_free = num_pages
        self.counts: NDArray[np.int32] = np.zeros(num_pages, np.int32)
        # as numpy likes indices best: with others an access takes several times as long
        self._free: NDArray[np.intp] = np.arange(num_pages - 1, -1, -1, dtype=np.intp)

    def allocate(self, num: int) -> Pages:
        """`num` free pages, shape [num], each with count 1. The caller has seen to it that there are so many."""
        assert num <= self.num_free, f"{num} pages asked for, {self.num_free} free"
        self.num_free -= num
        places = self._free[self.num_free : self.num_free + num][::-1]
        self.counts[places] = 1
        return places.astype(np.int32)

    def acquire(self, pages: Pages) -> None:
        """Refer once more to each of `pages`, which must be distinct and in use."""
        places = pages.astype(np.intp)
        # in one statement, numpy takes twice as long
        counts = self.counts[places]
        self.counts[places] = counts + _ONE

    def release(self, pages: Pages) -> int:
        """Refer once less to each of `pages`, which must be distinct. Returns how many became free."""
        places = pages.astype(np.intp)
        counts = self.counts[places]
        counts -= _ONE
        self.counts[places] = counts
        freed = places[counts == 0] if np.count_nonzero(counts) else places
        self._free[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)
        return len(freed)

    def free_pages(self) -> Pages:
        """The free pages, for the audit."""
        return self._free[: self.num_free].astype(np.int32)
