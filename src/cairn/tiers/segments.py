"""The form of a segment, the file in which the disk tier keeps entries that were written together.

    head      magic | format | sizes | identity                      all integers little-endian
    table     entry, and a checksum for each of its pages | ...
    checksum  of head and table
    padding   up to a multiple of 4096
    pages     of all entries, one after the other

A segment is complete or it is none: it has another name until all of it is on the disk, and is never written to
afterwards. A page's checksum begins with its entry's name and its place, so that pages cannot be mixed up.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from cairn.tiers.lanes import rest
from cairn.tiers.store import EntryFacts, NewEntry, PageBytes

FORMAT = 1
"""Changes whenever the bytes of a segment, or of what is in its pages, mean something else."""

ALIGNMENT = 4096
MAX_HEADER = 1 << 26
"""Bytes of a header, at most: what is longer is damaged."""

_MAGIC = b"cairnseg"
_HEAD = struct.Struct("<8sIIIIQ32s")
_ENTRY = struct.Struct("<B32sB32sQIifBBxx")
_CHECKSUM = struct.Struct("<I")
_NO_TAIL = -1

HEAD_BYTES = _HEAD.size


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """`offset`: of its first page in the file. `checksums`: of each of its pages."""

    facts: EntryFacts
    offset: int
    checksums: tuple[int, ...]


class DamagedSegment(Exception):
    """What does not fit together in a segment's header. Never leaves the disk tier."""


def page_checksum(key: bytes, number: int, page: PageBytes) -> int:
    """Of page `number` of an entry."""
    return zlib.crc32(page.data.cast("B"), zlib.crc32(key + number.to_bytes(4, "little")))


def encode_header(identity: bytes, page_bytes: int, entries: Sequence[NewEntry]) -> tuple[bytes, list[SegmentEntry]]:
    """Head, table, checksum and padding of a segment of these entries, and where they are in it. Reads all of their
    pages."""
    table, stored = bytearray(), list[SegmentEntry]()
    offset = _aligned(HEAD_BYTES + _table_bytes(entries) + _CHECKSUM.size)
    for new in entries:
        facts = new.facts
        tail = _NO_TAIL if facts.tail is None else facts.tail
        key, parent = facts.key, facts.parent
        checksums = list[int]()
        for number, page in enumerate(new.pages):
            checksums.append(page_checksum(key, number, page))
            rest()
        table += _ENTRY.pack(
            *(len(key), key, len(parent), parent),
            *(facts.position, facts.num_pages, tail, facts.weight, facts.origin, facts.kind),
        )
        table += struct.pack(f"<{len(checksums)}I", *checksums)
        stored.append(SegmentEntry(facts, offset, tuple(checksums)))
        offset += facts.num_pages * page_bytes
    head = _HEAD.pack(_MAGIC, FORMAT, len(table), len(entries), page_bytes, offset, identity)
    body = head + bytes(table)
    checksum = _CHECKSUM.pack(zlib.crc32(body))
    return (body + checksum).ljust(_aligned(len(body) + len(checksum)), b"\0"), stored


def header_length(head: bytes, identity: bytes, page_bytes: int, file_bytes: int) -> int:
    """How many bytes of the file are to be read for `decode_entries`, from the first `HEAD_BYTES`. Raises
    DamagedSegment."""
    if len(head) < HEAD_BYTES:
        raise DamagedSegment("it ends within its head")
    magic, version, table_bytes, _, size, length, whose = _HEAD.unpack_from(head)
    assert isinstance(table_bytes, int)
    if magic != _MAGIC or version != FORMAT:
        raise DamagedSegment("it is no segment of this format")
    if whose != identity or size != page_bytes:
        raise DamagedSegment("it belongs to another model")
    if length != file_bytes or table_bytes > min(MAX_HEADER, file_bytes):
        raise DamagedSegment(f"it has {file_bytes} bytes, and its head says {length}")
    return HEAD_BYTES + table_bytes + _CHECKSUM.size


def decode_entries(header: bytes) -> list[SegmentEntry]:
    """The entries of a segment from its first `header_length` bytes. Raises DamagedSegment."""
    body = header[: -_CHECKSUM.size]
    if (zlib.crc32(body),) != _CHECKSUM.unpack(header[-_CHECKSUM.size :]):
        raise DamagedSegment("the checksum of its table is another one")
    # what passes the checksum was written as it is
    _, _, _, num_entries, page_bytes, _, _ = _HEAD.unpack_from(body)
    at, offset, entries = HEAD_BYTES, _aligned(len(header)), []
    for _ in range(num_entries):
        key_length, key, parent_length, parent, position, num_pages, tail, weight, origin, kind = _ENTRY.unpack_from(
            body, at
        )
        at += _ENTRY.size
        checksums = struct.unpack_from(f"<{num_pages}I", body, at)
        at += num_pages * _CHECKSUM.size
        facts = EntryFacts(
            key[:key_length],
            parent[:parent_length],
            position,
            num_pages,
            None if tail == _NO_TAIL else tail,
            origin,
            kind,
            weight,
        )
        entries.append(SegmentEntry(facts, offset, checksums))
        offset += num_pages * page_bytes
    return entries


def segment_bytes(entries: Sequence[EntryFacts], page_bytes: int) -> int:
    """How large a segment of these entries is."""
    num_pages = sum(facts.num_pages for facts in entries)
    table = len(entries) * _ENTRY.size + num_pages * _CHECKSUM.size
    return _aligned(HEAD_BYTES + table + _CHECKSUM.size) + num_pages * page_bytes


def _table_bytes(entries: Sequence[NewEntry]) -> int:
    return sum(_ENTRY.size + _CHECKSUM.size * new.facts.num_pages for new in entries)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
