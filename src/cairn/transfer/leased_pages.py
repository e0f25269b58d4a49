"""Which pages are leased. Leases of prompts that begin alike name the same pages."""

import numpy as np
from numpy.typing import NDArray

from cairn.types import Pages


class LeasedPages:
    """Counts by page how many leases name it: a page that several leases share counts once."""

    def __init__(self) -> None:
        self._counts: NDArray[np.int32] = np.zeros(0, np.int32)
        self._num_pages = 0

    def __len__(self) -> int:
        """Distinct pages that are leased."""
        return self._num_pages

    def num_with(self, pages: Pages) -> int:
        """How many distinct pages would be leased if `pages` (any shape [n], in any order) were leased as well."""
        distinct = np.unique(pages)
        known = distinct[distinct < len(self._counts)]
        return self._num_pages + len(distinct) - int(np.count_nonzero(self._counts[known]))

    def add(self, pages: Pages) -> None:
        """One more lease names `pages`."""
        self._num_pages = self.num_with(pages)
        distinct = np.unique(pages)
        if len(distinct) and distinct[-1] >= len(self._counts):
            more = int(distinct[-1]) + 1 - len(self._counts)
            self._counts = np.concatenate([self._counts, np.zeros(more, np.int32)])
        self._counts[distinct] += 1

    def remove(self, pages: Pages) -> None:
        """A lease that named `pages` has ended."""
        distinct = np.unique(pages)
        self._counts[distinct] -= 1
        self._num_pages -= int(np.count_nonzero(self._counts[distinct] == 0))
