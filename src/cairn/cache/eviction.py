"""Which checkpoint is dropped first: the seam `EvictionPolicy`, and the policies that `--eviction` names."""

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cairn.cache.checkpoint import Kind, Lineage, Origin
from cairn.cache.divergence import DivergenceStats
from cairn.cache.hazard import PSEUDO_HITS, Class, HazardTable, Watched
from cairn.cache.tree import Checkpoint, Node, next_above, next_below
from cairn.cache.tree_store import TreeObserver
from cairn.step import GRID

__all__ = ["EvictionPolicy", "LeastRecentlyUsed", "ValuePerByte", "eviction_for"]

MIN_REFRESH_INTERVAL = 16
"""Requests between two updates of the statistics, at least."""

RANKED_PER_REQUEST = 4
"""Checkpoints that are ranked anew per request, on average: their chances change with their age."""

RERANK_AGE, MAX_RERANKS = 8, 4096
"""The age, in requests, at which a checkpoint is ranked anew in any case, because a chance falls fastest in the
beginning; and how many checkpoints at most wait for that."""

GHOST_FACTOR, MIN_GHOSTS = 4, 2048
"""Ghosts at most: so many, and as many times the checkpoints that fit the pool."""

DISCOUNT = 0.35
"""What the chance of a path counts for: the positions on it are the best of many that are estimated, so that what they
are expected to save is too much ("The optimizer's curse", Smith and Winkler, Management Science 52, 2006). What is not
known yet is not discounted, so that it is found out."""

_NEW_TOKEN_BINS = (512, 2048, 8192)
"""Where the classes of new tokens begin."""

_AWAITS_TOOLS = 7
"""In the place in a class where others have their turn or, from 3 to 6, how often they were used."""


class EvictionPolicy(TreeObserver):
    """Ranks the checkpoints of one cache: the one with the lowest priority is dropped first.

    The cache calls the methods below, and those of `TreeObserver`, as things happen. All but `priority` do nothing
    here, so a policy overrides what it needs. A policy that keeps records keeps them by node, and forgets them in
    `node_forgotten`.
    """

    version = 0
    """Changes whenever `recorded_origin` may have another answer."""
    awaited: Mapping[Node, float] = MappingProxyType({})
    """Uses per request that are certain, by node: see `AwaitedHits.find`. The cache replaces it."""

    def start(self, max_checkpoints: int, divergences: DivergenceStats) -> None:
        """The policy serves a cache whose pool has room for `max_checkpoints`; where prompts leave the paths of others
        is for it to say to `divergences`. Called once, before all else."""

    def priority(self, checkpoint: Checkpoint, saved_tokens: int, freed_bytes: int) -> float:
        """The rank of a checkpoint, asked for whenever something about it changes; the lowest goes first. One on
        probation is taken where it is expected to save more tokens per request and byte than that.

        `saved_tokens`: need not be computed thanks to it, over the next shallower one. `freed_bytes`: what dropping it
        frees, with the pages that only it makes useful."""
        raise NotImplementedError

    def chance(self, node: Node) -> float:
        """The expected uses per request of the checkpoint at `node`, to be shown; 0 if the policy expects nothing."""
        return 0.0

    def path_chance(self, path: Lineage) -> float:
        """The expected requests, per request, that leave `path` where nothing says so."""
        return 0.0

    def begin_request(self, last_checkpoint_node: Node | None, lineage: Lineage, left: Lineage | None) -> None:
        """A request of `lineage` begins to run, which leaves the path of `left` as nobody did before.
        `last_checkpoint_node`: the deepest node on its path that `recorded_origin` knows."""

    def add(self, checkpoint: Checkpoint, lineage: Lineage) -> None:
        """A checkpoint was taken, perhaps in the place of another one at the same node."""

    def reclassify(self, node: Node) -> None:
        """The checkpoint at `node` was on probation and has another kind now."""

    def await_tools(self, node: Node) -> None:
        """An answer at whose end, or whose prompt's, `node` is was a call: its session waits for its tools, from now on
        until the checkpoint there is used. Those that the request has yet to take there are told by their lineage."""

    def drop(self, checkpoint: Checkpoint) -> None:
        """A checkpoint was dropped and is no longer at its node."""

    def demote(self, last_checkpoint_node: Node) -> None:
        """A request whose path goes through `last_checkpoint_node` has taken checkpoints, perhaps above that node."""

    def recorded_origin(self, node: Node) -> Origin | None:
        """How the state was computed that is or was kept at the end of `node`; None if there is no record of one."""
        return None

    def refresh(self, ranked: Collection[Checkpoint]) -> Iterable[Checkpoint]:
        """Called before checkpoints are dropped. Returns those of `ranked` whose priority has changed with their
        age."""
        return ()

    def records(self) -> Iterable[tuple[Node, bool]]:
        """For the audit: the nodes that there are records of, each with whether its checkpoint is taken for dropped."""
        return ()


