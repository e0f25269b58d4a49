"""How two sequences of key tokens compare."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 8192
"""Key tokens that are compared in one go."""


Tokens = NDArray[np.signedinteger[Any]]


def common_tokens(ours: Tokens, theirs: Tokens, limit: int | None = None) -> int:
    """How many tokens both begin with, at most `limit`. No block behind the first difference is read."""
    length = min(len(ours), len(theirs)) if limit is None else min(len(ours), len(theirs), limit)
    for start in range(0, length, _BLOCK):
        end = min(start + _BLOCK, length)
        differs = ours[start:end] != theirs[start:end]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
    return length
