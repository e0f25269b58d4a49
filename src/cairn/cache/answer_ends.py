"""Where the last answers ended: what is known of them only later is said of these nodes."""

from collections import OrderedDict
from collections.abc import Iterator

from cairn.cache.checkpoint import Lineage
from cairn.cache.tree import Node
from cairn.cache.tree_store import TreeObserver

MAX_ANSWERS = 1 << 10
"""So many are remembered: word of them comes a few steps later, if any does."""


class AnswerEnds(TreeObserver):
    """By request the node where its answer ends, with its lineage: of the last ones, as long as their nodes are in a
    tree. Of answers that end at the same node, the last one's."""

    def __init__(self) -> None:
        self._ends: OrderedDict[str, tuple[Node, Lineage]] = OrderedDict()
        self._requests: dict[Node, str] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[Node]:
        """The nodes, the longest known first."""
        return (node for node, _ in self._ends.values())

    def add(self, request_id: str, node: Node, lineage: Lineage) -> None:
        """A request has ended, with its path up to `node` in the tree."""
        self._forget(request_id)
        self.node_forgotten(node)
        self._ends[request_id], self._requests[node] = (node, lineage), request_id
        if len(self._ends) > MAX_ANSWERS:
            self._forget(next(iter(self._ends)))

    def get(self, request_id: str) -> tuple[Node, Lineage] | None:
        """None if it is not remembered."""
        return self._ends.get(request_id)

    def node_forgotten(self, node: Node) -> None:
        if node in self._requests:
            self._forget(self._requests[node])

    def _forget(self, request_id: str) -> None:
        if request_id in self._ends:
            node, _ = self._ends.pop(request_id)
            del self._requests[node]
