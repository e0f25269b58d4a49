"""All paths of a trace so far, in units: how much of a prompt was seen before, and how much there is in all.

The cache's own radix tree, with one key for each unit and no pages.
"""

from cairn.cache.tree import KEY_BYTES, Node, split, walk
from cairn.replay.traces import Ids

__all__ = ["Paths"]


class Paths:
    """Grows with each path; O(length of the path) a call."""

    def __init__(self) -> None:
        self.root = Node(None, b"", 0)
        self.num_units = 0
        """Distinct units: those of a shared beginning count once."""

    def shared(self, path: Ids) -> int:
        """The longest prefix of `path` (shape [u]) that is there, in units."""
        return walk(self.root, path.tobytes()).seen

    def add(self, path: Ids, answer: Ids) -> None:
        """Add a prompt's path and the answer behind it; a node ends where the prompt does."""
        raw = path.tobytes()
        self._add(raw)
        if len(answer):
            self._add(raw + answer.tobytes())

    def chain(self, path: Ids, answer: Ids) -> list[Node]:
        """The nodes along a path that has been added, in order."""
        return walk(self.root, path.tobytes() + answer.tobytes()).beyond

    def _add(self, raw: bytes) -> None:
        found = walk(self.root, raw)
        node = found.beyond[-1] if found.beyond else self.root
        if found.seen < node.end:
            node = split(node, found.seen, ())[0]
        rest = raw[found.seen * KEY_BYTES :]
        if rest:
            child = Node(node, rest, found.seen)
            node.children[child.key()] = child
            self.num_units += child.num_tokens