@dataclass(slots=True, eq=False, kw_only=True)
class ReuseStats(Watched):
    """The record of the checkpoint that is or was at the end of `node`.

    `lineage`: of the request that took it. `branches`: children that `node` ever had. `awaits_tools`: its session is to
    go on from there once its tools are done. `demoted_child`: the record of a deeper checkpoint that is gone, whose
    hits would now be this one's. `share`: its part of its path's divergences, as it was for `share_of`: their version,
    and where the next deeper one lies.
    """

    node: Node
    kind: Kind
    origin: Origin
    lineage: Lineage
    branches: int = 0
    awaits_tools: bool = False
    hits: int = 0
    demoted_child: "ReuseStats | None" = None
    share: float = 0.0
    share_of: tuple[int, float] = (-1, 0.0)

    @property
    def path(self) -> Lineage | None:
        """The path whose chance that of a checkpoint on probation is a part of; None if it has one of its own."""
        return self.node.lineage if self.kind.on_probation and not self.hits else None

    def class_key(self) -> Class:
        """The class in the hazard table, from the general to the particular."""
        kind, branches = self.kind.number, min(2, self.branches)
        if self.hits and not self.awaits_tools:
            return kind, branches, 3 + min(3, self.hits.bit_length())
        new = self.lineage.turn, bisect_right(_NEW_TOKEN_BINS, self.lineage.new_tokens)
        return (kind, branches, _AWAITS_TOOLS, *new) if self.awaits_tools else (kind, branches, *new)


