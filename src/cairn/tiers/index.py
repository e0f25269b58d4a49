"""Which entries a tier has, and which of them go first.

Entries form trees: a chunk under the chunk before it, a state under the chunk that ends at the mark below. What is
dropped is always a leaf, so that what remains can be used; with a state go the chunks that only it made useful.

The order is that of GreedyDual-Size-Frequency (Cherkasova 1998): the rank of a leaf is the tokens that it saves per
byte that goes with it times the root of its weight, the uses that the pool's policy expects and those that it has had
here, added to the rank of what was dropped last when it was written or used. So what was worth much and is not used any
more goes after a while, too. The root, because weights are as old as the last writing.
"""

import heapq
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

from cairn.cache.layout import CacheLayout
from cairn.tiers.store import EntryFacts

MAX_WALK = 4096
"""Chunks that are looked at to know what goes with a leaf."""


@dataclass(frozen=True, slots=True)
class PathShape:
    """What is kept of a path. `needs_states`: chunks without a state below them are of no use, and go with the last
    one. `has_chunks`: False without attention layers, where there are states alone."""

    needs_states: bool = True
    has_chunks: bool = True

    @classmethod
    def of(cls, layout: CacheLayout) -> "PathShape":
        """What tiers below a cache of this layout keep."""
        return cls(needs_states=layout.needs_checkpoints, has_chunks=layout.has_unlimited_groups)


class StoredEntry:
    """An entry that is there. `place`: where its store has it. `readers`: reads that are under way. `weight`: as it was
    written, and one more for each time that it was of use; `rank`: of its newest place in the order."""

    __slots__ = ("facts", "place", "rank", "readers", "version", "weight")

    def __init__(self, facts: EntryFacts, place: object) -> None:
        self.facts = facts
        self.place = place
        self.readers = 0
        self.weight = facts.weight
        self.rank = 0.0
        self.version = 0


