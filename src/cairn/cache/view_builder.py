"""Builds the view of the cache: the tree as a table of rows, folded to a number of paths, and the journal's records.

The walk over the whole tree takes a while, so it is done in slices: the caller does other work in between, and the tree
may change meanwhile. The view is then of several moments, but its sums still add up.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TypeAlias

import numpy as np

from cairn.cache.checkpoint import Kind
from cairn.cache.journal import NAMED_TOKENS
from cairn.cache.layout import CacheLayout
from cairn.cache.placement import Auto
from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.reasons import HintFacts, Reason, hint
from cairn.cache.tree import Checkpoint, Node, last_keys
from cairn.cache.tree_store import pages_freed
from cairn.cache.view import (
    CacheView,
    CheckpointView,
    Folded,
    KindView,
    LostView,
    PathView,
    PolicyView,
    PoolView,
    TreeView,
)
from cairn.step import GRID

Numbers: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"

_SLICE = 1024
"""Nodes of one slice: about two milliseconds."""

_MAX_CHECKPOINTS = 8
"""Checkpoints of one path that are in the view."""
_MAX_LOST = 20


@dataclass(slots=True, eq=False)
class CheckpointRow:
    """A checkpoint as it was met, on the path of row `path`. `saved`: tokens over the next shallower one; `pages`: of
    its state; `freed`: with the pages that only it makes useful."""

    path: int
    checkpoint: Checkpoint
    position: int
    saved: int
    pages: int
    freed: int
    hits: int


@dataclass(slots=True, eq=False)
class TreeTable:
    """The paths of the tree as rows, parents before children: those below row i are (i, until[i]). `locks`: sequences
    that end on it. `last`: the node at a path's end. `tick`: the latest use of a checkpoint. `sums`: running sums of
    (paths, tokens, pages, state pages, checkpoints, hits, locks), shape [paths + 1, 7], once the walk is over."""

    parent: list[int] = field(default_factory=list)
    namespace: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    locks: list[int] = field(default_factory=list)
    last: list[Node] = field(default_factory=list)
    until: list[int] = field(default_factory=list)
    checkpoints: list[CheckpointRow] = field(default_factory=list)
    tick: int = 0
    nodes: int = 0
    namespaces: int = 0
    dropped_tokens: int = 0
    dropped_checkpoints: int = 0
    sums: "np.ndarray[tuple[int, int], np.dtype[np.int64]]" = field(default_factory=lambda: np.zeros((1, 7), np.int64))

    def walk(self, cache: PrefixCache) -> Iterator[None]:
        """Fill the rows; each item ends a slice. Where the tree changes between two slices, a row shows the state
        before, the state after, or a mixture, and its neighbours still join."""
        self.namespaces = len(cache.tree.roots)
        # (node, the row of its parent or -1, whether it goes on with that, checkpoint above, parent's end, namespace)
        stack: list[tuple[Node, int, bool, int, int, int]] = []
        for namespace, root in cache.tree.roots.items():
            number = cache.journal.number(namespace)
            stack.extend((child, -1, False, 0, 0, number) for child in root.children)
        is_open: list[int] = []
        while stack:
            node, row, goes_on, above, start, number = stack.pop()
            pages = 0 if node.pages is None else sum(len(part.pages) for part in node.pages)
            if goes_on and (node.pages is None) == (self.last[row].pages is None):
                self.end[row], self.last[row] = node.end, node
                self.pages[row] += pages
                self.locks[row] += node.locks
            else:
                while is_open and is_open[-1] != row:
                    self.until[is_open.pop()] = len(self.parent)
                self.parent.append(row)
                self.namespace.append(number)
                self.start.append(start)
                self.end.append(node.end)
                self.pages.append(pages)
                self.locks.append(node.locks)
                self.last.append(node)
                self.until.append(0)
                row = len(self.parent) - 1
                is_open.append(row)
            above = self._count_node(cache.layout, node, row, above, start)
            alone = len(node.children) == 1
            stack.extend((child, row, alone, above, node.end, number) for child in node.children)
            if self.nodes % _SLICE == 0:
                yield
        for row in is_open:
            self.until[row] = len(self.parent)
        self._sum_up()

    def _count_node(self, layout: CacheLayout, node: Node, row: int, above: int, start: int) -> int:
        """Count one node; returns the end of the deepest checkpoint on the way down to it."""
        self.nodes += 1
        self.dropped_checkpoints += node.loss is Reason.EVICTED
        if node.pages is None:
            self.dropped_tokens += node.end - start
        checkpoint = node.checkpoint
        if checkpoint is None:
            return above
        size, freed = len(checkpoint.pages), pages_freed(layout, checkpoint)
        self.checkpoints.append(
            CheckpointRow(row, checkpoint, node.end, node.end - above, size, freed, checkpoint.hits)
        )
        self.tick = max(self.tick, checkpoint.last_used)
        return node.end

    def _sum_up(self) -> None:
        count = len(self.parent)
        at = np.array([row.path for row in self.checkpoints], np.int64)
        rows = np.zeros((count + 1, 7), np.int64)
        rows[1:, 0] = 1
        rows[1:, 1] = np.array(self.end, np.int64) - np.array(self.start, np.int64)
        rows[1:, 2] = self.pages
        rows[1:, 3] = np.bincount(at, [row.pages for row in self.checkpoints], count)[:count]
        rows[1:, 4] = np.bincount(at, minlength=count)[:count]
        rows[1:, 5] = np.bincount(at, [row.hits for row in self.checkpoints], count)[:count]
        rows[1:, 6] = self.locks
        self.sums = rows.cumsum(axis=0)

    def sum(self, first: int, until: int) -> Numbers:
        """The sums of rows [first, until), shape [7]."""
        difference: Numbers = self.sums[until] - self.sums[first]
        return difference

    def heaviest(self, state_pages: int, most: int) -> list[int]:
        """At most `most` rows, ascending, and with each row its parent: each next one is the heaviest of those that
        hang below a chosen one or a root. By pages of the subtree, a hit counting as much as a checkpoint's state."""
        count = len(self.parent)
        if not count:
            return []
        subtree = self.sums[self.until] - self.sums[:-1]
        weight = subtree[:, 2] + subtree[:, 3] + state_pages * subtree[:, 5]
        parent = np.array(self.parent, np.int64)
        order = np.lexsort((-weight, parent))
        begins = np.searchsorted(parent[order], np.arange(-1, count), "left").tolist()
        begins.append(count)
        chosen: list[int] = []
        queue: list[tuple[int, int]] = []

        def offer(place: int, below: int) -> None:
            if place < begins[below + 2]:
                heapq.heappush(queue, (-int(weight[order[place]]), place))

        offer(0, -1)
        while queue and len(chosen) < most:
            place = heapq.heappop(queue)[1]
            row = int(order[place])
            chosen.append(row)
            offer(place + 1, self.parent[row])
            offer(begins[row + 1], row)
        return sorted(chosen)


