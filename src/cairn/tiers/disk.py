"""The tier on a disk: segments in a folder, and the index of what is in them.

The index is nowhere but in memory: segments say at their heads what is in them, so that reading the heads makes it
again. Only whole segments appear and go, by one rename or removal each, so a process may end at any moment. What is
dropped stays in its segment until that is removed, or written anew without it.
"""

import errno
import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from cairn.tiers.files import Files
from cairn.tiers.index import IndexedStore, PathShape
from cairn.tiers.lanes import busy_time, rest
from cairn.tiers.segment_table import EntryPlace, Segment, SegmentTable, place_of
from cairn.tiers.segments import (
    HEAD_BYTES,
    DamagedSegment,
    SegmentEntry,
    decode_entries,
    encode_header,
    header_length,
    page_checksum,
    segment_bytes,
)
from cairn.tiers.store import PIECE_BYTES, EntryFacts, EntryRead, NewEntry, TierCounters

SEGMENT, UNFINISHED = ".seg", ".tmp"
"""How names of segments end, and of those that are being written."""

MAX_SEGMENT_BYTES = 64 << 20
MAX_SEGMENTS = 1024
"""Small ones are joined beyond that."""

WASTE = 0.25
"""Share of the folder that may be of no use before segments are written anew."""

PAUSE_SECONDS = 30.0
"""After a failed write nothing is written for so long."""

