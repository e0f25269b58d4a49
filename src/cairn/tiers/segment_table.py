"""Which segments a disk tier has, and what of them is of use. Not thread-safe."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cairn.tiers.index import StoredEntry, TierIndex
from cairn.tiers.segments import SegmentEntry
from cairn.tiers.store import TierCounters


@dataclass(slots=True, eq=False)
class Segment:
    """`size`: of the file; `live`: bytes of pages that are of use. `keys`: the entries that are."""

    name: str
    size: int
    live: int = 0
    keys: set[bytes] = field(default_factory=set)


@dataclass(frozen=True, slots=True, eq=False)
class EntryPlace:
    """Where an entry is: in a segment, from `offset` on. `checksums`: of each of its pages."""

    segment: Segment
    offset: int
    checksums: tuple[int, ...]


class SegmentTable:
    """The segments of one folder, whose entries are in `index`. `segments`: by name."""

    def __init__(self, index: TierIndex, counters: TierCounters, page_bytes: int) -> None:
        self.segments: dict[str, Segment] = {}
        self._index = index
        self._counters = counters
        self._page_bytes = page_bytes

    @property
    def num_live_bytes(self) -> int:
        """Bytes of pages that are of use, in all segments."""
        return sum(segment.live for segment in self.segments.values())

    def enter(self, name: str, size: int, entries: Sequence[SegmentEntry]) -> None:
        """A segment is there. What others have of its entries is of no use any more."""
        segment = self.segments[name] = Segment(name, size)
        self._counters.num_bytes += size
        for each in entries:
            facts, place = each.facts, EntryPlace(segment, each.offset, each.checksums)
            known = self._index.get(facts.key)
            if known is None:
                self._index.add(facts, place)
            else:
                self._leave(known)
                known.place = place
            segment.live += self._bytes_of(facts.num_pages)
            segment.keys.add(facts.key)
        self._counters.num_entries = len(self._index)

    def forget(self, gone: Sequence[StoredEntry], reason: str) -> None:
        """These entries are in the index no more."""
        for entry in gone:
            self._leave(entry)
            self._counters.drops[reason] += 1
        self._counters.num_entries = len(self._index)

    def forget_segment(self, segment: Segment) -> None:
        """A segment is gone, and with it what was still of use."""
        for key in list(segment.keys):
            entry = self._index.get(key)
            if entry is not None and place_of(entry).segment is segment:
                self.forget(self._index.remove(key), "gone")
        del self.segments[segment.name]
        self._counters.num_bytes -= segment.size

    def emptiest(self, most: int) -> list[Segment]:
        """Segments with the largest part of no use, whose other parts have at most so many bytes; one at least."""
        return _fitting(sorted(self.segments.values(), key=lambda each: each.live / each.size), most)

    def smallest(self, most: int) -> list[Segment]:
        """Likewise, the smallest ones."""
        return _fitting(sorted(self.segments.values(), key=lambda each: each.size), most)

    def _leave(self, entry: StoredEntry) -> None:
        segment = place_of(entry).segment
        if entry.facts.key in segment.keys:
            segment.keys.discard(entry.facts.key)
            segment.live -= self._bytes_of(entry.facts.num_pages)

    def _bytes_of(self, num_pages: int) -> int:
        # a segment with an entry is of use, though that may have no page
        return max(1, num_pages) * self._page_bytes


def place_of(entry: StoredEntry) -> EntryPlace:
    """Where an entry of a disk tier is."""
    assert isinstance(entry.place, EntryPlace)
    return entry.place


def _fitting(ordered: Sequence[Segment], most: int) -> list[Segment]:
    chosen, num_bytes = list[Segment](), 0
    for segment in ordered:
        num_bytes += segment.live
        if chosen and num_bytes > most:
            break
        chosen.append(segment)
    return chosen