def build_view(cache: PrefixCache, max_paths: int) -> Iterator[CacheView | None]:
    """Build the view in slices: None after each but the last one, then the view.

    `max_paths`: paths in the view, 1 to `MAX_SHOWN`. O(nodes) in all, O(1) nodes a slice but for sorting the paths
    once.
    """
    table = TreeTable()
    for _ in table.walk(cache):
        yield None
    yield None
    shown = table.heaviest(cache.layout.pages_per_checkpoint, max_paths)
    yield None
    paths, below = _paths(cache, table, shown)
    yield None
    present: Counter[Kind] = Counter()
    expected: defaultdict[Kind, float] = defaultdict(float)
    for index, row in enumerate(table.checkpoints):
        present[row.checkpoint.kind] += 1
        expected[row.checkpoint.kind] += 1000 * cache.policy.eviction.chance(row.checkpoint.node) * row.saved
        if index % _SLICE == _SLICE - 1:
            yield None
    journal, now = cache.journal, cache.journal.clock.now()
    facts = _hint_facts(cache, table.dropped_tokens, table.dropped_checkpoints)
    yield CacheView(
        enabled=cache.enabled,
        pool=_pool(cache),
        policy=_policy(cache, present, expected),
        tree=_tree(cache, table, below),
        paths=paths,
        history=[
            replace(interval, age=round(now - start, 3), lost=dict(interval.lost))
            for start, interval in journal.intervals
        ],
        lost=[
            LostView(
                name=prefix.name,
                depth=prefix.depth,
                namespace=prefix.namespace,
                tokens=prefix.tokens,
                requests=prefix.requests,
                age=round(now - prefix.at, 3),
                reason=prefix.reason.value,
                cure=hint(prefix.reason, prefix.depth, facts),
            )
            for prefix in journal.heaviest(_MAX_LOST)
        ],
        unlisted_tokens=journal.floor,
        visits=[replace(visit, age=round(now - at, 3)) for at, visit in reversed(journal.visits)],
    )