REFRESH_SECONDS = 1.0
"""How often a reader looks what the writer has done."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskFolder:
    """Where segments are, and whose: `identity`, 32 bytes, says what their pages mean. `max_bytes`: of all segments
    together. `writable`: nobody else writes here."""

    path: str
    identity: bytes
    page_bytes: int
    max_bytes: int
    writable: bool = True


class DiskStore(IndexedStore):
    """A `TierStore` of the segments in `folder`. What is damaged is dropped, and the log says so."""

    name = "disk"

    def __init__(self, folder: DiskFolder, shape: PathShape, files: Files) -> None:
        """Raises OSError where a folder to be written to cannot be read."""
        super().__init__(shape)
        self.counters = TierCounters()
        self._folder = folder
        self._files = files
        self._table = SegmentTable(self._index, self.counters, folder.page_bytes)
        self._number = 0
        self._paused_until = 0.0
        self._refresh_at = 0.0
        self._max_segment = min(MAX_SEGMENT_BYTES, folder.max_bytes // 8)
        if folder.writable:
            self._scan()
            self._make_room(0)
        else:
            self.refresh()

    @property
    def capacity(self) -> int:
        # a segment more is there while others are written anew
        return self._folder.max_bytes - self._max_segment

    @property
    def writable(self) -> bool:
        return self._folder.writable

    def refresh(self) -> None:
        if not self.writable and time.monotonic() >= self._refresh_at:
            self._refresh_at = time.monotonic() + REFRESH_SECONDS
            with suppress(OSError):
                self._scan()

    def close(self) -> None:
        """All that is written is on the disk."""

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, reads: Sequence[EntryRead], deadline: float) -> bool:
        began, descriptors, num_bytes = busy_time(), dict[str, int](), 0
        try:
            for each in reads:
                if time.monotonic() > deadline or not self._read_entry(each, descriptors):
                    return False
                num_bytes += sum(row.nbytes for row in each.rows)
        finally:
            for descriptor in descriptors.values():
                self._files.close(descriptor)
            with self._lock:
                self.counters.read_bytes += num_bytes
                self.counters.read_seconds += busy_time() - began
        return True

    def _read_entry(self, each: EntryRead, descriptors: dict[str, int]) -> bool:
        for attempt in range(2):
            place = self._place(each.key)
            if place is None:
                return False
            name, reason = place.segment.name, None
            try:
                if name not in descriptors:
                    descriptors[name] = self._files.open(self._path(name))
                if not self._read_pages(descriptors[name], place, each):
                    logger.warning("--disk-cache: %s: an entry is damaged and has been dropped", self._path(name))
                    reason = "damaged"
            except FileNotFoundError:
                # it may have been written anew since the look at the index
                if attempt == 0:
                    continue
                reason = "gone"
            except OSError as error:
                logger.warning("--disk-cache: %s cannot be read: %s", self._path(name), error.strerror)
                reason = "io_error"
            if reason is None:
                return True
            self._drop(each.key, place, reason)
            return False
        return False

    def _read_pages(self, descriptor: int, place: EntryPlace, each: EntryRead) -> bool:
        """Whether they are what was written."""
        page_bytes = self._folder.page_bytes
        size = max(1, PIECE_BYTES // page_bytes)
        for at in range(0, len(each.rows), size):
            rows, first = each.rows[at : at + size], each.first + at
            if not self._files.read_into(descriptor, rows, place.offset + first * page_bytes):
                return False
            for number, row in enumerate(rows, first):
                if page_checksum(each.key, number, row) != place.checksums[number]:
                    return False
            rest()
        return True

    def _place(self, key: bytes) -> EntryPlace | None:
        with self._lock:
            entry = self._index.get(key)
            return None if entry is None else place_of(entry)

    def _drop(self, key: bytes, place: EntryPlace, reason: str) -> None:
        """Drop an entry that is not what it was, unless it is another one by now. What was filed under it stays: it may
        come back."""
        with self._lock:
            entry = self._index.get(key)
            if entry is not None and entry.place is place:
                self._table.forget(self._index.remove(key, alone=True), reason)

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, batch: Sequence[NewEntry], deadline: float) -> int:
        began = busy_time()
        with self._lock:
            fresh, num_here, num_orphans = self._choose(batch)
            self.counters.drops["no_parent"] += num_orphans
        for segment in self._cut(fresh):
            reason = self._why_not(deadline) or self._write_segment(segment)
            if reason is not None:
                with self._lock:
                    self.counters.drops[reason] += len(segment)
                # what follows needs what came before
                break
            num_here += len(segment)
        if len(self._table.segments) > MAX_SEGMENTS:
            self._rewrite(self._table.smallest(self._max_segment))
        with self._lock:
            self.counters.write_seconds += busy_time() - began
        return num_here

    def _why_not(self, deadline: float) -> str | None:
        if not self.writable:
            return "read_only"
        now = time.monotonic()
        return "too_late" if now > deadline else "paused" if now < self._paused_until else None

    def _choose(self, batch: Sequence[NewEntry]) -> tuple[list[NewEntry], int, int]:
        """What of a batch is to be written, how much of it is here, and how much has no place."""
        fresh, keys, num_here, num_orphans = list[NewEntry](), set[bytes](), 0, 0
        for new in batch:
            if self._index.get(new.facts.key) is not None or new.facts.key in keys:
                num_here += 1
            elif self._index.may_add(new.facts) or new.facts.parent in keys:
                keys.add(new.facts.key)
                fresh.append(new)
            else:
                num_orphans += 1
        return fresh, num_here, num_orphans

    def _cut(self, entries: Sequence[NewEntry]) -> Iterable[list[NewEntry]]:
        """Into segments that are not too large; one entry may be."""
        segment, num_bytes = list[NewEntry](), 0
        for new in entries:
            if segment and num_bytes + new.pages.nbytes > self._max_segment:
                yield segment
                segment, num_bytes = [], 0
            segment.append(new)
            num_bytes += new.pages.nbytes
        if segment:
            yield segment

    def _write_segment(self, entries: Sequence[NewEntry], spare: int = 0) -> str | None:
        """Write entries, which go with no room made before they are there; why not, or None. `spare`: bytes of segments
        that go when it is written."""
        size = segment_bytes([new.facts for new in entries], self._folder.page_bytes)
        with self._lock:
            parents = [new.facts.parent for new in entries]
            for parent in parents:
                self._index.hold(parent)
        try:
            if not spare and not self._make_room(size):
                return "no_room"
            name = f"{self._number:016d}{SEGMENT}"
            self._number += 1
            stored = self._write_file(name, entries)
            with self._lock:
                # first: an entry is worth less where nothing else keeps what is above it
                while parents:
                    self._index.release(parents.pop())
                self._table.enter(name, size, stored)
                self.counters.written_bytes += size
        except OSError as error:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            logger.warning(
                "--disk-cache: %s cannot be written to: %s; it is tried again in %d s",
                *(self._folder.path, error.strerror, PAUSE_SECONDS),
            )
            return "disk_full" if full else "io_error"
        finally:
            with self._lock:
                for parent in parents:
                    self._index.release(parent)
        return None

    def _write_file(self, name: str, entries: Sequence[NewEntry]) -> list[SegmentEntry]:
        unfinished = self._path(name.removesuffix(SEGMENT) + UNFINISHED)
        header, stored = encode_header(self._folder.identity, self._folder.page_bytes, entries)
        parts = [memoryview(header), *(new.pages.data.cast("B") for new in entries if new.pages.nbytes)]
        try:
            descriptor = self._files.create(unfinished)
            try:
                offset = 0
                for piece in _pieces(parts):
                    self._files.write_all(descriptor, piece, offset)
                    offset += sum(len(part) for part in piece)
                    rest()
                self._files.sync(descriptor)
            finally:
                self._files.close(descriptor)
            self._files.rename(unfinished, self._path(name))
        except OSError:
            with suppress(OSError):
                self._files.remove(unfinished)
            raise
        # without it a power cut may take the name away again, which costs the segment and nothing else
        with suppress(OSError):
            self._files.sync_folder(self._folder.path)
        return stored

    # -- room ----------------------------------------------------------------------------------------------------

    def _make_room(self, num_bytes: int) -> bool:
        """Have so many bytes less than the capacity in segments; False if that cannot be."""
        while self.counters.num_bytes + num_bytes > self.capacity:
            with self._lock:
                dead = next((each for each in self._table.segments.values() if not each.live), None)
                total, live = self.counters.num_bytes, self._table.num_live_bytes
            if dead is not None:
                if not self._remove(dead):
                    return False
                continue
            if total - live > WASTE * total and self._rewrite(self._table.emptiest(self._max_segment)):
                continue
            with self._lock:
                gone = self._index.pop_least()
                self._table.forget(gone, "replaced")
            if not gone and not self._rewrite(self._table.emptiest(self._max_segment)):
                return False
        return True

    def _rewrite(self, segments: Sequence[Segment]) -> bool:
        """Write what is of use in some segments into one, and remove them. False if that gains nothing or fails."""
        with self._lock:
            places = [
                (entry.facts, place_of(entry))
                for segment in segments
                for key in segment.keys
                if (entry := self._index.get(key)) is not None
            ]
        # parents before those filed under them
        places.sort(key=lambda each: (each[0].position, each[0].tail is not None))
        entries = self._read_whole([facts for facts, _ in places])
        old = sum(segment.size for segment in segments)
        size = segment_bytes([new.facts for new in entries], self._folder.page_bytes)
        if not segments or size >= old or size > self._folder.max_bytes - self.counters.num_bytes:
            return False
        if entries and self._write_segment(entries, spare=old) is not None:
            return False
        removed = [self._remove(segment) for segment in segments]
        return all(removed)

    def _read_whole(self, wanted: Sequence[EntryFacts]) -> list[NewEntry]:
        """Entries with their pages; those that cannot be read are dropped."""
        entries, descriptors = list[NewEntry](), dict[str, int]()
        try:
            for facts in wanted:
                pages = np.empty((facts.num_pages, self._folder.page_bytes), np.uint8)
                if self._read_entry(EntryRead(facts.key, 0, list(pages)), descriptors):
                    entries.append(NewEntry(facts, pages))
        finally:
            for descriptor in descriptors.values():
                self._files.close(descriptor)
        return entries

    def _remove(self, segment: Segment) -> bool:
        """Remove a segment's file, and what is still in it."""
        try:
            self._files.remove(self._path(segment.name))
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("--disk-cache: %s cannot be removed: %s", self._path(segment.name), error.strerror)
            return False
        with self._lock:
            self._table.forget_segment(segment)
        return True

    # -- the index -----------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        """See which segments there are."""
        names = sorted(self._files.names(self._folder.path))
        for name in names:
            if name.endswith(SEGMENT) and name not in self._table.segments:
                self._load(name)
            elif name.endswith(UNFINISHED) and self.writable:
                with suppress(OSError):
                    self._files.remove(self._path(name))
        with self._lock:
            for name in set(self._table.segments).difference(names):
                self._table.forget_segment(self._table.segments[name])

    def _load(self, name: str) -> None:
        path = self._path(name)
        try:
            size = self._files.size(path)
            head = self._files.read(path, 0, HEAD_BYTES)
            length = header_length(head, self._folder.identity, self._folder.page_bytes, size)
            entries = decode_entries(self._files.read(path, 0, length))
        except FileNotFoundError:
            return
        except (OSError, DamagedSegment) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            logger.warning("--disk-cache: %s is ignored: %s", path, reason)
            with self._lock:
                self.counters.drops["io_error" if isinstance(error, OSError) else "damaged"] += 1
            if self.writable and isinstance(error, DamagedSegment):
                with suppress(OSError):
                    self._files.remove(path)
            return
        with self._lock:
            if (stem := name.removesuffix(SEGMENT)).isdecimal():
                self._number = max(self._number, int(stem) + 1)
            self._table.enter(name, size, entries)

    def _path(self, name: str) -> str:
        return f"{self._folder.path}/{name}"


def _pieces(parts: Sequence[memoryview]) -> Iterable[list[memoryview]]:
    """One after the other, in pieces of `PIECE_BYTES` at most."""
    piece, left = list[memoryview](), PIECE_BYTES
    for whole in parts:
        part = whole
        while len(part):
            piece.append(part[:left])
            part, left = part[left:], left - len(piece[-1])
            if not left:
                yield piece
                piece, left = [], PIECE_BYTES
    if piece:
        yield piece
