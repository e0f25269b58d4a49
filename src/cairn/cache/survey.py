"""The whole tree as columns, gathered in slices: one row a path, which is a run of nodes without a fork."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from cairn.cache.checkpoint import Checkpoint
from cairn.cache.layout import CacheLayout
from cairn.cache.prefix_cache import PrefixCache
from cairn.cache.ranking import pages_freed
from cairn.cache.reasons import Reason
from cairn.cache.tree import Node

Numbers: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"

_SLICE = 1024
"""Nodes between two chances for other work: about two milliseconds."""


@dataclass(slots=True, eq=False)
class Stone:
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
    stones: list[Stone] = field(default_factory=list)
    tick: int = 0
    nodes: int = 0
    namespaces: int = 0
    dropped_tokens: int = 0
    dropped_checkpoints: int = 0

    def walk(self, cache: PrefixCache) -> Iterator[None]:
        """Fill the rows. The tree may change between two items: where it has, a row shows what was there before, what
        is there after, or some of each, and its neighbours still join."""
        self.namespaces = len(cache.residents.roots)
        # (node, the row of its parent or -1, whether it goes on with that, checkpoint above, parent's end, namespace)
        stack: list[tuple[Node, int, bool, int, int, int]] = []
        for namespace, root in cache.residents.roots.items():
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
        self.stones.append(Stone(row, checkpoint, node.end, node.end - above, size, freed, checkpoint.hits))
        self.tick = max(self.tick, checkpoint.last_used)
        return node.end

    def columns(self) -> Columns:
        """The rows' sums, once the walk is over."""
        count = len(self.parent)
        at = np.array([stone.path for stone in self.stones], np.int64)
        rows = np.zeros((count + 1, 6), np.int64)
        rows[1:, 0] = 1
        rows[1:, 1] = np.array(self.end, np.int64) - np.array(self.start, np.int64)
        rows[1:, 2] = self.pages
        rows[1:, 3] = np.bincount(at, [stone.pages for stone in self.stones], count)[:count]
        rows[1:, 4] = np.bincount(at, minlength=count)[:count]
        rows[1:, 5] = np.bincount(at, [stone.hits for stone in self.stones], count)[:count]
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