def _paths(cache: PrefixCache, table: TreeTable, shown: list[int]) -> tuple[list[PathView], Numbers]:
    """The paths of the rows `shown`, and the sums over the rows that are below none of them."""
    place = {path: index for index, path in enumerate(shown)}
    checkpoints: dict[int, list[CheckpointRow]] = {path: [] for path in shown}
    for row in table.checkpoints:
        if row.path in checkpoints:
            checkpoints[row.path].append(row)
    # rows in the list are folded into no other
    below = [table.sum(path + 1, table.until[path]) for path in shown]
    below.append(table.sum(0, len(table.parent)))
    children = [0] * len(below)
    for path in shown:
        parent = place.get(table.parent[path], -1)
        below[parent] = below[parent] - table.sum(path, table.until[path])
        children[parent] += 1
    views = []
    for index, path in enumerate(shown):
        node, number = table.last[path], table.namespace[path]
        best, others = _best(checkpoints[path])
        views.append(
            PathView(
                name=cache.journal.names.name(number, table.end[path], last_keys(node, NAMED_TOKENS)),
                parent=place.get(table.parent[path]),
                namespace=number,
                start=table.start[path],
                end=table.end[path],
                bytes=table.pages[path] * cache.layout.page_bytes,
                resident=node.pages is not None,
                users=node.locks + int(table.sum(path + 1, table.until[path])[6]),
                children=children[index],
                checkpoints=[_checkpoint(cache, row, table.tick) for row in best],
                more=Folded(
                    checkpoints=len(others),
                    bytes=sum(row.pages for row in others) * cache.layout.page_bytes,
                    hits=sum(row.hits for row in others),
                ),
                below=_folded(cache, below[index]),
            )
        )
    return views, below[-1]


