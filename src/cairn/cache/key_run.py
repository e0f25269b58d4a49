"""How a tree keeps key tokens, and how they are compared: four bytes each where that is enough, else eight.

Vocabulary ids and the numbers of images fit into four. A run has one width for all its tokens, so that comparing a run
with a prompt of the same width is one memcmp.
"""

import numpy as np
from numpy.typing import NDArray

from cairn.keys import common_tokens
from cairn.types import Keys

NARROW, WIDE = 4, 8
_NARROW_TOKENS = np.iinfo(np.int32)


def _fit_narrow(keys: Keys) -> bool:
    if not len(keys):
        return True
    # one pass tells it of nearly all: none is negative, and none has a bit beyond the lower 31
    bits = int(np.bitwise_or.reduce(keys))
    if bits >= 0:
        return bits <= _NARROW_TOKENS.max
    return int(keys.min()) >= _NARROW_TOKENS.min and int(keys.max()) <= _NARROW_TOKENS.max


def widen(raw: bytes, num_tokens: int, first: int = 0, end: int | None = None) -> Keys:
    """Tokens [first, end) of the run of `num_tokens` tokens that `raw` holds, shape [n]."""
    return _tokens(raw, num_tokens)[first:end].astype(np.int64)


class Sought:
    """Key tokens that are looked up or added: `octets` has them in as few bytes as hold them, `width` bytes each, and
    `tokens` sees them there as numbers, shape [n]. Made in O(n)."""

    __slots__ = ("octets", "tokens", "width")

    def __init__(self, keys: Keys) -> None:
        narrow = _fit_narrow(keys)
        self.width = NARROW if narrow else WIDE
        self.octets = bytearray(self.width * len(keys))
        self.tokens = np.frombuffer(self.octets, np.int32) if narrow else np.frombuffer(self.octets, np.int64)
        # into the place where they are needed, for a prompt has up to a million bytes
        np.copyto(self.tokens, keys, casting="unsafe")

    def __len__(self) -> int:
        return len(self.tokens)

    def run(self, start: int, end: int) -> bytes:
        """Tokens [start, end) as a node keeps them."""
        return bytes(memoryview(self.octets)[start * self.width : end * self.width])


def common_prefix(raw: bytes, num_tokens: int, sought: Sought, position: int) -> int:
    """How many tokens of the run in `raw` equal those of `sought` from `position` on."""
    return common_tokens(_tokens(raw, num_tokens), sought.tokens[position:])


def _tokens(raw: bytes, num_tokens: int) -> NDArray[np.int32] | NDArray[np.int64]:
    return np.frombuffer(raw, np.int32) if len(raw) == num_tokens * NARROW else np.frombuffer(raw, np.int64)
