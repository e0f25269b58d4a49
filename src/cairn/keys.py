"""Key tokens: a growing buffer of them, and how two sequences compare."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.types import Keys

_BLOCK = 8192
"""Key tokens that are compared in one go."""


Tokens = NDArray[np.signedinteger[Any]]


def common_tokens(ours: Tokens, theirs: Tokens, limit: int | None = None) -> int:
    """How many tokens both begin with, at most `limit`. No block after the first difference is read."""
    length = min(len(ours), len(theirs)) if limit is None else min(len(ours), len(theirs), limit)
    for start in range(0, length, _BLOCK):
        end = min(start + _BLOCK, length)
        differs = ours[start:end] != theirs[start:end]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
    return length


class KeyBuffer:
    """The key tokens of one sequence; grows at the end, in amortised O(1) a token. The array that it begins with is
    never written to."""

    __slots__ = ("_keys", "num_tokens")

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.num_tokens = len(keys)

    @property
    def keys(self) -> Keys:
        """A view, shape [num_tokens]."""
        return self._keys[: self.num_tokens]

    def append(self, token: int) -> None:
        """Add one key token."""
        if self.num_tokens == len(self._keys):
            self._grow(self.num_tokens + 1)
        self._keys[self.num_tokens] = token
        self.num_tokens += 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Add several key tokens."""
        end = self.num_tokens + len(tokens)
        if end > len(self._keys):
            self._grow(end)
        self._keys[self.num_tokens : end] = tokens
        self.num_tokens = end

    def _grow(self, least: int) -> None:
        grown = np.empty(max(least, len(self._keys) * 5 // 4 + 64), np.int64)
        grown[: self.num_tokens] = self.keys
        self._keys = grown