def _best(checkpoints: list[CheckpointRow]) -> tuple[list[CheckpointRow], list[CheckpointRow]]:
    """The checkpoints of a path to show, ascending, and the others. First those that were hit or are not on probation;
    of the rest some that are spread along the path."""
    if len(checkpoints) <= _MAX_CHECKPOINTS:
        return checkpoints, []
    earned = [row for row in checkpoints if row.hits or not row.checkpoint.kind.on_probation]
    best = sorted(earned, key=lambda row: (-row.hits, -row.saved))[:_MAX_CHECKPOINTS]
    room, rest = _MAX_CHECKPOINTS - len(best), [row for row in checkpoints if row not in earned]
    best += [rest[(2 * index + 1) * len(rest) // (2 * room)] for index in range(room)]
    shown = {id(row) for row in best}
    return [row for row in checkpoints if id(row) in shown], [row for row in checkpoints if id(row) not in shown]


def _checkpoint(cache: PrefixCache, row: CheckpointRow, tick: int) -> CheckpointView:
    checkpoint, freed = row.checkpoint, row.freed * cache.layout.page_bytes
    chance = cache.policy.eviction.chance(checkpoint.node)
    return CheckpointView(
        position=row.position,
        kind=checkpoint.kind.value,
        bytes=row.pages * cache.layout.page_bytes,
        hits=row.hits,
        idle=max(0, tick - checkpoint.last_used),
        saved_tokens=row.saved,
        freed_bytes=freed,
        value=round(_per_mib(chance * row.saved / max(1, freed)), 3),
        held=checkpoint.retained_until is not None,
        probation=checkpoint.kind.on_probation and not row.hits,
    )


def _folded(cache: PrefixCache, sums: Numbers) -> Folded:
    paths, tokens, pages, state_pages, checkpoints, hits, _ = sums.tolist()
    size = (pages + state_pages) * cache.layout.page_bytes
    return Folded(paths=paths, tokens=tokens, bytes=size, checkpoints=checkpoints, hits=hits)


def _tree(cache: PrefixCache, table: TreeTable, below: Numbers) -> TreeView:
    paths, tokens, _, state_pages, checkpoints, hits, _ = table.sum(0, len(table.parent)).tolist()
    return TreeView(
        nodes=table.nodes,
        paths=paths,
        namespaces=table.namespaces,
        tokens=tokens,
        checkpoints=checkpoints,
        checkpoint_bytes=state_pages * cache.layout.page_bytes,
        hits=hits,
        dropped_tokens=table.dropped_tokens,
        dropped_checkpoints=table.dropped_checkpoints,
        below=_folded(cache, below),
    )


def _hint_facts(cache: PrefixCache, dropped_tokens: int, dropped_checkpoints: int) -> HintFacts:
    layout, placement = cache.layout, cache.policy.placement
    dropped = layout.pages_for(dropped_tokens) + dropped_checkpoints * layout.pages_per_checkpoint
    return HintFacts(
        all_bytes=(cache.pool.num_pages + dropped) * layout.page_bytes,
        auto=isinstance(placement, Auto),
        exact=cache.policy.exact,
        min_shared=placement.min_shared if placement is not None else GRID,
    )


def _policy(cache: PrefixCache, present: Mapping[Kind, int], expected: Mapping[Kind, float]) -> PolicyView:
    store, used, price = cache.checkpoints, cache.counters.used, cache.checkpoints.queue.price()
    return PolicyView(
        price=round(_per_mib(price), 3) if isfinite(price) else None,
        kinds=[
            KindView(
                kind=kind.value,
                taken=store.taken[kind],
                evicted=store.evicted[kind],
                used=used[kind],
                earned_tokens=store.earned[kind],
                present=present.get(kind, 0),
                expected_tokens=round(expected.get(kind, 0.0), 1),
            )
            for kind in Kind
            if store.taken[kind]
        ],
    )


def _per_mib(value: float) -> float:
    """Tokens in the next 1,000 requests per MiB, from tokens per request and byte."""
    return 1000 * value * (1 << 20)


def _pool(cache: PrefixCache) -> PoolView:
    pinned, pool = cache.pinned, cache.pool
    lists = pinned.by_requests()
    by_requests = pinned.num_distinct(lists)
    lists += pinned.by_transfers()
    with_transfers = pinned.num_distinct(lists)
    held = pinned.num_distinct(lists + pinned.by_steps())
    return PoolView(
        pages=pool.num_pages,
        page_bytes=cache.layout.page_bytes,
        free_pages=pool.num_free,
        cached_pages=pool.num_pages - pool.num_free - held,
        held_by_requests=by_requests,
        held_by_transfers=with_transfers - by_requests,
        held_by_steps=held - with_transfers,
        open_leases=len(pinned.sequences),
        open_holds=sum(not pin.for_requests for pin in pinned.pins.values()),
    )
