"""The view of the cache: its tree gathered row by row and folded to so many paths, with the journal beside it.

The walk over the whole tree takes a while, so it is done in slices: the caller does other work in between, and the tree
may change meanwhile. The view is then of several moments, and its form is valid all the same.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from cairn.cache.checkpoint_store import pages_freed
from cairn.cache.journal import INTERVAL_SECONDS, NAMED_TOKENS
from cairn.cache.layout import CacheLayout
from cairn.cache.placement import Auto
from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.reasons import HintFacts, Reason, hint
from cairn.cache.tree import Checkpoint, Node, last_keys
from cairn.cache.view import (
    CacheView,
    CheckpointView,
    Folded,
    IntervalView,
    LostView,
    PathView,
    PoolView,
    TreeView,
    VisitView,
)
from cairn.step import GRID

Numbers: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"

_SLICE = 1024
"""Nodes between two chances for other work: about two milliseconds."""

_MAX_ROWS = 8
"""Most checkpoints of one path that are shown one by one."""
_MAX_LOST = 20


# -- the tree row by row ----------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class CheckpointRow:
    """A checkpoint as it was met, standing on row `path`. `saved`: tokens over the next shallower one; `pages`: its
    file's; `freed`: with the pages that only it makes useful."""

    path: int
    checkpoint: Checkpoint
    position: int
    saved: int
    pages: int
    freed: int
    hits: int


@dataclass(frozen=True, slots=True)
class Columns:
    """Running sums of (paths, tokens, pages, file pages, checkpoints, hits), shape [paths + 1, 6]: those of a subtree
    are a difference, because it is a stretch of rows."""

    sums: "np.ndarray[tuple[int, int], np.dtype[np.int64]]"

    def of(self, first: int, until: int) -> Numbers:
        """Of the rows [first, until), shape [6]."""
        difference: Numbers = self.sums[until] - self.sums[first]
        return difference


@dataclass(slots=True, eq=False)
class Survey:
    """Rows in the order of a walk down: those below row i are (i, until[i]). `last`: the node at a path's end. `tick`:
    the latest use of a checkpoint."""

    parent: list[int] = field(default_factory=list)
    namespace: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    last: list[Node] = field(default_factory=list)
    until: list[int] = field(default_factory=list)
    checkpoints: list[CheckpointRow] = field(default_factory=list)
    tick: int = 0
    nodes: int = 0
    namespaces: int = 0
    dropped_tokens: int = 0
    dropped_checkpoints: int = 0

    def walk(self, cache: PrefixCache) -> Iterator[None]:
        """Fill the rows. The tree may change between two items: where it has, a row shows what was there before, what
        is there after, or some of each, and its neighbours still join."""
        self.namespaces = len(cache.tree.roots)
        # (node, the row of its parent or -1, whether it goes on with that, checkpoint above, parent's end, namespace)
        stack: list[tuple[Node, int, bool, int, int, int]] = []
        for namespace, root in cache.tree.roots.items():
            number = cache.journal.number(namespace)
            stack.extend((child, -1, False, 0, 0, number) for child in root.children)
        is_open: list[int] = []
        while stack:
            node, row, goes_on, above, start, number = stack.pop()
            pages = 0 if node.pages is None else sum(map(len, node.pages))
            if goes_on and (node.pages is None) == (self.last[row].pages is None):
                self.end[row], self.last[row] = node.end, node
                self.pages[row] += pages
            else:
                while is_open and is_open[-1] != row:
                    self.until[is_open.pop()] = len(self.parent)
                self._add(node, row, start, pages, number)
                row = len(self.parent) - 1
                is_open.append(row)
            above = self._look_at(cache.layout, node, row, above, start)
            alone = len(node.children) == 1
            stack.extend((child, row, alone, above, node.end, number) for child in node.children)
            if self.nodes % _SLICE == 0:
                yield
        for row in is_open:
            self.until[row] = len(self.parent)

    def _add(self, node: Node, parent: int, start: int, pages: int, namespace: int) -> None:
        self.parent.append(parent)
        self.namespace.append(namespace)
        self.start.append(start)
        self.end.append(node.end)
        self.pages.append(pages)
        self.last.append(node)
        self.until.append(0)

    def _look_at(self, layout: CacheLayout, node: Node, row: int, above: int, start: int) -> int:
        """Take in one node; returns the end of the deepest checkpoint so far on the way down."""
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

    def columns(self) -> Columns:
        """The rows' sums, once the walk is over."""
        count = len(self.parent)
        at = np.array([row.path for row in self.checkpoints], np.int64)
        rows = np.zeros((count + 1, 6), np.int64)
        rows[1:, 0] = 1
        rows[1:, 1] = np.array(self.end, np.int64) - np.array(self.start, np.int64)
        rows[1:, 2] = self.pages
        rows[1:, 3] = np.bincount(at, [row.pages for row in self.checkpoints], count)[:count]
        rows[1:, 4] = np.bincount(at, minlength=count)[:count]
        rows[1:, 5] = np.bincount(at, [row.hits for row in self.checkpoints], count)[:count]
        return Columns(rows.cumsum(axis=0))

    def heaviest(self, columns: Columns, file_pages: int, most: int) -> list[int]:
        """At most `most` rows, ascending, and with each row its parent: each next one is the heaviest of those that
        hang below a chosen one or a root. By pages of the subtree, a hit counting as much as a checkpoint's file."""
        count = len(self.parent)
        if not count:
            return []
        subtree = columns.sums[self.until] - columns.sums[:-1]
        weight = subtree[:, 2] + subtree[:, 3] + file_pages * subtree[:, 5]
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


