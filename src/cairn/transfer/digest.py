"""What two servers compare to know that they speak of the same content, without sending any of it.

    header   "cairn/kv/1" | layout hash | adapter | salt        each with its length before it; no salt != empty salt
    token    int64, little endian; of an image -1 - its place in it, and the image's whole digest
    digest   sha256(header | tokens | their number)

sha256 can be finished at any token and go on, so the digests of all prefixes at multiples of 64 (the marks) cost one
pass."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass

import numpy as np

from cairn.step import GRID
from cairn.transfer.contract import ContentName
from cairn.types import Keys

DIGEST_BYTES = 32

_TOKEN_BYTES = 8
_CONTENT = b"cairn/kv/1"
_LAYOUT = b"cairn/layout/1"
_NO_KEYS: Keys = np.zeros(0, np.int64)


def layout_hash(facts: Mapping[str, str | int]) -> bytes:
    """sha256 over what must be equal for bytes to mean the same on both sides: model, dtypes, numbers of heads and
    layers. Not what may differ: block size and tensor-parallel size. Shape [32] bytes."""
    digest = hashlib.sha256(_LAYOUT)
    for key in sorted(facts):
        value = facts[key]
        kind = "int" if isinstance(value, int) else "str"
        for part in (key, kind, str(value)):
            digest.update(_framed(part.encode()))
    return digest.digest()


class ContentDigest:
    """The digest of a growing sequence, and those at every multiple of 64 tokens on the way."""

    def __init__(self, layout: bytes, name: ContentName) -> None:
        self._sha = hashlib.sha256(_framed(_CONTENT) + _framed(layout) + _framed(_bytes(name.adapter)))
        self._sha.update(b"\0" if name.salt is None else b"\1" + _framed(_bytes(name.salt)))
        self._images = name.images
        self._num_tokens = 0
        self._marks = bytearray()

    def copy(self) -> "ContentDigest":
        """Another one of what has come so far."""
        copied = copy(self)
        copied._sha, copied._marks = self._sha.copy(), bytearray(self._marks)
        return copied

    @property
    def marks(self) -> bytes:
        """The digests of the first 64, 128, ... tokens, 32 bytes each."""
        return bytes(self._marks)

    def of(self, keys: Keys = _NO_KEYS) -> bytes:
        """Of the tokens so far and these, which are not remembered: 32 bytes, without the marks on the way."""
        sha = self._sha.copy()
        sha.update(self._spelled(keys))
        sha.update((self._num_tokens + len(keys)).to_bytes(8, "little"))
        return sha.digest()

    def append(self, keys: Keys) -> None:
        start, raw, size = 0, memoryview(_raw(keys)), _TOKEN_BYTES
        while start < len(keys):
            stop = min(len(keys), start + GRID - self._num_tokens % GRID)
            spelled = self._spelled(keys[start:stop]) if self._images else raw[size * start : size * stop]
            self._sha.update(spelled)
            self._num_tokens += stop - start
            start = stop
            if self._num_tokens % GRID == 0:
                self._marks += self.of()

    def _spelled(self, keys: Keys) -> bytes:
        """What the next tokens are called on every server. Numbers below 0 that no image explains are this process's
        own and equal nothing elsewhere, which is what they should be."""
        first, last = self._num_tokens, self._num_tokens + len(keys)
        parts, done = [], first
        for image in self._images:
            low, high = max(first, image.start), min(last, image.start + image.length)
            if low < high:
                parts.append(_raw(keys[done - first : low - first]))
                places = range(low - image.start, high - image.start)
                parts += [(-1 - place).to_bytes(8, "little", signed=True) + image.digest for place in places]
                done = high
        return b"".join([*parts, _raw(keys[done - first :])])


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    """`digests`: by number of tokens, those of its marks and of all of it."""

    name: ContentName
    keys: Keys
    digests: dict[int, bytes]


class SequenceIndex:
    """Sequences that ended here lately, found by the digests of their prefixes. Holds key tokens only: the cache knows
    which of their pages are left. At most `max_sequences` of `max_tokens` tokens in all; the least recently used goes
    first. `layout` is `layout_hash`."""

    def __init__(self, layout: bytes, *, max_sequences: int = 4096, max_tokens: int = 1 << 24) -> None:
        self._layout = layout
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._sequences: OrderedDict[bytes, _Sequence] = OrderedDict()
        self._places: dict[bytes, tuple[bytes, int]] = {}
        self._num_tokens = 0

    def remember(self, name: ContentName, keys: Keys) -> None:
        """Add a sequence of these key tokens, shape [n]; fewer than 64 are not kept. It replaces those that are its
        prefixes. Costs one sha256 over the tokens."""
        keys = keys[: self._max_tokens].copy()
        if len(keys) < GRID:
            return
        digest = ContentDigest(self._layout, name)
        digest.append(keys)
        whole = digest.of()
        if whole in self._places:
            self._sequences.move_to_end(self._places[whole][0])
            return
        digests = {number * GRID: mark for number, mark in enumerate(_split(digest.marks), 1)} | {len(keys): whole}
        for known in {self._places[mark][0] for mark in digests.values() if mark in self._places}:
            before = self._sequences[known].keys
            if np.array_equal(before, keys[: len(before)]):
                self._forget(known)
        self._sequences[whole] = _Sequence(name, keys, digests)
        self._places.update({mark: (whole, position) for position, mark in digests.items()})
        self._num_tokens += len(keys)
        while len(self._sequences) > self._max_sequences or self._num_tokens > self._max_tokens:
            self._forget(next(iter(self._sequences)))

    def find_longest(self, marks: bytes, end: bytes | None = None) -> tuple[ContentName, Keys] | None:
        """Name and key tokens, shape [m], of the longest known prefix with one of these digests: `end`, if known, else
        one of `marks` (of the first 64, 128, ... tokens, 32 bytes each). None if none is known."""
        for mark in [*([] if end is None else [end]), *reversed(_split(marks))]:
            if (place := self._places.get(mark)) is not None:
                known, position = place
                self._sequences.move_to_end(known)
                return self._sequences[known].name, self._sequences[known].keys[:position]
        return None

    def _forget(self, known: bytes) -> None:
        sequence = self._sequences.pop(known)
        self._num_tokens -= len(sequence.keys)
        for mark in sequence.digests.values():
            if self._places.get(mark, (None, 0))[0] == known:
                del self._places[mark]


def _split(marks: bytes) -> list[bytes]:
    return [marks[at : at + DIGEST_BYTES] for at in range(0, len(marks), DIGEST_BYTES)]


def _raw(keys: Keys) -> bytes:
    return np.ascontiguousarray(keys, dtype="<i8").tobytes()


def _bytes(text: str) -> bytes:
    # A lone surrogate is legal in JSON and has to differ from everything else, too.
    return text.encode("utf-8", "surrogatepass")


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little") + part
