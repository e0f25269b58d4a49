"""All paths of a trace so far, in units: how much of a prompt was seen before, and how much there is in all.

The cache's own radix tree, with one key for each unit and no pages.
"""

import numpy as np

from cairn.cache.key_run import Sought
from cairn.cache.tree import Node, split, walk
from cairn.replay.traces import Ids


class Paths:
    """Grows with each path; O(length of the path) a call."""

    def __init__(self) -> None:
        self.root = Node(None, b"", 0, 0)
        self.num_units = 0
        """Distinct units: those of a shared beginning count once."""

    def shared(self, path: Ids) -> int:
        """The longest prefix of `path` (shape [u]) that is there, in units."""
        return walk(self.root, _sought(path)).seen

    def add(self, path: Ids, answer: Ids) -> None:
        """Add a prompt's path and the answer behind it; a node ends where the prompt does."""
        self._add(path)
        if len(answer):
            self._add(np.concatenate([path, answer]))

    def chain(self, path: Ids, answer: Ids) -> list[Node]:
        """The nodes along a path that has been added, in order."""
        return walk(self.root, _sought(np.concatenate([path, answer]))).beyond

    def _add(self, path: Ids) -> None:
        sought = _sought(path)
        found = walk(self.root, sought)
        node = found.beyond[-1] if found.beyond else self.root
        if found.seen < node.end:
            node = split(node, found.seen, ())[0]
        if found.seen < len(path):
            child = Node(node, sought.run(found.seen, len(path)), found.seen, len(path))
            node.adopt(child)
            self.num_units += child.num_tokens


def _sought(path: Ids) -> Sought:
    return Sought(path.astype(np.int64, copy=False))
