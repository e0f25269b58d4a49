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
    never written to. `follow`: from then on a list that somebody else appends to is its end."""

    __slots__ = ("_keys", "_length", "_output", "_start")

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._length = len(keys)
        self._output: list[int] | None = None
        self._start = 0

    def follow(self, output: list[int], start: int) -> None:
        """The tokens from `start` on are those of `output`, which grows. They are copied when they are read."""
        assert start <= self._length <= start + len(output), f"{self._length} tokens, and {len(output)} from {start} on"
        self._output, self._start = output, start

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._length if self._output is None else self._start + len(self._output)

    @property
    def keys(self) -> Keys:
        """A view, shape [num_tokens]."""
        if self._output is not None and (first := self._length - self._start) < len(self._output):
            self._extend(self._output[first:])
        return self._keys[: self._length]

    def slice(self, start: int, end: int) -> Keys:
        """Tokens [start, end), shape [end - start]: without a copy of those before them, as `keys` may make."""
        if self._output is not None and start >= max(self._start, self._length):
            return np.array(self._output[start - self._start : end - self._start], np.int64)
        return self.keys[start:end]

    def truncate(self) -> None:
        """The list that is followed has lost tokens at its end."""
        assert self._output is not None, "nobody's list is followed"
        self._length = min(self._length, self._start + len(self._output))

    def append(self, token: int) -> None:
        """Add one key token."""
        if self._output is not None:
            self._output.append(token)
        else:
            self._extend((token,))

    def _extend(self, tokens: Sequence[int]) -> None:
        end = self._length + len(tokens)
        if end > len(self._keys):
            grown = np.empty(max(end, len(self._keys) * 5 // 4 + 64), np.int64)
            grown[: self._length] = self._keys[: self._length]
            self._keys = grown
        self._keys[self._length : end] = tokens
        self._length = end
