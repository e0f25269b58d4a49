"""Entries of made-up paths, and the stores that keep them."""

import time

import numpy as np

from cairn.tiers.disk import DiskFolder, DiskStore
from cairn.tiers.files import Files
from cairn.tiers.host import HostStore
from cairn.tiers.index import PathShape
from cairn.tiers.store import START, EntryFacts, EntryRead, NewEntry

PAGE_BYTES = 512
IDENTITY = bytes(range(32))
STRIDE = 64
SHAPE = PathShape()


def name(*parts) -> bytes:
    return "/".join(map(str, parts)).encode().ljust(32, b".")


def content(key: bytes, num_pages: int) -> np.ndarray:
    """What pages of this name hold, always."""
    return np.random.default_rng(list(key)).integers(0, 256, (num_pages, PAGE_BYTES), np.uint8)


def chunk(path, number: int, num_pages: int = 4) -> NewEntry:
    """The chunk of `path` that ends after `number` strides."""
    key = name(path, number)
    parent = name(path, number - 1) if number > 1 else START
    return NewEntry(EntryFacts(key, parent, number * STRIDE, num_pages), content(key, num_pages))


def state(path, number: int, tail: int = 5, num_pages: int = 6, kind: int = 5) -> NewEntry:
    """The state of `path` that lies `tail` tokens after `number` chunks."""
    key = name(path, number, "state", tail)
    parent = name(path, number)
    facts = EntryFacts(key, parent, number * STRIDE + tail, num_pages, tail, kind=kind)
    return NewEntry(facts, content(key, num_pages))


def path_entries(path, num_chunks: int, tail: int = 5) -> list[NewEntry]:
    """A path of so many chunks, with a state at its end."""
    return [*(chunk(path, number + 1) for number in range(num_chunks)), state(path, num_chunks, tail)]


def later(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def keys_of(entries) -> list[bytes]:
    return [new.facts.key for new in entries]


def read_back(store, entry: NewEntry, first: int = 0) -> np.ndarray | None:
    """The pages from `first` on; None if the store does not give them."""
    pages = np.zeros_like(entry.pages[first:])
    return pages if store.read([EntryRead(entry.facts.key, first, list(pages))], later()) else None


def host_store(num_pages: int = 64) -> HostStore:
    return HostStore(np.zeros((num_pages, PAGE_BYTES), np.uint8), SHAPE)


def disk_store(path, max_bytes: int = 1 << 20, files: Files | None = None, writable: bool = True) -> DiskStore:
    folder = DiskFolder(str(path), IDENTITY, PAGE_BYTES, max_bytes, writable)
    return DiskStore(folder, SHAPE, files or Files())


def check_never_wrong(store, entries) -> int:
    """Every entry is there as it was written, or it is not there. How many are."""
    found = 0
    for entry in entries:
        pages = read_back(store, entry)
        if pages is not None:
            assert np.array_equal(pages, entry.pages), entry.facts
            found += 1
    return found


def usable(store, entries) -> bool:
    """Whether a path could be used: all of its entries can be read."""
    return all(read_back(store, entry) is not None for entry in entries)
