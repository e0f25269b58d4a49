"""What a schedule holds at which time, in bytes, with shared beginnings counted once.

A checkpoint that is held keeps all tokens before it, so a node's tokens are held whenever a checkpoint at its end is,
or tokens of a child. Times are numbers of requests: a span [s, t) is from after request s to before request t.
"""

import heapq
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from cairn.cache.tree import Node

__all__ = ["Hold", "Ledger", "Spans"]


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """The state at `node`'s end (in units) and all before it, held from request `start` to `end`, which hits it."""

    node: Node
    start: int
    end: int


class Spans:
    """Disjoint half-open spans of time that do not touch, ascending."""

    __slots__ = ("ends", "starts")

    def __init__(self, starts: Iterable[int] = (), ends: Iterable[int] = ()) -> None:
        self.starts = list(starts)
        self.ends = list(ends)

    def copy(self) -> "Spans":
        return Spans(self.starts, self.ends)

    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.starts, self.ends, strict=True))

    def gaps(self, start: int, end: int) -> list[tuple[int, int]]:
        """What of [start, end) no span covers."""
        found, index = [], bisect_left(self.ends, start + 1)
        while start < end and index < len(self.starts) and self.starts[index] < end:
            if start < self.starts[index]:
                found.append((start, self.starts[index]))
            start = self.ends[index]
            index += 1
        if start < end:
            found.append((start, end))
        return found

    def add(self, start: int, end: int) -> None:
        low = bisect_left(self.ends, start)
        high = low
        while high < len(self.starts) and self.starts[high] <= end:
            start, end = min(start, self.starts[high]), max(end, self.ends[high])
            high += 1
        self.starts[low:high], self.ends[low:high] = [start], [end]


def _union(pairs: list[tuple[int, int]]) -> Spans:
    spans = Spans()
    for start, end in sorted(pairs):
        if spans.ends and start <= spans.ends[-1]:
            spans.ends[-1] = max(end, spans.ends[-1])
        else:
            spans.starts.append(start)
            spans.ends.append(end)
    return spans


@dataclass(slots=True)
class _Before:
    """What `undo` puts back: the bytes, and the spans of the nodes that have been written to since."""

    used: NDArray[np.float64]
    runs: dict[Node, Spans | None] = field(default_factory=dict)
    states: dict[Node, Spans | None] = field(default_factory=dict)


class Ledger:
    """`used`: bytes held after each request, shape [requests]. `unit_bytes`: keys and values of a unit of tokens."""

    def __init__(self, num_requests: int, unit_bytes: float, checkpoint_bytes: int) -> None:
        self.used = np.zeros(num_requests, np.float64)
        self._unit_bytes = unit_bytes
        self._checkpoint_bytes = checkpoint_bytes
        self._runs: dict[Node, Spans] = {}
        self._states: dict[Node, Spans] = {}
        self._before: _Before | None = None

    def more(self, hold: Hold) -> NDArray[np.float64]:
        """Bytes that `hold` needs beyond what is held, shape [end - start]."""
        more = np.zeros(hold.end - hold.start)
        self._add_gaps(more, self._states.get(hold.node), hold, self._checkpoint_bytes)
        node: Node | None = hold.node
        while node is not None and node.parent is not None:
            # whatever holds a run holds those above it as well
            if not self._add_gaps(more, self._runs.get(node), hold, node.num_tokens * self._unit_bytes):
                break
            node = node.parent
        return more

    @staticmethod
    def _add_gaps(more: NDArray[np.float64], spans: Spans | None, hold: Hold, size: float) -> bool:
        gaps = [(hold.start, hold.end)] if spans is None else spans.gaps(hold.start, hold.end)
        for start, end in gaps:
            more[start - hold.start : end - hold.start] += size
        return bool(gaps)

    def enter(self, hold: Hold, more: NDArray[np.float64]) -> None:
        """Hold it; `more` is what `more` has just said."""
        self.used[hold.start : hold.end] += more
        self._written(self._states, hold.node).add(hold.start, hold.end)
        node: Node | None = hold.node
        while node is not None and node.parent is not None:
            spans = self._runs.get(node)
            if spans is not None and not spans.gaps(hold.start, hold.end):
                break
            self._written(self._runs, node).add(hold.start, hold.end)
            node = node.parent

    def shrink(self, nodes: Iterable[Node], holds: Mapping[Node, Collection[Hold]]) -> None:
        """Holds at `nodes` have ended, and `holds` are those that are left at each node."""
        changed: list[tuple[int, int, Node]] = []
        lost: dict[Node, list[tuple[int, int]]] = {}

        def lose(node: Node | None, spans: list[tuple[int, int]]) -> None:
            if node is None or node.parent is None or not spans:
                return
            if node not in lost:
                lost[node] = []
                heapq.heappush(changed, (-node.end, len(lost), node))
            lost[node] += spans

        for node in nodes:
            left = _union([(hold.start, hold.end) for hold in holds.get(node, ())])
            gone = [gap for start, end in self._states[node].pairs() for gap in left.gaps(start, end)]
            self._take_away(self._states, node, gone, self._checkpoint_bytes)
            lose(node, gone)
        # a child ends behind its parent, so the deepest first
        while changed:
            node = heapq.heappop(changed)[2]
            bare = self._bare(node, _union(lost[node]).pairs())
            self._take_away(self._runs, node, bare, node.num_tokens * self._unit_bytes)
            lose(node.parent, bare)

    def _bare(self, node: Node, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """What of `spans` neither the node's checkpoint nor a child needs its tokens for."""
        # a beginning that many share is mostly held by one of the first
        for cover in chain((self._states.get(node),), map(self._runs.get, node.children)):
            if cover is not None:
                spans = [gap for start, end in spans for gap in cover.gaps(start, end)]
            if not spans:
                break
        return spans

    def begin(self) -> None:
        """Remember how things stand, for `undo`, until `keep`."""
        self._before = _Before(self.used.copy())

    def keep(self) -> None:
        self._before = None

    def undo(self) -> None:
        """All is as it was at `begin`."""
        before = self._before
        assert before is not None, "nothing to go back to"
        self._before, self.used = None, before.used
        for spans_of, old in ((self._runs, before.runs), (self._states, before.states)):
            for node, spans in old.items():
                if spans is None:
                    spans_of.pop(node, None)
                else:
                    spans_of[node] = spans

    def _take_away(self, spans_of: dict[Node, Spans], node: Node, gone: list[tuple[int, int]], size: float) -> None:
        if not gone:
            return
        old = self._written(spans_of, node)
        without = Spans(*zip(*gone, strict=True))
        spans_of[node] = _union([gap for start, end in old.pairs() for gap in without.gaps(start, end)])
        for start, end in gone:
            self.used[start:end] -= size

    def _written(self, spans_of: dict[Node, Spans], node: Node) -> Spans:
        """The node's spans, which may be written to from now on."""
        spans = spans_of.get(node)
        if self._before is not None:
            old = self._before.runs if spans_of is self._runs else self._before.states
            if node not in old:
                old[node] = spans
                spans = None if spans is None else spans.copy()
        if spans is None:
            spans = Spans()
        spans_of[node] = spans
        return spans
