"""Node bookkeeping of the radix trees: page reference counts, unreachable nodes, ghosts (keys kept without pages).

A node without a checkpoint at or below it can never be hit: it is *unreachable*, unless somebody is writing below it. A
node that was dropped stays as a *ghost* for a while: its key tokens alone, a thousandth of its bytes, say what was
lost.

Of attention of limited reach a checkpoint needs the pages of the last tokens before it, which go when it goes. All
others let prompts go on elsewhere as long as nobody needs the room, and are *trimmed* then, from nodes' beginnings.
"""

from collections import OrderedDict
from collections.abc import Iterator

from cairn.cache.checkpoint import Lineage
from cairn.cache.group_pages import GroupPages
from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.cache.pages import PagePool
from cairn.cache.sequence_blocks import Namespace, PageTables
from cairn.cache.tree import Checkpoint, Node, next_above, split


class TreeObserver:
    """Is told of changes to the trees, right after they have happened, and must not change them. All methods do nothing
    here."""

    def root_added(self, root: Node, namespace: Namespace) -> None:
        """`root` is new."""

    def root_forgotten(self, root: Node) -> None:
        """`root` had nothing below it any more, and is gone."""

    def node_changed(self, node: Node) -> None:
        """The node has got or lost its pages or its checkpoint."""

    def node_split(self, upper: Node, lower: Node) -> None:
        """`upper` is new and took over the first tokens of `lower`."""

    def node_branched(self, node: Node) -> None:
        """The node has one child more."""

    def node_forgotten(self, node: Node) -> None:
        """The node, a ghost, is gone from the tree."""

    def checkpoint_used(self, checkpoint: Checkpoint) -> None:
        """A request resumes from a checkpoint, which counts as one of its hits by now."""