class ValuePerByte(EvictionPolicy):
    """Drops what saves the least per byte that it keeps: chance of a use per request x tokens saved / bytes freed.

    With the chance at its best over all times to wait, this is what one byte earns per request: what "LHD: Improving
    Cache Hit Rate by Maximizing Hit Density" (Beckmann, Chen and Cidon, NSDI 2018) ranks by, for objects that save
    different amounts. The chance is learned for classes of checkpoints, by age in requests (`cairn.cache.hazard`). A
    record stays for a while when its checkpoint has gone (a *ghost*; `max_ghosts` at most), so that what is learned is
    what would have been, not only what the cache let happen: a prompt that is looked up uses the deepest record on its
    path, whether its checkpoint is there or not.
    """

    def __init__(self, table: HazardTable | None = None) -> None:
        """`table`: the hazard rates, empty; a new `HazardTable` unless given."""
        self.now = self.version = 0
        self.max_ghosts = MIN_GHOSTS
        self.table = table or HazardTable()
        self.path_table = type(self.table)(pseudo_hits=PSEUDO_HITS / DISCOUNT)
        self._records: dict[Node, ReuseStats] = {}
        self._ghosts: OrderedDict[Node, ReuseStats] = OrderedDict()
        self._to_rerank: deque[tuple[int, Checkpoint]] = deque(maxlen=MAX_RERANKS)
        self._learn_at = self._rank_at = 0
        self._paths: OrderedDict[Lineage, None] = OrderedDict()

    def start(self, max_checkpoints: int, divergences: DivergenceStats) -> None:
        assert self.version == 0 and not self._records, "one policy object serves one cache"
        self.max_ghosts = GHOST_FACTOR * max_checkpoints + MIN_GHOSTS
        self._divergences = divergences

    def priority(self, checkpoint: Checkpoint, saved_tokens: int, freed_bytes: int) -> float:
        return self.chance(checkpoint.node) * saved_tokens / max(1, freed_bytes)

    def chance(self, node: Node) -> float:
        """Uses per request to come, at best (see `HazardTable.refresh`), with those of its demoted child; no fewer than
        are certain."""
        record = self._records.get(node)
        if record is None:
            return 0.0
        learned = self._own_chance(record)
        if record.demoted_child is not None and (child := self._demoted_child(record)) is not None:
            learned += self._own_chance(child)
        return max(learned, self.awaited[node]) if node in self.awaited else learned

    def path_chance(self, path: Lineage) -> float:
        return DISCOUNT * self.path_table.index(path.row, self.now - path.since)

    # -- what happens --------------------------------------------------------------------------------------------

    def begin_request(self, last_checkpoint_node: Node | None, lineage: Lineage, left: Lineage | None) -> None:
        self.now += 1
        record = self._records.get(last_checkpoint_node) if last_checkpoint_node is not None else None
        known_there = record is not None and record.node.end >= lineage.start and not record.kind.on_probation
        # nothing on the path could serve those who leave it before its first place on the grid
        if left is not None and not known_there and lineage.start - left.start >= GRID:
            self._divergences.observe(left, lineage.start)
            self.path_table.use(left, self.now)
            left.visits += 1
            self._watch_path(left)
        if record is not None:
            lineage.turn = 0 if record.branches else min(2, record.lineage.turn + 1)
            self.table.use(record, self.now)
            record.hits += 1
            record.awaits_tools = False
            self.table.watch(record, record.class_key(), self.now)
        lineage.since = self.now
        self._watch_path(lineage)

    def _watch_path(self, path: Lineage) -> None:
        """A path is new, or was left by one more request."""
        kind = 3 if path.forked else path.turn
        key = min(3, path.visits), kind, bisect_right(_NEW_TOKEN_BINS, path.new_tokens)
        self.path_table.watch(path, key, self.now)
        self._paths[path] = None
        self._paths.move_to_end(path)
        if len(self._paths) > self.max_ghosts:
            self.path_table.forget(self._paths.popitem(last=False)[0], self.now)

    def add(self, checkpoint: Checkpoint, lineage: Lineage) -> None:
        node, before = checkpoint.node, self._records.get(checkpoint.node)
        record = ReuseStats(node=node, kind=checkpoint.kind, origin=checkpoint.origin, lineage=lineage)
        record.since, record.branches = self.now, len(node.children)
        record.awaits_tools = lineage.awaits_tools and node.end >= lineage.message_end
        self._records[node] = record
        if before is not None:  # what the ghost knew is kept
            record.hits, record.branches, record.demoted_child = before.hits, before.branches, before.demoted_child
            self.table.forget(before, self.now)
            self._ghosts.pop(node, None)
        self.table.watch(record, record.class_key(), self.now)
        self.version += 1
        self._to_rerank.append((self.now, checkpoint))

    def reclassify(self, node: Node) -> None:
        record = self._records.get(node)
        if record is not None:
            record.kind = node.checkpoint.kind if node.checkpoint is not None else record.kind
            record.branches = max(record.branches, len(node.children))
            self.table.watch(record, record.class_key(), self.now)

    node_branched = reclassify

    def await_tools(self, node: Node) -> None:
        record = self._records.get(node)
        if record is not None:
            record.awaits_tools = True
            self.reclassify(node)

    def drop(self, checkpoint: Checkpoint) -> None:
        node = checkpoint.node
        if node in self._records:
            self._ghosts[node] = self._records[node]
            self.demote(node)
            while len(self._ghosts) > self.max_ghosts:
                self.node_forgotten(next(iter(self._ghosts)))

    def node_forgotten(self, node: Node) -> None:
        record = self._records.pop(node, None)
        if record is not None:
            self.table.forget(record, self.now)
            self._ghosts.pop(node, None)

    # -- what is asked -------------------------------------------------------------------------------------------

    def recorded_origin(self, node: Node) -> Origin | None:
        record = self._records.get(node)
        return record.origin if record is not None else None

    def records(self) -> list[tuple[Node, bool]]:
        strays = [(node, True) for node in self._ghosts if node not in self._records]
        return strays + [(record.node, node in self._ghosts) for node, record in self._records.items()]

    def refresh(self, ranked: Collection[Checkpoint]) -> list[Checkpoint]:
        due = list[Checkpoint]()
        if self.now >= self._rank_at:
            due += ranked  # all have grown older
            self._rank_at = self.now + max(1, len(ranked) // RANKED_PER_REQUEST)
            if self.now >= self._learn_at:
                self._learn_at = self.now + max(MIN_REFRESH_INTERVAL, len(ranked) // 4)
                self.table.refresh(self.now)
                self.path_table.refresh(self.now)
        while self._to_rerank and self._to_rerank[0][0] + RERANK_AGE <= self.now:
            due.append(self._to_rerank.popleft()[1])
        return due

    def demote(self, last_checkpoint_node: Node) -> None:
        """The hits of a ghost fall to the next shallower checkpoint."""
        record = self._ghosts.get(last_checkpoint_node)
        if record is None:
            return
        child, record.demoted_child, above = self._demoted_child(record), None, next_above(record.node)
        parent = self._records.get(above.node) if above is not None else None
        if parent is not None:
            # the part of a path that both are on falls to the one above by itself
            demoted = None if record.path is not None and record.path is parent.path else record
            candidates = [each for each in (demoted, child, self._demoted_child(parent)) if each is not None]
            parent.demoted_child = max(candidates, key=self._own_chance, default=None)

    def _demoted_child(self, record: ReuseStats) -> ReuseStats | None:
        """The demoted child of `record`, as long as it is a ghost."""
        child = record.demoted_child
        if child is not None and self._ghosts.get(child.node) is not child:
            record.demoted_child = child = None
        return child

    def _own_chance(self, record: ReuseStats) -> float:
        path = record.path
        if path is None:
            return self.table.index(record.row, self.now - record.since)
        asked = (self._divergences.version, next_below(record.node))
        if record.share_of != asked:
            record.share, record.share_of = self._divergences.share(path, record.node.end, asked[1]), asked
        return self.path_chance(path) * record.share


class LeastRecentlyUsed(ValuePerByte):
    """Drops what has not been used for the longest time. Chances are learned all the same, to be shown (`GET
    /cache`)."""

    def priority(self, checkpoint: Checkpoint, saved_tokens: int, freed_bytes: int) -> float:
        return float(checkpoint.last_used)


def eviction_for(name: str) -> EvictionPolicy:
    """A new policy of the kind that `--eviction` names. Raises ValueError for an unknown name."""
    policies = {"lru": LeastRecentlyUsed, "value": ValuePerByte}
    if name not in policies:
        raise ValueError(f"unknown eviction policy {name!r}: lru or value")
    return policies[name]()
