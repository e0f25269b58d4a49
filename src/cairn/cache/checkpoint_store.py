"""The checkpoints of all trees: the eviction queue, those that clients retain, and how room is made.

When room is needed, nodes without a checkpoint at or below them go first, the longest unused before others; then
checkpoints, as the eviction policy ranks them, and last those that clients retain. Dropping a checkpoint may make nodes
unreachable.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf

from cairn.cache.checkpoint import Kind, Lineage, Origin
from cairn.cache.divergence import DivergenceStats
from cairn.cache.eviction import EvictionPolicy
from cairn.cache.layout import CacheLayout
from cairn.cache.pages import PagePool
from cairn.cache.placement import PlacementPolicy, PromptFacts
from cairn.cache.reasons import Reason
from cairn.cache.retained import RetainedCheckpoints
from cairn.cache.tree import Checkpoint, Node, next_above
from cairn.cache.tree_store import TreeStore, pages_freed
from cairn.types import Clock

Place = tuple[bool, float]
"""Whether a client retains a checkpoint, which goes last then, and its priority."""
Entry = tuple[bool, float, int, Checkpoint]

PEEKED = 63
"""Entries of the eviction queue's heap that are looked at for what goes next: its first six levels."""

COPY_TOKENS = 1
"""What a copy of a state costs: a checkpoint on probation takes the place of another one only if a pool full of its
like would save so many tokens a request more than a pool full of the other's."""