class TreeStore:
    """The nodes of all namespaces, the references they hold on pages, and the ghosts among them.

    `max_ghost_tokens` bounds what is remembered of dropped nodes, in key tokens of 4 or 8 bytes. `unreachable`: the
    longest unused first. `trimmable`: nodes that may have pages of limited reach which no checkpoint needs, the first
    that came to be so first. `version` changes whenever a node does.
    """

    def __init__(
        self, layout: CacheLayout, pool: PagePool, max_ghost_tokens: int, observers: tuple[TreeObserver, ...] = ()
    ) -> None:
        self.roots: dict[Namespace, Node] = {}
        self.unreachable: OrderedDict[Node, None] = OrderedDict()
        self.trimmable: OrderedDict[Node, None] = OrderedDict()
        self.ghosts: OrderedDict[Node, None] = OrderedDict()
        self.num_ghost_tokens = 0
        self.version = 0
        self._names: dict[Node, Namespace] = {}
        self._limited = [(index, group) for index, group in enumerate(layout.groups) if group.reach is not None]
        # nodes without any pages, which nobody can go on from by themselves, would not be dropped for lack of pages
        self._drops_at_once = len(self._limited) == len(layout.groups) and not layout.resumes_anywhere
        self._pool = pool
        self._max_ghost_tokens = max_ghost_tokens
        self.observers = observers

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
            for observer in self.observers:
                observer.root_added(root, namespace)
        return root

    def add(
        self, parent: Node, raw: bytes, end: int, pages: tuple[GroupPages, ...], decode_by: str | None, lineage: Lineage
    ) -> Node:
        """A new node below `parent` for the key tokens `raw` up to token `end`, referring to `pages`."""
        node = Node(parent, raw, parent.end, end)
        node.lineage = lineage
        parent.adopt(node)
        for observer in self.observers:
            observer.node_branched(parent)
        self.fill(node, pages, decode_by)
        return node

    def fill(self, node: Node, pages: tuple[GroupPages, ...], decode_by: str | None) -> None:
        """Give `node` other pages: those of a new node, of a ghost that comes back, or of tokens that were computed
        anew."""
        for new in pages:
            self._pool.acquire(new.pages)
        if node.pages is None:
            assert node.parent is not None
            node.parent.resident_children += 1
            self.unreachable.pop(node.parent, None)
            if node in self.ghosts:
                del self.ghosts[node]
                self.num_ghost_tokens -= node.num_tokens
        else:
            for old in node.pages:
                self._pool.release(old.pages)
        node.pages, node.decode_by, node.loss = pages, decode_by, None
        self._list_if_unreachable(node)
        self.note_trimmable(node)
        self.changed(node)

    def provide(self, node: Node, tables: PageTables) -> None:
        """Give `node` and those above it what a checkpoint at its end needs of groups of limited reach, of the pages of
        the sequence that has computed the tokens before it."""
        for index, group in self._limited:
            needed, step = group.needed_at(node.end), node
            while step.parent is not None and needed < step.end:
                assert step.pages is not None
                start, before = max(needed, step.start), step.pages[index]
                if before.first_token > start:
                    part = tables.tables[index].span(start, step.end)
                    assert part.first_token <= start, "a sequence has let go of what its checkpoint needs"
                    self._replace(step, index, part)
                    self.changed(step)
                step = step.parent

    def _replace(self, node: Node, index: int, part: GroupPages) -> None:
        """Put `part` in the place of the node's pages of group `index`."""
        assert node.pages is not None
        before = node.pages[index]
        self._pool.acquire(part.pages)
        self._pool.release(before.pages)
        node.pages = (*node.pages[:index], part, *node.pages[index + 1 :])

    def split(self, node: Node, at: int) -> Node:
        """Split `node` at token `at`; returns the upper part, the lower one stays the same object."""
        self.version += 1
        upper, shared = split(node, at)
        for pages in shared:
            self._pool.acquire(pages)
        if node in self.ghosts:
            self.ghosts[upper] = None
        elif node in self.trimmable:
            self.trimmable[upper] = None
        for observer in self.observers:
            observer.node_split(upper, node)
        return upper

    def lock(self, node: Node) -> None:
        """Keep `node` for one sequence, and with it all above it, which have a resident child."""
        self.unreachable.pop(node, None)
        node.locks += 1

    def unlock(self, node: Node) -> None:
        """Keep `node` no longer for one sequence."""
        node.locks -= 1
        self.note_if_unreachable(node)

    def changed(self, node: Node) -> None:
        """Tell the observers that `node` has other pages or another checkpoint."""
        self.version += 1
        for observer in self.observers:
            observer.node_changed(node)

    # -- what goes -----------------------------------------------------------------------------------------------

    def is_unreachable(self, node: Node) -> bool:
        """Whether nothing can ever be hit in `node`, and nobody is writing below it."""
        return (
            node.parent is not None
            and node.pages is not None
            and node.checkpoint is None
            and node.resident_children == 0
            and node.locks == 0
        )

    def note_if_unreachable(self, node: Node) -> None:
        """Put `node` last among the unreachable nodes if it is one of them. Where nodes need not have pages (no
        attention, or of limited reach alone), it is dropped at once, because no lack of pages would ever drop it."""
        self._list_if_unreachable(node)
        while self.unreachable and self._drops_at_once:
            self._drop(next(iter(self.unreachable)))

    def note_trimmable(self, node: Node) -> None:
        """Pages of limited reach in `node`, or above it within reach of its end, may be needed by no checkpoint any
        more."""
        if not self._limited:
            return
        first = min(group.needed_at(node.end) for _, group in self._limited)
        step: Node | None = node
        while step is not None and step.parent is not None and step.end > first:
            if step.pages is not None:
                self.trimmable[step] = None
                self.trimmable.move_to_end(step)
            step = step.parent

    def drop_unneeded(self, num_pages: int) -> bool:
        """Drop what can never be hit, and then what no checkpoint needs, until `num_pages` pages are free. False if
        that is not enough."""
        while self._pool.num_free < num_pages:
            if self.unreachable:
                self._drop(next(iter(self.unreachable)))
            elif self.trimmable:
                self._trim(self.trimmable.popitem(last=False)[0])
            else:
                return False
        return True

    def _trim(self, node: Node) -> None:
        """Release the pages of limited reach that no checkpoint at `node` or below needs."""
        assert node.pages is not None
        trimmed = False
        for index, group in self._limited:
            first, part = self._needed_from(node, group), node.pages[index]
            if first < node.end:
                # whole pages
                kept = part.drop_before(first // group.tokens_per_page * group.tokens_per_page)
            else:
                kept = GroupPages(group, node.end, part.pages[:0])
            if len(kept.pages) < len(part.pages):
                self._replace(node, index, kept)
                trimmed = True
        if trimmed:
            self.changed(node)

    def _needed_from(self, node: Node, group: AttentionGroup) -> int:
        """The first token of `node` that a checkpoint at its end or below needs, or its end."""
        first, stack = node.end, [node]
        while stack:
            step = stack.pop()
            if step.checkpoint is not None:
                # those below it need later tokens alone
                first = min(first, group.needed_at(step.end))
            elif group.needed_at(step.end + 1) < node.end:
                stack.extend(child for child in step.children if child.pages is not None)
        return max(node.start, first)

    def _list_if_unreachable(self, node: Node) -> None:
        if self.is_unreachable(node):
            self.unreachable[node] = None
            self.unreachable.move_to_end(node)

    def _drop(self, node: Node) -> None:
        assert node.pages is not None and node.parent is not None
        del self.unreachable[node]
        self.trimmable.pop(node, None)
        for part in node.pages:
            self._pool.release(part.pages)
        node.pages = None
        node.parent.resident_children -= 1
        self._list_if_unreachable(node.parent)
        self.ghosts[node] = None
        self.num_ghost_tokens += node.num_tokens
        self.changed(node)
        while self.num_ghost_tokens > self._max_ghost_tokens:
            self._forget(next(iter(self.ghosts)))

    def _forget(self, ghost: Node) -> None:
        """Take a ghost and all ghosts below it out of the tree."""
        assert ghost.parent is not None
        ghost.parent.disown(ghost)
        self._forget_root(ghost.parent)
        stack = [ghost]
        while stack:
            node = stack.pop()
            for observer in self.observers:
                observer.node_forgotten(node)
            del self.ghosts[node]
            self.num_ghost_tokens -= node.num_tokens
            stack.extend(node.children)

    def _forget_root(self, node: Node) -> None:
        if node.parent is None and not node.children:
            del self.roots[self._names.pop(node)]
            for observer in self.observers:
                observer.root_forgotten(node)


def pages_freed(layout: CacheLayout, checkpoint: Checkpoint) -> int:
    """How many pages dropping a checkpoint gives: those of its state and, where nothing below needs them, those of the
    tokens up to the next branch or checkpoint above. Of groups of limited reach those that going on there needs; what
    the checkpoint above needs as well counts half."""
    node, pages, start = checkpoint.node, len(checkpoint.pages), checkpoint.node.end
    if node.resident_children == 0:
        top = node
        while (above := top.parent) is not None and above.resident_children <= 1 and above.checkpoint is None:
            top = above
        start = top.start
    for group in layout.groups:
        if group.reach is None:
            pages += group.pages_for(node.end) - group.pages_for(start)
        else:
            kept = next_above(node)
            unshared = group.retained_pages(0 if kept is None else kept.node.end, node.end)
            pages += (unshared + group.retained_pages(0, node.end)) // 2
    return pages
