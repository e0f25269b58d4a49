"""Tiers below the cache of a replay: the server's own stores and rules, with pages that take one byte each."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from cairn.cache.layout import CacheLayout
from cairn.cache.prefix_cache import PrefixCache
from cairn.scheduler.transfers import Transfers
from cairn.tiers.context import TierContext
from cairn.tiers.demotion import Demoter
from cairn.tiers.digests import KEY_BYTES, EntryNames
from cairn.tiers.host import HostStore
from cairn.tiers.index import PathShape
from cairn.tiers.lanes import TierLanes
from cairn.tiers.promotion import TierSource
from cairn.tiers.store import PageBytes, TierCounters
from cairn.tiers.worth import WriteWorth
from cairn.types import Clock, Pages

Result = TypeVar("Result")

_IDENTITY = bytes(KEY_BYTES)


class _AtOnce:
    """A `Lane` whose tasks are done when they have been submitted."""

    rests = 0.0

    def submit(self, task: Callable[[], Result]) -> "Future[Result]":
        future: Future[Result] = Future()
        future.set_result(task())
        return future

    def pace(self, rests: float) -> None:
        """It never rests."""

    def close(self) -> None:
        """Nothing is left."""


class _NoMemory:
    """A `TierMemory` of pages that nobody looks at."""

    def copy_out(self, pages: Pages) -> PageBytes:
        return np.zeros((len(pages), 1), np.uint8)

    def copy_in(self, pages: Pages, fill: Callable[[Sequence[PageBytes]], bool]) -> bool:
        return fill(list(np.zeros((len(pages), 1), np.uint8)))


class _NoTime(TierCounters):
    """Bytes that move in no time."""

    @property
    def seconds_per_read_byte(self) -> float:
        return 0.0

    @property
    def seconds_per_written_byte(self) -> float:
        return 0.0


class _NoCost(WriteWorth):
    """Of writing that takes no time, however long it takes here."""

    def spend(self, kind: int, seconds: float) -> None:
        super().spend(kind, 0.0)


def _counted_store(name: str, num_bytes: int, layout: CacheLayout) -> HostStore:
    """A tier of `num_bytes`, called `name`."""
    store = HostStore(np.zeros((max(1, num_bytes // layout.page_bytes), 1), np.uint8), PathShape.of(layout))
    store.name, store.capacity, store.counters = name, num_bytes, _NoTime(num_bytes=num_bytes)
    return store


class ReplayedTiers:
    """Tiers of so many bytes by their names, the fastest first, if there are any. What is written and fetched takes no
    time."""

    def __init__(self, sizes: Mapping[str, int], cache: PrefixCache, transfers: Transfers, clock: Clock) -> None:
        self.stores = tuple(_counted_store(name, size, cache.layout) for name, size in sizes.items() if size)
        self._demoter: Demoter | None = None
        self._transfers = transfers
        if not self.stores:
            return
        context = TierContext(
            cache.layout,
            self.stores,
            EntryNames.of(cache.layout, _IDENTITY, _IDENTITY),
            _NoMemory(),
            TierLanes(*(_AtOnce() for _ in range(4))),
            clock,
            transfers.prefill_speed,
            cache.policy.exact,
            _NoCost(),
        )
        self._demoter = Demoter(cache, context)
        cache.observe(self._demoter)
        transfers.sources = (*transfers.sources, TierSource(context))
        transfers.sink = self._demoter

    @property
    def is_busy(self) -> bool:
        """Whether anything is to be written, or has been fetched and not been taken in."""
        if self._demoter is None:
            return False
        return not self._demoter.is_idle or bool(self._transfers.fetching or self._transfers.quarantine)