class EvictionQueue:
    """Checkpoints in the order in which they go. O(log n) a push or pop.

    A heap whose outdated entries are passed over when they come up, and swept when they outnumber the live ones.
    """

    def __init__(self, place_of: Callable[[Checkpoint], Place]) -> None:
        """`place_of`: the place of a checkpoint as things are, of which the least goes first."""
        self._place_of = place_of
        self._heap: list[Entry] = []
        self._live: dict[int, Checkpoint] = {}
        self._version = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, checkpoint: object) -> bool:
        return isinstance(checkpoint, Checkpoint) and checkpoint.version in self._live

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._live.values())

    def push(self, checkpoint: Checkpoint, place: Place | None = None) -> None:
        """Put a checkpoint in, or move it to where it belongs now: to `place`, if that is known."""
        self._live.pop(checkpoint.version, None)
        version = checkpoint.version = self._version = self._version + 1
        self._live[version] = checkpoint
        retained, priority = place or self._place_of(checkpoint)
        heapq.heappush(self._heap, (retained, priority, version, checkpoint))
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if entry[2] in self._live]
            heapq.heapify(self._heap)

    def remove(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out, if it is in."""
        self._live.pop(checkpoint.version, None)

    def pop(self) -> Checkpoint | None:
        """Take out the checkpoint that goes next and return it; None if there is none. One that has a later place by
        now, because what was above it has gone, is moved there."""
        while (first := self._first()) is not None:
            checkpoint = first[3]
            self.remove(checkpoint)
            place, after = self._place_of(checkpoint), self._first()
            if after is None or place <= after[:2]:
                return checkpoint
            self.push(checkpoint, place)
        return None

    def price(self) -> float:
        """The priority of the one that goes next; infinite if that is retained or there is none."""
        first = self._first()
        return inf if first is None or first[0] else first[1]

    def prices(self) -> list[float]:
        """The priorities of those that go next, ascending; approximately, and of a few only."""
        return sorted([entry[1] for entry in self._heap[:PEEKED] if entry[2] in self._live and not entry[0]])

    def next(self) -> Iterator[Checkpoint]:
        """Those that go next, the first one first, as they were ranked last."""
        places = [(*self._heap[0][:3], 0)] if self._heap else []
        while places:
            *_, place = heapq.heappop(places)
            entry = self._heap[place]
            if entry[2] in self._live:
                yield entry[3]
            for below in (2 * place + 1, 2 * place + 2):
                if below < len(self._heap):
                    heapq.heappush(places, (*self._heap[below][:3], below))

    def _first(self) -> Entry | None:
        while self._heap and self._heap[0][2] not in self._live:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


class CheckpointStore:
    """The checkpoints at the nodes of `tree`: `queue` has their order, `retained` those that clients retain.

    `taken` and `evicted`: how many there were so far, by kind, and `earned` the tokens that using them has saved.
    `clock` says when the time of a retained one is over.
    """

    def __init__(
        self, layout: CacheLayout, pool: PagePool, tree: TreeStore, eviction: EvictionPolicy, clock: Clock
    ) -> None:
        self.tree = tree
        self.eviction = eviction
        self.queue = EvictionQueue(self._place_of)
        self.retained = RetainedCheckpoints(layout, pool.num_pages, clock)
        self.taken, self.evicted, self.earned = Counter[Kind](), Counter[Kind](), Counter[Kind]()
        self._layout = layout
        self.pool = pool
        self._tick = 0
        self._copy_price = COPY_TOKENS / (pool.num_pages * layout.page_bytes)
        self.divergences = DivergenceStats()
        eviction.start(pool.num_pages // layout.pages_per_checkpoint, self.divergences)

    @property
    def version(self) -> int:
        """Changes whenever a lookup may find something else."""
        return self.tree.version + self.eviction.version

    # -- what comes and goes -------------------------------------------------------------------------------------

    def attach(self, checkpoint: Checkpoint, lineage: Lineage) -> bool:
        """Attach a new checkpoint to its node, taking over the reference to its pages; `rank_attached` ranks it.
        `lineage`: of the request that took it.

        False if one hangs there already that serves as well, which is of the new one's kind then if it was on
        probation; the caller keeps the pages.
        """
        node, old = checkpoint.node, checkpoint.node.checkpoint
        if old is not None:
            if old.origin is not Origin.DECODE or checkpoint.origin is Origin.DECODE:
                if old.kind.on_probation and not checkpoint.kind.on_probation:
                    old.kind = checkpoint.kind
                    self.eviction.reclassify(node)
                    self._touch(old)
                return False
            self.pool.release(old.pages)
            self.queue.remove(old)
            self.retained.replace(old, checkpoint)
        node.checkpoint, node.loss = checkpoint, None
        self.tree.unreachable.pop(node, None)
        self.taken[checkpoint.kind] += 1
        self.eviction.add(checkpoint, lineage)
        self._tick += 1
        checkpoint.last_used = self._tick
        self.tree.changed(node)
        return True

    def rank_attached(self, nodes: Iterable[Node]) -> None:
        """Rank the checkpoints that have been attached to `nodes`, and the next ones above them: what each saves and
        frees goes by its neighbours, so once all are there."""
        self._rank(dict.fromkeys(each for node in nodes for each in (node.checkpoint, next_above(node))))

    def make_room(self, num_pages: int) -> bool:
        """Drop until `num_pages` pages are free. False if all that may go has gone and it is not enough."""
        tree, queue = self.tree, self.queue
        if tree.drop_unneeded(num_pages):
            return True
        passed: list[Checkpoint] = []
        self.end_expired_retentions()
        self._rank(self.eviction.refresh(queue))
        while not tree.drop_unneeded(num_pages) and (checkpoint := queue.pop()) is not None:
            if self.pool.counts[checkpoint.pages[0]] > 1:
                # a step that has not been applied reads the state: dropping it would free nothing
                passed.append(checkpoint)
            else:
                self._drop(checkpoint)
        self._rank(passed)
        return self.pool.num_free >= num_pages

    def next_victims(self, num_pages: int) -> dict[Node, int]:
        """The nodes of the checkpoints that would go for `num_pages` pages, each with the pages that are there before
        it goes; about: what shares pages with another one frees them with the last."""
        unreachable = sum(len(part.pages) for node in self.tree.unreachable for part in node.pages or ())
        free, victims = self.pool.num_free + unreachable, dict[Node, int]()
        for checkpoint in self.queue.next():
            if free >= num_pages:
                break
            victims[checkpoint.node] = free
            free += pages_freed(self._layout, checkpoint)
        return victims

    def _drop(self, checkpoint: Checkpoint) -> None:
        """Drop a checkpoint that is out of the queue. What is above it is worth more from now on, which is seen when
        its turn comes."""
        node = checkpoint.node
        node.checkpoint, node.loss = None, Reason.EVICTED
        self.eviction.drop(checkpoint)
        self.retained.remove(checkpoint)
        self.evicted[checkpoint.kind] += 1
        self.pool.release(checkpoint.pages)
        self.tree.note_trimmable(node)
        self.tree.note_if_unreachable(node)
        self.tree.changed(node)

    # -- use -----------------------------------------------------------------------------------------------------

    def begin_request(
        self, last_checkpoint_node: Node | None, hit: Checkpoint | None, lineage: Lineage, left: Lineage | None
    ) -> None:
        """A request begins to run that resumes from `hit`. The others as in `EvictionPolicy`."""
        self.eviction.begin_request(last_checkpoint_node, lineage, left)
        if last_checkpoint_node is not None and last_checkpoint_node.checkpoint is not hit:
            self._rank([last_checkpoint_node.checkpoint])

    def predict(self, placement: PlacementPolicy, facts: PromptFacts, path: Lineage) -> None:
        """Say in `facts` where a checkpoint is worth its bytes because later prompts are likely to leave `path` after
        it."""
        size, stats = self._layout.pages_to_resume, self.divergences
        chance = self.eviction.path_chance(path) / (size * self._layout.page_bytes)
        facts.answer_worth = chance * facts.stride * stats.share(path, facts.num_tokens, inf)
        if facts.hit >= facts.num_tokens:
            return
        # no position saves more than all that is computed
        most = (facts.num_tokens - facts.hit) * chance
        may_pay = self.pool.num_free >= size or not most < self.queue.price() < inf
        if not may_pay:
            return
        facts.recurring = stats.recurring(path)
        places = placement.candidates(facts)
        if places is None:
            return
        fixed, candidates = places
        idle = self.pool.num_free // size - len(fixed)
        prices = [self._copy_price + price for price in self.queue.prices()]

        def pays(number: int, saved: float) -> bool:
            # what is named anyway takes the first places, but for the prompt's end: the answer's goes there
            victim = min(max(0, number - idle - 1), len(prices) - 1)
            return number < idle or not prices or saved * chance > prices[victim]

        gains = stats.choose(path, facts.hit, fixed, candidates, pays)
        facts.predicted = {position: gain * chance for position, gain in gains.items()}

    def is_worth(self, num_pages: int, worth: float) -> bool:
        """Whether a checkpoint on probation, of `num_pages` pages, is worth its place: that is free, or it is worth
        more than what goes next."""
        return self.tree.drop_unneeded(num_pages) or worth > self._copy_price + self.queue.price()

    def use(self, checkpoint: Checkpoint) -> None:
        """Note that a request resumes from a checkpoint, unless that was dropped meanwhile."""
        if checkpoint.node.checkpoint is checkpoint:
            checkpoint.hits += 1
            self.earned[checkpoint.kind] += self._saved_tokens(checkpoint)
            for observer in self.tree.observers:
                observer.checkpoint_used(checkpoint)
            self._touch(checkpoint)

    def _touch(self, checkpoint: Checkpoint) -> None:
        self._tick += 1
        checkpoint.last_used = self._tick
        self.queue.push(checkpoint)

    def await_uses(self, chances: Mapping[Node, float]) -> None:
        """From now on so many uses per request are certain of the checkpoints at these nodes, and of no others."""
        before, self.eviction.awaited = self.eviction.awaited, chances
        # in an order that a replay has as well; where a chance has risen with the turns alone, it is seen when the
        # checkpoint's turn to go comes
        changed = (node for node in {**before, **chances} if chances.get(node, 0.0) < before.get(node, inf))
        self._rank(node.checkpoint for node in changed)

    def await_tools(self, node: Node | None, lineage: Lineage) -> None:
        """The answer of a request of `lineage`, which ends at `node` as far as it is in the tree, was a call: what its
        session can go on from once its tools are done is worth what is learned of such waits."""
        lineage.awaits_tools = True
        while node is not None and node.parent is not None and node.end >= lineage.message_end:
            self.eviction.await_tools(node)
            self._rank([node.checkpoint])
            node = node.parent

    # -- what clients retain ------------------------------------------------------------------------------------

    def retain(self, checkpoint: Checkpoint, seconds: int) -> bool:
        """Retain a checkpoint for `seconds` from now. Returns False, and changes nothing, if the quota is used up."""
        self.end_expired_retentions()
        if not self.retained.add(checkpoint, seconds):
            return False
        self.queue.push(checkpoint)
        return True

    def renew(self, node: Node | None, upto: int) -> None:
        """Restart the time of the retained checkpoints on the path to `node`, which was hit up to token `upto`."""
        self.end_expired_retentions()
        self.retained.renew_path(node, upto)

    def end_expired_retentions(self) -> None:
        """Retain those no longer whose time is over."""
        self._rank(self.retained.pop_expired())

    # -- rank ----------------------------------------------------------------------------------------------------

    def freed_bytes(self, checkpoint: Checkpoint) -> int:
        """What dropping a checkpoint frees, with the pages that only it makes useful."""
        return pages_freed(self._layout, checkpoint) * self._layout.page_bytes

    def _saved_tokens(self, checkpoint: Checkpoint) -> int:
        above = next_above(checkpoint.node)
        return checkpoint.node.end - (above.node.end if above is not None else 0)

    def _place_of(self, checkpoint: Checkpoint) -> Place:
        saved, freed = self._saved_tokens(checkpoint), pages_freed(self._layout, checkpoint) * self._layout.page_bytes
        return checkpoint.retained_until is not None, self.eviction.priority(checkpoint, saved, freed)

    def _rank(self, checkpoints: Iterable[Checkpoint | None]) -> None:
        """Put checkpoints where they now belong, those that have not been dropped."""
        for checkpoint in checkpoints:
            if checkpoint is not None and checkpoint.node.checkpoint is checkpoint:
                self.queue.push(checkpoint)
