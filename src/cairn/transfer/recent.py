"""Which sequences ended here lately, by the digests of their beginnings: what a content claim is looked up in."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from cairn.step import GRID
from cairn.transfer.contract import ContentName
from cairn.transfer.digest import DIGEST_BYTES, ContentDigest
from cairn.types import Keys


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    """`digests`: by number of tokens, those of its marks and of all of it."""

    name: ContentName
    keys: Keys
    digests: dict[int, bytes]

    def begins(self, keys: Keys) -> bool:
        return len(self.keys) <= len(keys) and np.array_equal(self.keys, keys[: len(self.keys)])


class RecentContent:
    """Key tokens only; whether any page of them is still cached is for the cache to say. At most `max_sequences`
    sequences of `max_tokens` tokens together; the longest unused goes first. `layout` is `digest.layout_hash`."""

    def __init__(self, layout: bytes, *, max_sequences: int = 4096, max_tokens: int = 1 << 24) -> None:
        self._layout = layout
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._sequences: OrderedDict[bytes, _Sequence] = OrderedDict()
        self._places: dict[bytes, tuple[bytes, int]] = {}
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return self._num_tokens

    def remember(self, name: ContentName, keys: Keys) -> None:
        """A sequence of these tokens, shape [n], has ended; one of less than 64 is not worth a place. Costs one sha256
        over them. Those that it only continues give their places up."""
        keys = keys[: self._max_tokens].copy()
        if len(keys) < GRID:
            return
        digest = ContentDigest(self._layout, name)
        digest.append(keys)
        whole = digest.value()
        if whole in self._places:
            self._sequences.move_to_end(self._places[whole][0])
            return
        digests = {number * GRID: mark for number, mark in enumerate(_split(digest.marks), 1)} | {len(keys): whole}
        for known in {self._places[mark][0] for mark in digests.values() if mark in self._places}:
            if self._sequences[known].begins(keys):
                self._forget(known)
        self._sequences[whole] = _Sequence(name, keys, digests)
        self._places.update({mark: (whole, position) for position, mark in digests.items()})
        self._num_tokens += len(keys)
        while len(self._sequences) > self._max_sequences or self._num_tokens > self._max_tokens:
            self._forget(next(iter(self._sequences)))

    def deepest(self, marks: bytes, end: bytes | None = None) -> tuple[ContentName, Keys] | None:
        """The longest known beginning among those with these digests (of the first 64, 128, ... tokens, 32 bytes
        each; `end`, of one more prefix, is looked for first): its name, and its tokens, shape [m]. None when even
        the first is unknown."""
        for mark in [*([] if end is None else [end]), *reversed(_split(marks))]:
            if (found := self._places.get(mark)) is not None:
                known, position = found
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