class TierIndex:
    """The entries of one store, in the order in which they go. Not thread-safe.

    `entries`: by name.
    """

    def __init__(self, shape: PathShape) -> None:
        self.entries: dict[bytes, StoredEntry] = {}
        self._dropped: deque[bytes] | None = None
        self._needs_states = shape.needs_states
        self._has_chunks = shape.has_chunks
        self._dependants: Counter[bytes] = Counter()
        # paths part within a chunk, too: several states may be as far from one mark
        self._tails: dict[bytes, Counter[int]] = {}
        self._heap: list[tuple[float, int, bytes]] = []
        self._version = 0
        self._last_rank = 0.0

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[StoredEntry]:
        return iter(self.entries.values())

    def get(self, key: bytes) -> StoredEntry | None:
        """The entry of this name, if it is there."""
        return self.entries.get(key)

    def follow_drops(self) -> deque[bytes]:
        """See `TierStore.follow_drops`."""
        self._dropped = deque()
        return self._dropped

    def may_add(self, facts: EntryFacts) -> bool:
        """Whether the chunk before an entry is there, if it needs one."""
        return facts.is_first or not self._has_chunks or facts.parent in self.entries

    def tails(self, marks: Sequence[bytes]) -> list[list[int]]:
        """See `TierStore.tails`."""
        here = self._tails
        return [sorted(here[mark], reverse=True) if mark in here else [] for mark in marks]

    def add(self, facts: EntryFacts, place: object) -> StoredEntry:
        """An entry that is not there yet."""
        assert facts.key not in self.entries
        entry = self.entries[facts.key] = StoredEntry(facts, place)
        self._dependants[facts.parent] += 1
        if facts.tail is not None:
            self._tails.setdefault(facts.parent, Counter())[facts.tail] += 1
        self._rank(entry)
        return entry

    def use(self, key: bytes, weight: float | None = None) -> None:
        """An entry has been of use, and counts with `weight` from now on, or with one more."""
        entry = self.entries.get(key)
        if entry is not None:
            entry.weight = entry.weight + 1 if weight is None else weight
            self._rank(entry)

    def hold(self, key: bytes) -> None:
        """Keep an entry, here or to come, from being a leaf, until `release`."""
        self._dependants[key] += 1

    def release(self, key: bytes) -> None:
        """The end of a `hold`."""
        self._drop_dependant(key)

    def pop_least(self) -> list[StoredEntry]:
        """Drop the leaf that goes first, and the chunks that are of no use without it; returns them, none if no entry
        may go."""
        while self._heap:
            rank, version, key = heapq.heappop(self._heap)
            entry = self.entries.get(key)
            if entry is None or entry.version != version or self._dependants[key]:
                continue
            worth = self._last_rank_of(entry)
            if worth > rank:
                # what was used beside it has gone since, or it is a leaf only now
                self._push(entry, worth)
                continue
            self._last_rank = max(self._last_rank, rank)
            return self.remove(key)
        return []

    def remove(self, key: bytes, alone: bool = False) -> list[StoredEntry]:
        """Drop an entry, whatever depends on it, and the chunks that are of no use without it, unless it goes `alone`
        because it may come back. Returns what is gone."""
        entry = self.entries.pop(key, None)
        gone = []
        while entry is not None:
            gone.append(entry)
            facts = entry.facts
            if facts.tail is not None:
                tails = self._tails[facts.parent]
                tails[facts.tail] -= 1
                if not tails[facts.tail]:
                    del tails[facts.tail]
                if not tails:
                    del self._tails[facts.parent]
            self._drop_dependant(facts.parent, rank=False)
            parent = self.entries.get(facts.parent)
            entry = None
            if parent is None or self._dependants[parent.facts.key]:
                continue
            if self._needs_states and not alone:
                entry = self.entries.pop(parent.facts.key)
            else:
                self._rank(parent)
        if self._dropped is not None:
            self._dropped.extend(entry.facts.key for entry in gone)
        return gone

    # -- the order -----------------------------------------------------------------------------------------------

    def _drop_dependant(self, key: bytes, rank: bool = True) -> None:
        self._dependants[key] -= 1
        if self._dependants[key] <= 0:
            del self._dependants[key]
            entry = self.entries.get(key)
            if rank and entry is not None:
                self._push(entry, entry.rank)

    def _rank(self, entry: StoredEntry) -> None:
        """It is written, or used, now."""
        entry.rank = self._last_rank
        self._push(entry, self._last_rank_of(entry))

    def _push(self, entry: StoredEntry, rank: float) -> None:
        self._version += 1
        entry.version = self._version
        heapq.heappush(self._heap, (rank, self._version, entry.facts.key))
        if len(self._heap) > 2 * len(self.entries) + 64:
            live = self.entries
            self._heap = [each for each in self._heap if each[2] in live and live[each[2]].version == each[1]]
            heapq.heapify(self._heap)

    def _last_rank_of(self, entry: StoredEntry) -> float:
        """Its rank as things are now."""
        num_tokens, num_pages = self._saved(entry)
        return entry.rank + sqrt(entry.weight) * num_tokens / max(1, num_pages)

    def _saved(self, entry: StoredEntry) -> tuple[int, int]:
        """Tokens that need not be computed thanks to a leaf, over the next shallower state, and the pages that go with
        it: up to where something else hangs."""
        facts, num_pages, alone = entry.facts, entry.facts.num_pages, self._needs_states
        if facts.tail is None:
            return facts.position - self._position(facts), num_pages
        position, tail = facts.position - facts.tail, facts.tail
        shallower = [other for other in self._tails.get(facts.parent, ()) if other < tail]
        step, number = facts, 0
        while not shallower:
            above = None if step.is_first else self.entries.get(step.parent)
            if above is None or number == MAX_WALK:
                # an orphan is of no use as long as it is one
                return (facts.position if step.is_first else 0), num_pages
            alone = alone and self._dependants[step.parent] == 1
            num_pages += above.facts.num_pages * alone
            step, number = above.facts, number + 1
            position = self._position(step)
            shallower = [] if step.is_first else list(self._tails.get(step.parent, ()))
        return facts.position - position - max(shallower), num_pages

    def _position(self, facts: EntryFacts) -> int:
        """Where the chunk begins, as far as that is known."""
        above = self.entries.get(facts.parent)
        return above.facts.position if above is not None else 0 if facts.is_first else facts.position


class IndexedStore:
    """What a `TierStore` answers from its index alone, whatever it keeps pages in; `_lock` is the index's."""

    def __init__(self, shape: PathShape) -> None:
        self._index = TierIndex(shape)
        self._lock = threading.Lock()

    def follow_drops(self) -> deque[bytes]:
        with self._lock:
            return self._index.follow_drops()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        entries = self._index.entries
        with self._lock:
            return [key in entries for key in keys]

    def tails(self, marks: Sequence[bytes]) -> list[list[int]]:
        with self._lock:
            return self._index.tails(marks)

    def facts(self, key: bytes) -> EntryFacts | None:
        with self._lock:
            entry = self._index.get(key)
            return None if entry is None else entry.facts

    def touch(self, key: bytes, weight: float | None = None) -> None:
        with self._lock:
            self._index.use(key, weight)
