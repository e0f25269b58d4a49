"""The bound of every policy's hit rate, and the memory footprint of a trace.

`unlimited`: the longest prefix of each prompt that an earlier prompt, or an earlier prompt with its answer, had. No
cache of any size can hit more.
"""

import numpy as np
from numpy.typing import NDArray

from cairn.cache.layout import CacheLayout
from cairn.cache.tree import Node, TokenKey, split, walk
from cairn.replay.trace import Ids, Trace


class Paths:
    """All paths of a trace so far, in units: the cache's own radix tree, with one key for each unit and no pages. A
    call is O(length of the path)."""

    def __init__(self) -> None:
        self.root = Node(None, b"", 0, 0)
        self.num_units = 0
        """Distinct units: those of a shared beginning count once."""

    def shared(self, path: Ids) -> int:
        """The longest prefix of `path` (shape [u]) that is there, in units."""
        return walk(self.root, TokenKey(path)).ever_matched

    def add(self, path: Ids, answer: Ids) -> None:
        """Add a prompt's path and the answer after it; a node ends where the prompt does."""
        self._add(path)
        if len(answer):
            self._add(np.concatenate([path, answer]))

    def _add(self, path: Ids) -> None:
        key = TokenKey(path)
        walked = walk(self.root, key)
        node = walked.evicted_tail[-1] if walked.evicted_tail else self.root
        if walked.ever_matched < node.end:
            node = split(node, walked.ever_matched)[0]
        if walked.ever_matched < len(path):
            child = Node(node, key.slice_raw(walked.ever_matched, len(path)), walked.ever_matched, len(path))
            node.adopt(child)
            self.num_units += child.num_tokens


def unlimited_hits(trace: Trace) -> NDArray[np.int64]:
    """Tokens of each prompt's path that were seen before, shape [requests]."""
    paths, hits = Paths(), np.zeros(len(trace.requests), np.int64)
    for index, request in enumerate(trace.requests):
        hits[index] = 0 if request.is_parallel_sample else paths.shared(request.path) * trace.unit
        paths.add(request.path, request.answer)
    return hits


def footprint_bytes(trace: Trace, layout: CacheLayout) -> int:
    """Keys and values of all distinct tokens of all paths, answers included, and a checkpoint for each request."""
    paths = Paths()
    for request in trace.requests:
        paths.add(request.path, request.answer)
    return int(paths.num_units * trace.unit * layout.bytes_per_token) + len(trace.requests) * layout.checkpoint_bytes
