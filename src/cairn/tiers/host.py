"""The tier in this machine's memory: an arena of pages, and the index of what is in them."""

import time
from collections.abc import Sequence

import numpy as np

from cairn.cache.pages import PagePool
from cairn.tiers.index import IndexedStore, PathShape, StoredEntry
from cairn.tiers.lanes import busy_time, rest
from cairn.tiers.store import PIECE_BYTES, EntryRead, NewEntry, PageBytes, TierCounters
from cairn.types import Pages


class HostStore(IndexedStore):
    """A `TierStore` in `arena`, uint8 [num_pages, page_bytes], contiguous."""

    name = "host"
    writable = True

    def __init__(self, arena: PageBytes, shape: PathShape) -> None:
        super().__init__(shape)
        self.counters = TierCounters(num_bytes=arena.nbytes)
        self.capacity = arena.nbytes
        self._arena = arena
        self._pool = PagePool(len(arena))

    def refresh(self) -> None:
        """Nobody else writes to it."""

    def read(self, reads: Sequence[EntryRead], deadline: float) -> bool:
        began, num_bytes = busy_time(), 0
        for each in reads:
            if time.monotonic() > deadline:
                return False
            with self._lock:
                entry = self._index.get(each.key)
                if entry is None:
                    return False
                # its pages stay, though it may be dropped meanwhile
                entry.readers += 1
            pages = _place(entry)[each.first : each.first + len(each.rows)]
            for page, row in zip(pages.tolist(), each.rows, strict=True):
                np.copyto(row, self._arena[page])
                num_bytes += row.nbytes
                rest()
            with self._lock:
                self._end_read(entry)
        with self._lock:
            self.counters.read_bytes += num_bytes
            self.counters.read_seconds += busy_time() - began
        return True

    def write(self, batch: Sequence[NewEntry], deadline: float) -> int:
        began, num_here = busy_time(), 0
        for new in batch:
            reason = "too_late" if time.monotonic() > deadline else self._write(new)
            if reason is None:
                num_here += 1
            else:
                with self._lock:
                    self.counters.drops[reason] += 1
        with self._lock:
            self.counters.write_seconds += busy_time() - began
        return num_here

    def close(self) -> None:
        """The arena goes with it."""

    def _write(self, new: NewEntry) -> str | None:
        """Keep one entry. Why it could not be kept; None if it is here."""
        facts = new.facts
        with self._lock:
            if self._index.get(facts.key) is not None:
                return None
            if not self._index.may_add(facts):
                return "no_parent"
            self._index.hold(facts.parent)
            fits = self._make_room(len(new.pages))
            pages = self._pool.allocate(len(new.pages)) if fits else None
        if pages is not None:
            # nobody knows of these pages yet
            at, most = 0, max(1, PIECE_BYTES // self._arena.shape[1])
            for run in _runs(pages, most):
                np.copyto(self._arena[run.start : run.stop], new.pages[at : at + len(run)])
                at += len(run)
                rest()
        with self._lock:
            # first: an entry is worth less where nothing else keeps what is above it
            self._index.release(facts.parent)
            if pages is not None:
                self._index.add(facts, pages)
                self.counters.written_bytes += new.pages.nbytes
                self.counters.num_entries = len(self._index)
        return None if pages is not None else "no_room"

    def _make_room(self, num_pages: int) -> bool:
        while self._pool.num_free < num_pages:
            gone = self._index.pop_least()
            if not gone:
                return False
            for entry in gone:
                entry.readers += 1
                self._end_read(entry)
                self.counters.drops["replaced"] += 1
            self.counters.num_entries = len(self._index)
        return True

    def _end_read(self, entry: StoredEntry) -> None:
        """The last reader of an entry that is gone gives its pages back."""
        entry.readers -= 1
        if entry.readers == 0 and self._index.get(entry.facts.key) is not entry:
            self._pool.release(_place(entry))


def _runs(pages: Pages, most: int) -> list[range]:
    """Pages in runs that lie side by side, of so many at most: each copy lets go of the interpreter, and has to wait
    for it afterwards."""
    runs = list[range]()
    for page in pages.tolist():
        if runs and page == runs[-1].stop and len(runs[-1]) < most:
            runs[-1] = range(runs[-1].start, page + 1)
        else:
            runs.append(range(page, page + 1))
    return runs


def _place(entry: StoredEntry) -> Pages:
    assert isinstance(entry.place, np.ndarray)
    return entry.place
