"""What every checkpoint is worth: which one goes next, and whether a new one would be worth more than that."""

from collections import deque

from cairn.cache.checkpoint import Kind, Origin
from cairn.cache.eviction import CheckpointFacts, Eviction, EvictionQueue
from cairn.cache.hazard import ALL_PARTS, LearnedParts
from cairn.cache.held import HeldCheckpoints
from cairn.cache.layout import CacheLayout
from cairn.cache.reuse import Lineage, Reuse, ReuseBook
from cairn.cache.tree import Checkpoint, Node
from cairn.types import Clock

DOUBT = 3
"""What is new is given a chance: it is not taken if even so many times its worth is less than that of what would go. A
place that statistics alone have named is taken at what they say."""

YOUNG = 8
"""The age, in requests, at which a checkpoint is ranked anew in any case: a chance falls fastest in the beginning."""

MAX_YOUNG = 4096
"""Checkpoints that wait for that."""

GHOST_FACTOR, MIN_GHOSTS = 4, 2048
"""Records of checkpoints that are gone: so many, and as many times the files that fit the pool."""


class Ranking:
    """The checkpoints in the order in which they go, the records of their use, and which of them clients hold.

    `num_pages`: those of the whole pool. `clock` says when what a client holds is let go.
    """

    def __init__(
        self, layout: CacheLayout, num_pages: int, eviction: Eviction, clock: Clock, parts: LearnedParts = ALL_PARTS
    ) -> None:
        self.queue = EvictionQueue(eviction)
        self.reuse = ReuseBook(GHOST_FACTOR * (num_pages // layout.pages_per_checkpoint) + MIN_GHOSTS, parts)
        self.parts = parts
        self.held = HeldCheckpoints(layout, num_pages, clock)
        self._layout = layout
        self._young: deque[tuple[int, Checkpoint]] = deque(maxlen=MAX_YOUNG)
        self._tick = 0

    # -- what comes and goes -------------------------------------------------------------------------------------

    def made(self, checkpoint: Checkpoint, lineage: Lineage, old: Checkpoint | None) -> None:
        """`checkpoint` hangs at its node from now on, in the place of `old` if there was one."""
        node, kind = checkpoint.node, checkpoint.kind
        self.reuse.made(node, kind, checkpoint.origin, lineage)
        if old is not None:
            self.queue.remove(old)
            self.held.replace(old, checkpoint)
        self.use(checkpoint, hit=False)
        if not kind.on_probation and self.parts.young:
            self._young.append((self.reuse.now, checkpoint))
        self._rank(_next_above(node))

    def made_again(self, checkpoint: Checkpoint, kind: Kind) -> None:
        """A checkpoint that is there already was made once more, as one of `kind`, which ends its probation."""
        if checkpoint.kind.on_probation and not kind.on_probation:
            checkpoint.kind = kind
            reuse = checkpoint.node.reuse
            if reuse is not None:
                reuse.kind = kind
                self.reuse.changed(reuse)
            self.use(checkpoint, hit=False)

    def dropped(self, checkpoint: Checkpoint) -> None:
        """`checkpoint`, which is out of the queue, has gone from its node. What is above is worth more from now on,
        which is seen when its turn comes."""
        if checkpoint.node.reuse is not None:
            self._fell_to_above(checkpoint.node.reuse)
        self.held.forget(checkpoint)

    def remember(self, node: Node, kind: Kind, origin: Origin, lineage: Lineage) -> None:
        """Note that a checkpoint might have been at the end of `node`, to see whether it would have been used."""
        if node.reuse is None:
            self._fell_to_above(self.reuse.made(node, kind, origin, lineage))

    def covered(self, known: Reuse) -> None:
        """There may be another checkpoint by now above `known`: if that is only remembered, its hits fall to it."""
        if self.reuse.is_ghost(known):
            self._fell_to_above(known)

    def _fell_to_above(self, reuse: Reuse) -> None:
        above = _next_above(reuse.node)
        self.reuse.dropped(reuse, above.node.reuse if above is not None else None)

    # -- use -----------------------------------------------------------------------------------------------------

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
        self.queue.push(checkpoint, self.facts(checkpoint))

    # -- what clients hold ---------------------------------------------------------------------------------------

    def hold(self, checkpoint: Checkpoint, seconds: int) -> bool:
        """Have a checkpoint go after all others for so long. False, and nothing changes, where the quota is used up."""
        self.let_expired_go()
        if not self.held.take(checkpoint, seconds):
            return False
        self.queue.push(checkpoint, self.facts(checkpoint))
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
            self.queue.push(checkpoint, self.facts(checkpoint))

    # -- worth ---------------------------------------------------------------------------------------------------

    def facts(self, checkpoint: Checkpoint) -> CheckpointFacts:
        """What the eviction policy may know of a checkpoint that is in the tree."""
        node = checkpoint.node
        above = _next_above(node)
        # by place: it is asked for some twenty times a request, and names take as long again
        return CheckpointFacts(
            checkpoint.kind,
            node.end - (above.node.end if above is not None else 0),
            pages_freed(self._layout, checkpoint) * self._layout.page_bytes,
            checkpoint.hits,
            checkpoint.last_used,
            checkpoint.held_until is not None,
            self.reuse.chance(node.reuse) if node.reuse is not None else 0.0,
        )

    def foreseen(self, kind: Kind, saves: int, pages: int, chance: float) -> CheckpointFacts:
        """The facts of a checkpoint that is to be made. `saves`: tokens over the next shallower one; `pages`: those of
        its file and those that only it makes useful."""
        return CheckpointFacts(
            kind=kind,
            saved_tokens=saves,
            freed_bytes=pages * self._layout.page_bytes,
            hits=0,
            last_used=self._tick + 1,
            chance=chance,
        )

    def worth(self, facts: CheckpointFacts) -> bool:
        """Whether a checkpoint that is to be made would not be worth far less than what goes next."""
        if not self.parts.admission:
            return True
        doubt = DOUBT if self.parts.doubt and facts.kind is not Kind.OFFSET else 1
        doubted = facts._replace(chance=doubt * facts.chance)
        return not len(self.queue) or not self.queue.goes_before_all(doubted)

    def rank_aged(self) -> None:
        """Rank anew those whose chance is another by now because they have grown older."""
        if self.reuse.look(len(self.queue)):
            for ranked in list(self.queue):
                self._rank(ranked)
        while self._young and self._young[0][0] + YOUNG <= self.reuse.now:
            self._rank(self._young.popleft()[1])

    def _rank(self, checkpoint: Checkpoint | None) -> None:
        """Put a checkpoint where it now belongs, if it waits to be dropped."""
        if checkpoint is not None and checkpoint in self.queue:
            self.queue.push(checkpoint, self.facts(checkpoint))


def pages_freed(layout: CacheLayout, checkpoint: Checkpoint) -> int:
    """How many pages dropping a checkpoint gives: those of its file and, where nothing below needs them, those of the
    tokens up to the next branch or checkpoint above."""
    node = checkpoint.node
    pages = len(checkpoint.pages)
    if node.resident_children == 0:
        top = node
        while top.parent is not None and top.parent.resident_children <= 1 and top.parent.checkpoint is None:
            top = top.parent
        pages += layout.pages_for(node.end) - layout.pages_for(top.start)
    return pages


def _next_above(node: Node) -> Checkpoint | None:
    """The next shallower checkpoint."""
    above = node.parent
    while above is not None and above.checkpoint is None:
        above = above.parent
    return above.checkpoint if above is not None else None