# -- the view ---------------------------------------------------------------------------------------------------------


def look(cache: PrefixCache, max_paths: int) -> Iterator[CacheView | None]:
    """Look at the cache, a slice at each turn: None until the last item, which is the view.

    At most `max_paths` paths are shown one by one, 1 to `MAX_SHOWN`. O(nodes) in all, and O(1) nodes a turn but for
    sorting the paths once.
    """
    survey = Survey()
    for _ in survey.walk(cache):
        yield None
    columns = survey.columns()
    yield None
    shown = survey.heaviest(columns, cache.layout.pages_per_checkpoint, max_paths)
    yield None
    paths, below = _paths(cache, survey, columns, shown)
    yield None
    yield _whole(cache, _tree(cache, survey, columns, below), paths)


def _paths(cache: PrefixCache, survey: Survey, columns: Columns, shown: list[int]) -> tuple[list[PathView], Numbers]:
    """The paths `shown`, and the sums over those that are below no one of them."""
    place = {path: index for index, path in enumerate(shown)}
    checkpoints: dict[int, list[CheckpointRow]] = {path: [] for path in shown}
    for row in survey.checkpoints:
        if row.path in checkpoints:
            checkpoints[row.path].append(row)
    # what is in the list is folded into nobody
    below = [columns.of(path + 1, survey.until[path]) for path in shown]
    below.append(columns.of(0, len(survey.parent)))
    children = [0] * len(below)
    for path in shown:
        parent = place.get(survey.parent[path], -1)
        below[parent] = below[parent] - columns.of(path, survey.until[path])
        children[parent] += 1
    views = []
    for index, path in enumerate(shown):
        node, number = survey.last[path], survey.namespace[path]
        best, others = _best(checkpoints[path])
        views.append(
            PathView(
                name=cache.journal.names.name(number, survey.end[path], last_keys(node, NAMED_TOKENS)),
                parent=place.get(survey.parent[path]),
                namespace=number,
                start=survey.start[path],
                end=survey.end[path],
                bytes=survey.pages[path] * cache.layout.page_bytes,
                resident=node.pages is not None,
                users=node.locks,
                children=children[index],
                checkpoints=[_checkpoint(cache, row, survey.tick) for row in best],
                more=_rest(cache, others),
                below=_folded(cache, below[index]),
            )
        )
    return views, below[-1]


def _best(checkpoints: list[CheckpointRow]) -> tuple[list[CheckpointRow], list[CheckpointRow]]:
    """Those to be shown, ascending, and the others: first what was hit or is not on probation, and of the rest some all
    along the path."""
    if len(checkpoints) <= _MAX_ROWS:
        return checkpoints, []
    earned = [row for row in checkpoints if row.hits or not row.checkpoint.kind.on_probation]
    best = sorted(earned, key=lambda row: (-row.hits, -row.saved))[:_MAX_ROWS]
    room, rest = _MAX_ROWS - len(best), [row for row in checkpoints if row not in earned]
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
        value=round(1000 * chance * row.saved * (1 << 20) / max(1, freed), 3),
        held=checkpoint.held_until is not None,
        probation=checkpoint.kind.on_probation and not row.hits,
    )


def _rest(cache: PrefixCache, checkpoints: list[CheckpointRow]) -> Folded:
    return Folded(
        checkpoints=len(checkpoints),
        bytes=sum(row.pages for row in checkpoints) * cache.layout.page_bytes,
        hits=sum(row.hits for row in checkpoints),
    )


def _folded(cache: PrefixCache, sums: Numbers) -> Folded:
    paths, tokens, pages, files, checkpoints, hits = sums.tolist()
    size = (pages + files) * cache.layout.page_bytes
    return Folded(paths=paths, tokens=tokens, bytes=size, checkpoints=checkpoints, hits=hits)


def _tree(cache: PrefixCache, survey: Survey, columns: Columns, below: Numbers) -> TreeView:
    paths, tokens, _, files, checkpoints, hits = columns.of(0, len(survey.parent)).tolist()
    return TreeView(
        nodes=survey.nodes,
        paths=paths,
        namespaces=survey.namespaces,
        tokens=tokens,
        checkpoints=checkpoints,
        checkpoint_bytes=files * cache.layout.page_bytes,
        hits=hits,
        dropped_tokens=survey.dropped_tokens,
        dropped_checkpoints=survey.dropped_checkpoints,
        below=_folded(cache, below),
    )


def _whole(cache: PrefixCache, tree: TreeView, paths: list[PathView]) -> CacheView:
    journal, now = cache.journal, cache.journal.clock.now()
    facts = _hint_facts(cache, tree.dropped_tokens, tree.dropped_checkpoints)
    return CacheView(
        enabled=cache.enabled,
        pool=_pool(cache),
        tree=tree,
        paths=paths,
        history=[
            IntervalView(
                age=round(now - interval.start, 3),
                seconds=INTERVAL_SECONDS,
                requests=interval.requests,
                prompt=interval.prompt,
                hit=interval.hit,
                received=interval.received,
                lost={reason.value: tokens for reason, tokens in interval.lost.items()},
            )
            for interval in journal.intervals
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
        visits=[
            VisitView(
                number=visit.number,
                age=round(now - visit.at, 3),
                namespace=visit.namespace,
                prompt=visit.prompt,
                hit=visit.hit,
                received=visit.received,
                matched=visit.matched,
                reason=visit.reason.value,
                lost={reason.value: tokens for reason, tokens in visit.lost.items()},
            )
            for visit in reversed(journal.visits)
        ],
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
        open_leases=len(cache.sequences),
        open_holds=sum(not pin.for_requests for pin in cache.pins.values()),
    )
