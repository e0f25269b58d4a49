"""What the cache holds when nobody runs: the trees of all namespaces, their checkpoints, and what goes first.

When room is needed, runs of tokens without a checkpoint at or below them (*barren*: they can never be hit) go first,
the longest unused before others; then the checkpoint that the eviction policy names, which may make a run barren.
A dropped run stays as a ghost for a while: its key tokens alone, a thousandth of its bytes, say what was lost.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator

from cairn.cache.checkpoint import Checkpoint, Kind, Origin
from cairn.cache.events import TreeObserver
from cairn.cache.eviction import CheckpointFacts, Eviction, EvictionQueue
from cairn.cache.held import HeldCheckpoints
from cairn.cache.layout import CacheLayout
from cairn.cache.lease import Namespace
from cairn.cache.pages import PagePool
from cairn.cache.reasons import Reason
from cairn.cache.reuse import NO_LINEAGE, Lineage, Reuse, ReuseBook
from cairn.cache.tree import Node, split
from cairn.types import Clock, Pages, SystemClock

__all__ = ["Residents"]

DOUBT = 10
"""What is new is given a chance: it is not taken if even so many times its worth is less than that of what would go. A
place that statistics alone have named is taken at what they say."""

YOUNG = 16
"""The age, in requests, at which a checkpoint is ranked anew in any case: a chance falls fastest in the beginning."""

MAX_YOUNG = 4096
"""Checkpoints that wait for that."""

GHOST_FACTOR, MIN_GHOSTS = 4, 2048
"""Records of checkpoints that are gone: so many, and as many times the files that fit the pool."""


class Residents:
    """Nodes, checkpoints and ghosts, and the references they hold on pages.

    `ghost_tokens` bounds what is remembered of dropped runs, in key tokens of 8 bytes. `observer` is told of what
    comes and goes. `clock` says when what a client holds is let go.
    """

    def __init__(
        self,
        layout: CacheLayout,
        pool: PagePool,
        eviction: Eviction,
        ghost_tokens: int,
        observer: TreeObserver | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.layout = layout
        self.pool = pool
        self.roots: dict[Namespace, Node] = {}
        self._names: dict[Node, Namespace] = {}
        self.barren: OrderedDict[Node, None] = OrderedDict()
        self.ghosts: OrderedDict[Node, None] = OrderedDict()
        self.num_ghost_tokens = 0
        self.queue = EvictionQueue(eviction)
        self.reuse = ReuseBook(GHOST_FACTOR * (pool.num_pages // layout.pages_per_checkpoint) + MIN_GHOSTS)
        self.held = HeldCheckpoints(layout, pool.num_pages, clock or SystemClock())
        self.taken: Counter[Kind] = Counter()
        self.evicted: Counter[Kind] = Counter()
        self._young: deque[tuple[int, Checkpoint]] = deque(maxlen=MAX_YOUNG)
        self._ghost_limit = ghost_tokens
        self._observer = observer
        self._tick = 0

    # -- nodes ---------------------------------------------------------------------------------------------------

    def root(self, namespace: Namespace) -> Node:
        """The root of a namespace, made if need be."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(None, b"", 0)
            self._names[root] = namespace
            if self._observer is not None:
                self._observer.root_added(root, namespace)
        return root

    def add(self, parent: Node, raw: bytes, pages: tuple[Pages, ...], decode_by: str | None, prompt_end: int) -> Node:
        """A new node below `parent` for the key tokens `raw`, referring to `pages` (per group)."""
        node = Node(parent, raw, parent.end)
        node.prompt_end = prompt_end
        parent.children[node.key()] = node
        if parent.reuse is not None:
            self.reuse.changed(parent.reuse)
        self.fill(node, pages, decode_by)
        return node

    def fill(self, node: Node, pages: tuple[Pages, ...], decode_by: str | None) -> None:
        """Give `node` other pages: a new node, a ghost that comes back, or a run that was computed anew."""
        for new in pages:
            self.pool.acquire(new)
        if node.pages is None:
            assert node.parent is not None
            node.parent.resident_children += 1
            self.barren.pop(node.parent, None)
            if node in self.ghosts:
                del self.ghosts[node]
                self.num_ghost_tokens -= node.num_tokens
        else:
            for old in node.pages:
                self.pool.release(old)
        node.pages, node.decode_by, node.loss = pages, decode_by, None
        self._note_if_barren(node)
        if self._observer is not None:
            self._observer.node_changed(node)

    def cut(self, node: Node, at: int) -> Node:
        """Cut `node` at token `at`; returns the upper part, the lower one stays the same object."""
        upper, shared = split(node, at, self.layout.groups)
        for pages in shared:
            self.pool.acquire(pages)
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
        self._note_if_barren(node)
        self._forget_root(top)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def attach(
        self, node: Node, pages: Pages, kind: Kind, origin: Origin, maker: str, lineage: Lineage = NO_LINEAGE
    ) -> bool:
        """Hang a checkpoint file at the end of `node`, taking over the caller's reference to its pages.

        False if one hangs there already that serves as well; then the caller keeps its pages.
        """
        old = node.checkpoint
        if old is not None and not (old.origin is Origin.DECODE and origin is not Origin.DECODE):
            if old.kind.on_probation and not kind.on_probation:
                old.kind = kind
                if node.reuse is not None:
                    node.reuse.kind = kind
                    self.reuse.changed(node.reuse)
                self.use(old, hit=False)
            return False
        if old is not None:
            self.queue.remove(old)
            self.pool.release(old.pages)
        node.checkpoint = checkpoint = Checkpoint(node, pages, kind, origin, maker)
        node.loss = None
        self.reuse.made(node, kind, origin, lineage)
        if old is not None:
            self.held.replace(old, checkpoint)
        self.barren.pop(node, None)
        self.taken[kind] += 1
        self.use(checkpoint, hit=False)
        if not kind.on_probation:
            self._young.append((self.reuse.now, checkpoint))
        self._rank(self._above(node))
        if self._observer is not None:
            self._observer.node_changed(node)
        return True

    def admitted(self, known: Reuse | None, hit: Checkpoint | None) -> None:
        """A request begins to run whose path has `known` as its deepest record, and that is about to use `hit`."""
        self.reuse.now += 1
        if known is not None and known.slot >= 0:
            self.reuse.used(known)
            if known.node.checkpoint is not hit:
                self._rank(known.node.checkpoint)

    def use(self, checkpoint: Checkpoint, hit: bool) -> None:
        """Note that a checkpoint was hit, or made anew."""
        self._tick += 1
        checkpoint.last_used = self._tick
        checkpoint.hits += hit
        self.queue.push(checkpoint, self._facts(checkpoint))

    def hold(self, checkpoint: Checkpoint, seconds: int) -> bool:
        """Have a checkpoint go after all others for so long. False, and nothing changes, where the quota is used up."""
        self.let_expired_go()
        if not self.held.take(checkpoint, seconds):
            return False
        self.queue.push(checkpoint, self._facts(checkpoint))
        return True

    def renew(self, node: Node | None, upto: int) -> None:
        """The path to `node` has been hit up to token `upto`: what is still held there is held anew."""
        self.let_expired_go()
        while node is not None and self.held:
            if node.checkpoint is not None and node.end <= upto:
                self.held.renew(node.checkpoint)
            node = node.parent

    def let_expired_go(self) -> None:
        """Holds whose time is over have ended, whether or not anything has happened since."""
        for checkpoint in self.held.expired():
            self.queue.push(checkpoint, self._facts(checkpoint))

    def _facts(self, checkpoint: Checkpoint) -> CheckpointFacts:
        node = checkpoint.node
        above = self._above(node)
        pages = len(checkpoint.pages)
        if node.resident_children == 0:
            # with it goes what is above up to the next branch or checkpoint
            top = node
            while top.parent is not None and top.parent.resident_children <= 1 and top.parent.checkpoint is None:
                top = top.parent
            pages += self.layout.pages_for(node.end) - self.layout.pages_for(top.start)
        return CheckpointFacts(
            kind=checkpoint.kind,
            saved_tokens=node.end - (above.position if above is not None else 0),
            freed_bytes=pages * self.layout.page_bytes,
            hits=checkpoint.hits,
            last_used=checkpoint.last_used,
            held=checkpoint.held_until is not None,
            chance=self.reuse.chance(node.reuse) if node.reuse is not None else 0.0,
        )

    @staticmethod
    def _above(node: Node) -> Checkpoint | None:
        """The next shallower checkpoint."""
        above = node.parent
        while above is not None and above.checkpoint is None:
            above = above.parent
        return above.checkpoint if above is not None else None

    def _rank(self, checkpoint: Checkpoint | None) -> None:
        """Put a checkpoint where it now belongs, if it waits to be dropped."""
        if checkpoint is not None and checkpoint in self.queue:
            self.queue.push(checkpoint, self._facts(checkpoint))

    def remember(self, node: Node, kind: Kind, origin: Origin, lineage: Lineage) -> None:
        """Note that a checkpoint might have been at the end of `node`, to see whether it would have been used."""
        if node.reuse is None:
            above = self._above(node)
            reuse = self.reuse.made(node, kind, origin, lineage)
            self.reuse.dropped(reuse, above.node.reuse if above is not None else None)

    def worth(self, kind: Kind, saves: int, pages: int, chance: float) -> bool:
        """Whether a checkpoint that is to be made would not be worth far less than what goes next. `saves`: tokens over
        the next shallower one; `pages`: those of its file and those that only it makes useful."""
        if not len(self.queue):
            return True
        facts = CheckpointFacts(
            kind=kind,
            saved_tokens=saves,
            freed_bytes=pages * self.layout.page_bytes,
            hits=0,
            last_used=self._tick + 1,
            chance=chance if kind is Kind.OFFSET else DOUBT * chance,
        )
        return not self.queue.goes_before_all(facts)

    # -- room ----------------------------------------------------------------------------------------------------

    def drop_barren(self, num_pages: int) -> bool:
        """Drop what can never be hit until `num_pages` pages are free. False if that is not enough."""
        while self.pool.num_free < num_pages:
            if not self.barren:
                return False
            self._drop_run(next(iter(self.barren)))
        return True

    def make_room(self, num_pages: int) -> bool:
        """Drop until `num_pages` pages are free. False if all that may go has gone and it is not enough."""
        if self.drop_barren(num_pages):
            return True
        passed: list[Checkpoint] = []
        self.let_expired_go()
        self._rank_aged()
        while not self.drop_barren(num_pages):
            checkpoint = self.queue.pop()
            if checkpoint is None:
                break
            if self.pool.counts[checkpoint.pages[0]] > 1:
                # a step that has not been applied reads the file: dropping it would free nothing
                passed.append(checkpoint)
                continue
            facts = self._facts(checkpoint)
            if self.queue.goes_before_all(facts):
                self._drop_checkpoint(checkpoint)
            else:
                # it is worth more than when it was ranked: what was above it has gone since
                self.queue.push(checkpoint, facts)
        for checkpoint in passed:
            self.queue.push(checkpoint, self._facts(checkpoint))
        return self.pool.num_free >= num_pages

    def _rank_aged(self) -> None:
        """Rank anew those whose chance is another by now because they have grown older."""
        if self.reuse.look(len(self.queue)):
            for ranked in list(self.queue):
                self._rank(ranked)
        while self._young and self._young[0][0] + YOUNG <= self.reuse.now:
            self._rank(self._young.popleft()[1])

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents before children."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def is_barren(self, node: Node) -> bool:
        """Whether nothing can ever be hit in `node`, and nobody is writing below it."""
        return (
            node.parent is not None
            and node.pages is not None
            and node.checkpoint is None
            and node.resident_children == 0
            and node.locks == 0
        )

    def _note_if_barren(self, node: Node) -> None:
        if self.is_barren(node):
            self.barren[node] = None
            self.barren.move_to_end(node)

    def _drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        node = checkpoint.node
        node.checkpoint, node.loss = None, Reason.EVICTED
        above = self._above(node)
        if node.reuse is not None:
            # what is above is worth more from now on, which is seen when its turn comes
            self.reuse.dropped(node.reuse, above.node.reuse if above is not None else None)
        self.held.forget(checkpoint)
        self.evicted[checkpoint.kind] += 1
        self.pool.release(checkpoint.pages)
        self._note_if_barren(node)
        if self._observer is not None:
            self._observer.node_changed(node)

    def _drop_run(self, node: Node) -> None:
        assert node.pages is not None and node.parent is not None
        del self.barren[node]
        for pages in node.pages:
            self.pool.release(pages)
        node.pages = None
        node.parent.resident_children -= 1
        self._note_if_barren(node.parent)
        self.ghosts[node] = None
        self.num_ghost_tokens += node.num_tokens
        if self._observer is not None:
            self._observer.node_changed(node)
        while self.num_ghost_tokens > self._ghost_limit:
            self._forget(next(iter(self.ghosts)))

    def _forget(self, ghost: Node) -> None:
        """Take a ghost and all ghosts below it out of the tree."""
        assert ghost.parent is not None
        del ghost.parent.children[ghost.key()]
        self._forget_root(ghost.parent)
        stack = [ghost]
        while stack:
            node = stack.pop()
            if node.reuse is not None:
                self.reuse.forget(node.reuse)
            del self.ghosts[node]
            self.num_ghost_tokens -= node.num_tokens
            stack.extend(node.children.values())

    def _forget_root(self, node: Node) -> None:
        if node.parent is None and not node.children and node.locks == 0:
            del self.roots[self._names.pop(node)]
            if self._observer is not None:
                self._observer.root_forgotten(node)
