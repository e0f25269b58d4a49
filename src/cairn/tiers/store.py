"""What every tier below the pool is: a store of pages by content.

An *entry* is some whole pages, and its name is made of the tokens that they stand for (`cairn.tiers.digests`):

    tokens   0 ........ stride ........ 2 stride ..... p .........
    chunk    |  chunk   |     chunk     |                             keys and values of `stride` tokens
    state                               | tail pages, state at p      filed under the mark below it

A chunk is filed under the mark where it begins, a state under the one below its position: nothing can be used without
the chunks before it. Stores know neither tokens nor models: they keep what they are given under its name, give it back
byte by byte or not at all, and never more than their size.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

PageBytes = NDArray[np.uint8]
"""Whole pages, shape [n, page_bytes], contiguous."""

PIECE_BYTES = 1 << 20
"""Copied or written at once, at most, by threads that rest in between: some 0.1 ms."""

START = b""
"""What the first chunk of a path is filed under."""


@dataclass(frozen=True, slots=True)
class EntryFacts:
    """What a store remembers of an entry. `key`: its name; `parent`: what it is filed under, the chunk which ends where
    it begins; `START` of a path's first chunk. `position`: tokens of the path up to its end. `tail`: of a state, the
    tokens after the mark that it is filed under; None: a chunk. `origin`, `kind`: of a state, the numbers of its
    `Origin` and `Kind`. `weight`: how often it is expected to be of use in the next 1,000 requests, or some such
    number: what matters is how those of two entries compare."""

    key: bytes
    parent: bytes
    position: int
    num_pages: int
    tail: int | None = None
    origin: int = 0
    kind: int = 0
    weight: float = field(default=1.0, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether it needs no chunk before it."""
        return self.parent == START if self.tail is None else self.position == self.tail


@dataclass(frozen=True, slots=True, eq=False)
class NewEntry:
    """An entry to be written."""

    facts: EntryFacts
    pages: PageBytes


@dataclass(frozen=True, slots=True, eq=False)
class EntryRead:
    """An entry to be read, from its page `first` on, into `rows`: as many pages, contiguous each."""

    key: bytes
    first: int
    rows: Sequence[PageBytes]


@dataclass(slots=True)
class TierCounters:
    """Since the start, but for `num_bytes` and `num_entries`, which are there now. `num_bytes`: all that the tier takes
    of its memory or disk. `drops`: entries that are gone or never came, by why. Times in seconds."""

    num_bytes: int = 0
    num_entries: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    written_bytes: int = 0
    write_seconds: float = 0.0
    hit_tokens: int = 0
    hits: int = 0
    drops: Counter[str] = field(default_factory=Counter)

    @property
    def seconds_per_read_byte(self) -> float:
        """As measured so far; what ordinary memory or disks take, before anything was."""
        return (self.read_seconds + 0.001) / (self.read_bytes + 1_000_000)

    @property
    def seconds_per_written_byte(self) -> float:
        """Likewise."""
        return (self.write_seconds + 0.001) / (self.written_bytes + 1_000_000)


class TierStore(Protocol):
    """One tier. All methods but `write` may be called by several threads at once, `write` by one thread."""

    name: str
    """What metrics and messages call it."""
    counters: TierCounters

    @property
    def capacity(self) -> int:
        """Bytes of entries that it holds at most."""

    @property
    def writable(self) -> bool:
        """Whether `write` keeps anything."""

    def refresh(self) -> None:
        """Called before look-ups that belong together: see what others have written."""

    def follow_drops(self) -> deque[bytes]:
        """From now on the names of entries that are dropped are put at the end of this, for its caller to take."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these entries are here now."""

    def tails(self, marks: Sequence[bytes]) -> list[list[int]]:
        """For each of `marks` the lengths of the tails of the states filed under it, descending."""

    def facts(self, key: bytes) -> EntryFacts | None:
        """What is known of an entry that is here."""

    def read(self, reads: Sequence[EntryRead], deadline: float) -> bool:
        """Fill all rows with the bytes that were written. False if one of the entries is gone or damaged, or `deadline`
        (of `time.monotonic`) has passed; then rows may hold anything, and what is damaged has been dropped."""

    def touch(self, key: bytes, weight: float | None = None) -> None:
        """An entry has been of use, here or, with its new `weight`, above."""

    def write(self, batch: Sequence[NewEntry], deadline: float) -> int:
        """Keep what is not here yet, in order, dropping what is worth less; returns how many entries of the batch are
        here now. An entry whose parent is not here is not kept. The arrays are the caller's again afterwards. What
        could not be kept before `deadline`, or for any other reason, is counted and forgotten."""

    def close(self) -> None:
        """The end: no other method is called again."""
