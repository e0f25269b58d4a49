"""Detection of answers that repeat themselves."""

import numpy as np

from cairn.engine.contract import RepetitionDetection


class RepetitionDetector:
    """Finds out when an answer ends with a pattern of tokens that has come `min_count` times in a row. A function of
    the answer alone; a token costs a few passes over `max_pattern_size` numbers."""

    def __init__(self, params: RepetitionDetection) -> None:
        """`params`: with a `max_pattern_size` of at least 1."""
        sizes = np.arange(max(1, params.min_pattern_size), params.max_pattern_size + 1)
        self._needed = sizes * (params.min_count - 1)
        self._first = int(sizes[0]) - 1
        # by pattern size: how many of the last tokens are each the one that came a pattern before
        self._matches = np.zeros(len(sizes), np.int64)
        # the newest token first
        self._recent = np.full(params.max_pattern_size, -1, np.int64)

    def push(self, token: int) -> bool:
        """Take in the answer's next token. Whether it ends with a repetition now."""
        self._matches = np.where(self._recent[self._first :] == token, self._matches + 1, 0)
        self._recent[1:] = self._recent[:-1].copy()
        self._recent[0] = token
        return bool((self._matches >= self._needed).any())
