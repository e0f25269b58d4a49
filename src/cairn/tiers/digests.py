"""The names of entries: digests of the tokens that they stand for.

chunk   the digest of the path up to its end (`cairn.transfer.digest`), as other servers name it
state   the digest of the mark below it and of the tokens after that mark

Salted namespaces are named with a key besides, which only those have who may read the store: their names say nothing to
anybody who guesses prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import lcm

import numpy as np

from cairn.cache.events import KeyNames
from cairn.cache.layout import CacheLayout
from cairn.step import GRID
from cairn.tiers.store import START
from cairn.transfer.contract import ContentName, NamedImage
from cairn.transfer.digest import DIGEST_BYTES, ContentDigest
from cairn.types import Keys

KEY_BYTES = DIGEST_BYTES
MAX_RECENT, MAX_RECENT_TOKENS = 32, 1 << 20
"""Paths named last whose names are remembered, and their tokens: a prompt is named when it comes, and again with its
answer."""

_STATE = b"cairn/state/1"

SLICE_TOKENS = 1 << 13
"""Digested at a time: .3 ms."""


def _nothing() -> None:
    """Nobody waits."""


@dataclass(frozen=True, slots=True)
class EntryNames:
    """How entries of one model are named. `identity`: 32 bytes that say what bytes mean; `secret`: the key of salted
    namespaces. `stride`: tokens of a chunk, whole pages and a multiple of 64. `give_way`: called between parts of a
    long path, so that nobody waits long for the interpreter. For one thread at a time."""

    identity: bytes
    secret: bytes
    stride: int
    give_way: Callable[[], None] = field(default=_nothing, repr=False, compare=False)
    _recent: "list[_RecentPath]" = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls, layout: CacheLayout, identity: bytes, secret: bytes, give_way: Callable[[], None] = _nothing
    ) -> "EntryNames":
        """The names of a layout's entries."""
        return cls(identity, secret, stride_of(layout), give_way)

    def path(self, name: ContentName, keys: Keys) -> "PathNames":
        """The names of all chunks of `keys`, shape [n], and of the states on the way. Takes some 30 microseconds for a
        thousand tokens."""
        layout = self.identity if name.salt is None else sha256(self.identity + self.secret).digest()
        num_chunks = len(keys) // self.stride
        whole = keys[: num_chunks * self.stride]
        for at, known in enumerate(self._recent):
            if known.layout == layout and known.name == name and known.agrees_with(whole):
                del self._recent[at]
                break
        else:
            known = _RecentPath(layout, name, whole[:0], [], ContentDigest(layout, name))
        if len(known.keys) < len(whole):
            known = known.extended(whole, self.stride, self.give_way)
        self._remember(known)
        return PathNames(layout, name, keys, self.stride, known.chunks[:num_chunks])

    def _remember(self, path: "_RecentPath") -> None:
        if not path.chunks:
            return
        self._recent.insert(0, path)
        num_tokens = sum(len(each.keys) for each in self._recent)
        while num_tokens > MAX_RECENT_TOKENS or len(self._recent) > MAX_RECENT:
            num_tokens -= len(self._recent.pop().keys)


@dataclass(frozen=True, slots=True, eq=False)
class _RecentPath:
    """Whole chunks, and their names. `digest`: after the last of them."""

    layout: bytes
    name: ContentName
    keys: Keys
    chunks: list[bytes]
    digest: ContentDigest

    def agrees_with(self, keys: Keys) -> bool:
        """Whether the longer of the two begins with the other one, which has a token at least."""
        length = min(len(self.keys), len(keys))
        if length == 0 or self.keys[length - 1] != keys[length - 1]:
            return False
        return np.array_equal(self.keys[:length], keys[:length])

    def extended(self, keys: Keys, stride: int, give_way: Callable[[], None]) -> "_RecentPath":
        """The path of more chunks that begins with this one."""
        digest = self.digest.copy()
        for start in range(len(self.keys), len(keys), SLICE_TOKENS):
            digest.append(keys[start : start + SLICE_TOKENS])
            give_way()
        marks, size = digest.marks, stride // GRID * DIGEST_BYTES
        ends = range(size * (len(self.chunks) + 1), len(marks) + 1, size)
        chunks = self.chunks + [marks[end - DIGEST_BYTES : end] for end in ends]
        return _RecentPath(self.layout, self.name, keys.copy(), chunks, digest)


@dataclass(frozen=True, slots=True, eq=False)
class PathNames:
    """`chunks`: the names of the path's whole chunks, in order. `keys`: its tokens, shape [n]."""

    layout: bytes
    name: ContentName
    keys: Keys
    stride: int
    chunks: Sequence[bytes]

    def before(self, number: int) -> bytes:
        """What a chunk with so many chunks before it is filed under."""
        return START if number == 0 else self.chunks[number - 1]

    def mark(self, number: int) -> bytes:
        """What states after so many chunks are filed under: before the first one every namespace has a mark of its
        own."""
        return self.state_of(0, 0) if number == 0 else self.chunks[number - 1]

    def state(self, position: int) -> bytes:
        """The name of the state after `position` tokens."""
        number = position // self.stride
        return self.state_of(number, position - number * self.stride)

    def state_of(self, number: int, tail: int) -> bytes:
        """The name of the state that lies `tail` tokens after so many chunks; fewer than `stride`."""
        start = number * self.stride
        shifted = tuple(
            NamedImage(image.start - start, image.length, image.digest)
            for image in self.name.images
            if image.start < start + tail and image.start + image.length > start
        )
        above = _STATE + (self.layout if number == 0 else self.chunks[number - 1])
        digest = ContentDigest(sha256(above).digest(), replace(self.name, images=shifted))
        return digest.of(self.keys[start : start + tail])


def stride_of(layout: CacheLayout) -> int:
    """Tokens of a chunk: whole pages that end where 64 tokens do."""
    sizes = [group.tokens_per_page for group in layout.groups if group.reach is None]
    return lcm(GRID, *sizes, *([layout.block_size] if layout.groups else []))


def named_images(keys: Keys, names: KeyNames) -> tuple[NamedImage, ...] | None:
    """The images behind the key tokens below 0; None if one of them has no name any more."""
    images: list[NamedImage] = []
    at = 0
    while (left := np.flatnonzero(keys[at:] < 0)).size:
        first = at + int(left[0])
        name = names.name(int(keys[first]))
        if name is None:
            return None
        # the numbers of one image go down by one, and may go on with those of the next one
        run = keys[first:]
        ends = np.flatnonzero(run != run[0] - np.arange(len(run)))
        low, high = 1, int(ends[0]) if ends.size else len(run)
        while low < high:
            middle = (low + high + 1) // 2
            last = names.name(int(run[middle - 1]))
            if last is not None and last.digest == name.digest and last.place == name.place + middle - 1:
                low = middle
            else:
                high = middle - 1
        images.append(NamedImage(first - name.place, name.place + low, name.digest))
        at = first + low
    return tuple(images)
