"""The books of the trees' runs of tokens: whose pages are referred to, which can go, and which are only remembered.

A run without a checkpoint at or below it can never be hit: it is *barren*, unless somebody is writing below it. A run
that was dropped stays as a *ghost* for a while: its key tokens alone, a thousandth of its bytes, say what was lost.
"""

from collections import OrderedDict
from collections.abc import Iterator

from cairn.cache.events import TreeObserver
from cairn.cache.layout import CacheLayout
from cairn.cache.lease import Namespace
from cairn.cache.pages import PagePool
from cairn.cache.reuse import ReuseBook
from cairn.cache.tree import Node, split
from cairn.types import Pages


class Runs:
    """The nodes of all namespaces, the references they hold on pages, and the ghosts among them.

    `ghost_tokens` bounds what is remembered of dropped runs, in key tokens of 4 or 8 bytes. `observer` is told of what
    comes and goes. `reuse` has the records that stand at nodes. `barren`: the longest unused first. `version` is
    another one when any node is.
    """

    def __init__(
        self, layout: CacheLayout, pool: PagePool, reuse: ReuseBook, ghost_tokens: int, observer: TreeObserver | None
    ) -> None:
        self.roots: dict[Namespace, Node] = {}
        self.barren: OrderedDict[Node, None] = OrderedDict()
        self.ghosts: OrderedDict[Node, None] = OrderedDict()
        self.num_ghost_tokens = 0
        self.version = 0
        self._names: dict[Node, Namespace] = {}
        self._layout = layout
        self._pool = pool
        self._reuse = reuse
        self._ghost_limit = ghost_tokens
        self._observer = observer

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents before children."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children)

    # -- what comes ----------------------------------------------------------------------------------------------

    def root(self, namespace: Namespace) -> Node:
        """The root of a namespace, made if need be."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(None, b"", 0, 0)
            self._names[root] = namespace
            if self._observer is not None:
                self._observer.root_added(root, namespace)
        return root

    def add(
        self, parent: Node, raw: bytes, end: int, pages: tuple[Pages, ...], decode_by: str | None, prompt_end: int
    ) -> Node:
        """A new node below `parent` for the key tokens `raw` up to token `end`, referring to `pages` (per group)."""
        node = Node(parent, raw, parent.end, end)
        node.prompt_end = prompt_end
        parent.adopt(node)
        if parent.reuse is not None:
            self._reuse.changed(parent.reuse)
        self.fill(node, pages, decode_by)
        return node

    def fill(self, node: Node, pages: tuple[Pages, ...], decode_by: str | None) -> None:
        """Give `node` other pages: a new node, a ghost that comes back, or a run that was computed anew."""
        for new in pages:
            self._pool.acquire(new)
        if node.pages is None:
            assert node.parent is not None
            node.parent.resident_children += 1
            self.barren.pop(node.parent, None)
            if node in self.ghosts:
                del self.ghosts[node]
                self.num_ghost_tokens -= node.num_tokens
        else:
            for old in node.pages:
                self._pool.release(old)
        node.pages, node.decode_by, node.loss = pages, decode_by, None
        self._list_if_barren(node)
        self.changed(node)

    def cut(self, node: Node, at: int) -> Node:
        """Cut `node` at token `at`; returns the upper part, the lower one stays the same object."""
        self.version += 1
        upper, shared = split(node, at, self._layout.groups)
        for pages in shared:
            self._pool.acquire(pages)
        if node in self.ghosts:
            self.ghosts[upper] = None
        if self._observer is not None:
            self._observer.node_cut(upper, node)
        return upper

    def lock(self, node: Node, below: Node | None = None) -> None:
        """One more lease goes through `node` and all above it, down from `below` if that is given: what is above has
        its lock already."""
        self.barren.pop(node, None)  # those above have a resident child, so they are in no danger
        step: Node | None = node
        while step is not below:
            assert step is not None
            step.locks += 1
            step = step.parent

    def unlock(self, node: Node) -> None:
        """One lease less goes through `node` and all above it."""
        step: Node | None = node
        while step is not None:
            step.locks -= 1
            top, step = step, step.parent
        self._forget_root(top)
        self.note_if_barren(node)

    def changed(self, node: Node) -> None:
        """The pages or the checkpoint of `node` are others: whoever observes is told."""
        self.version += 1
        if self._observer is not None:
            self._observer.node_changed(node)

    # -- what goes -----------------------------------------------------------------------------------------------

    def is_barren(self, node: Node) -> bool:
        """Whether nothing can ever be hit in `node`, and nobody is writing below it."""
        return (
            node.parent is not None
            and node.pages is not None
            and node.checkpoint is None
            and node.resident_children == 0
            and node.locks == 0
        )

    def note_if_barren(self, node: Node) -> None:
        """Put `node` last among the barren runs if it is one of them. Where runs have no pages (no attention), it is
        dropped at once, because no want of pages would ever end it."""
        self._list_if_barren(node)
        while self.barren and not self._layout.groups:
            self._drop(next(iter(self.barren)))

    def drop_barren(self, num_pages: int) -> bool:
        """Drop what can never be hit until `num_pages` pages are free. False if that is not enough."""
        while self._pool.num_free < num_pages:
            if not self.barren:
                return False
            self._drop(next(iter(self.barren)))
        return True

    def _list_if_barren(self, node: Node) -> None:
        if self.is_barren(node):
            self.barren[node] = None
            self.barren.move_to_end(node)

    def _drop(self, node: Node) -> None:
        assert node.pages is not None and node.parent is not None
        del self.barren[node]
        for pages in node.pages:
            self._pool.release(pages)
        node.pages = None
        node.parent.resident_children -= 1
        self._list_if_barren(node.parent)
        self.ghosts[node] = None
        self.num_ghost_tokens += node.num_tokens
        self.changed(node)
        while self.num_ghost_tokens > self._ghost_limit:
            self._forget(next(iter(self.ghosts)))

    def _forget(self, ghost: Node) -> None:
        """Take a ghost and all ghosts below it out of the tree."""
        assert ghost.parent is not None
        ghost.parent.disown(ghost)
        self._forget_root(ghost.parent)
        stack = [ghost]
        while stack:
            node = stack.pop()
            if node.reuse is not None:
                self._reuse.forget(node.reuse)
            del self.ghosts[node]
            self.num_ghost_tokens -= node.num_tokens
            stack.extend(node.children)

    def _forget_root(self, node: Node) -> None:
        if node.parent is None and not node.children and node.locks == 0:
            del self.roots[self._names.pop(node)]
            if self._observer is not None:
                self._observer.root_forgotten(node)
