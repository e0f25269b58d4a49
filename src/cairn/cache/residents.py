"""What the cache holds when nobody runs: the trees of all namespaces and their checkpoints, and how room is made.

When room is needed, runs of tokens without a checkpoint at or below them go first, the longest unused before others;
then the checkpoint that the eviction policy names, which may make a run barren.
"""

from collections import Counter
from collections.abc import Iterator

from cairn.cache.checkpoint import Kind, Origin
from cairn.cache.events import TreeObserver
from cairn.cache.eviction import Eviction
from cairn.cache.hazard import ALL_PARTS, LearnedParts
from cairn.cache.layout import CacheLayout
from cairn.cache.pages import PagePool
from cairn.cache.ranking import Ranking
from cairn.cache.reasons import Reason
from cairn.cache.reuse import NO_LINEAGE, Lineage
from cairn.cache.runs import Runs
from cairn.cache.tree import Checkpoint, Node
from cairn.types import Clock, Pages, SystemClock


class Residents:
    """Nodes, checkpoints and ghosts: `runs` has the books of the nodes, `ranking` the order of the checkpoints.

    `ghost_tokens` and `observer` as in `Runs`; `clock` says when what a client holds is let go.
    """

    def __init__(
        self,
        layout: CacheLayout,
        pool: PagePool,
        eviction: Eviction,
        ghost_tokens: int,
        observer: TreeObserver | None = None,
        clock: Clock | None = None,
        parts: LearnedParts = ALL_PARTS,
    ) -> None:
        self.pool = pool
        self.ranking = Ranking(layout, pool.num_pages, eviction, clock or SystemClock(), parts)
        self.queue, self.reuse, self.held = self.ranking.queue, self.ranking.reuse, self.ranking.held
        self.runs = Runs(layout, pool, self.reuse, ghost_tokens, observer)
        self.roots = self.runs.roots
        self.taken: Counter[Kind] = Counter()
        self.evicted: Counter[Kind] = Counter()

    @property
    def num_ghost_tokens(self) -> int:
        return self.runs.num_ghost_tokens

    @property
    def version(self) -> int:
        """Another one when anything is that a lookup may come by."""
        return self.runs.version + self.reuse.version

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents before children."""
        return self.runs.nodes()

    def let_expired_go(self) -> None:
        """Holds whose time is over have ended, whether or not anything has happened since."""
        self.ranking.let_expired_go()

    def attach(
        self, node: Node, pages: Pages, kind: Kind, origin: Origin, maker: str, lineage: Lineage = NO_LINEAGE
    ) -> bool:
        """Hang a checkpoint file at the end of `node`, taking over the caller's reference to its pages.

        False if one hangs there already that serves as well; then the caller keeps its pages.
        """
        old = node.checkpoint
        if old is not None:
            if old.origin is not Origin.DECODE or origin is Origin.DECODE:
                self.ranking.made_again(old, kind)
                return False
            self.pool.release(old.pages)
        node.checkpoint = checkpoint = Checkpoint(node, pages, kind, origin, maker)
        node.loss = None
        self.runs.barren.pop(node, None)
        self.taken[kind] += 1
        self.ranking.made(checkpoint, lineage, old)
        self.runs.changed(node)
        return True

    def make_room(self, num_pages: int) -> bool:
        """Drop until `num_pages` pages are free. False if all that may go has gone and it is not enough."""
        runs, ranking, queue = self.runs, self.ranking, self.queue
        if runs.drop_barren(num_pages):
            return True
        passed: list[Checkpoint] = []
        ranking.let_expired_go()
        ranking.rank_aged()
        while not runs.drop_barren(num_pages):
            checkpoint = queue.pop()
            if checkpoint is None:
                break
            if self.pool.counts[checkpoint.pages[0]] > 1:
                # a step that has not been applied reads the file: dropping it would free nothing
                passed.append(checkpoint)
                continue
            facts = ranking.facts(checkpoint)
            if queue.goes_before_all(facts):
                self._drop(checkpoint)
            else:
                # it is worth more than when it was ranked: what was above it has gone since
                queue.push(checkpoint, facts)
        for checkpoint in passed:
            queue.push(checkpoint, ranking.facts(checkpoint))
        return self.pool.num_free >= num_pages

    def _drop(self, checkpoint: Checkpoint) -> None:
        node = checkpoint.node
        node.checkpoint, node.loss = None, Reason.EVICTED
        self.ranking.dropped(checkpoint)
        self.evicted[checkpoint.kind] += 1
        self.pool.release(checkpoint.pages)
        self.runs.note_if_barren(node)
        self.runs.changed(node)
