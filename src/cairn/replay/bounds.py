"""Reference lines: what a policy's hit rate is to be measured against.

`unlimited` is the longest prefix of each prompt that an earlier prompt, or an earlier prompt and its answer, had:
no cache of whatever size has more to offer.

`offline` is a schedule that knows the future. Its rules, which `tests/replay/brute_force.py` states once more:

- Between request t and t + 1 a set of checkpoints is held, each with the keys and values of all tokens before it;
  tokens below several of them count once. The bytes of that set never exceed the budget.
- Request i hits one held checkpoint on its path. It computes the rest, so it passes every position from its hit on, and
  any of them may be held from then on. A position below the hit is not passed, so it is there only if it was held.
- A running request's own pages and states lie apart.

Why what comes out is feasible: a hit of request i at position p is only entered together with a start s < i whose
path has p, and with p and all tokens below it held from s to i. That s passes p, since its own hit is p or less: in the
first round because nothing deeper than p had been seen when s came, in later rounds because s may not be given a deeper
hit any more. The ledger adds up all that is held at each time and refuses what does not fit. So offline <= the optimum,
and since every hit ends within what was seen before, the optimum <= unlimited.

How it is found: hits are entered greedily, the most tokens saved per byte and request of holding first, counting only
bytes that are not held anyway. Costs fall as neighbours come in, so whatever was refused is tried again in later
rounds, after the holds that a deeper hit has made needless are taken out. O(requests x depth of the tree) a round and
the slices of the ledger.
"""

import heapq
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cairn.cache.layout import CacheLayout
from cairn.cache.tree import Node
from cairn.replay.paths import Paths
from cairn.replay.traces import Trace

__all__ = ["Hold", "footprint_bytes", "offline_hits", "offline_schedule", "unlimited_hits"]

ROUNDS = 4
MAX_LOOK_BACK = 64
"""Earlier visits that are looked at for a later start of a hold."""


def unlimited_hits(trace: Trace) -> NDArray[np.int64]:
    """Tokens of each prompt's path that were seen before, shape [requests]."""
    paths, hits = Paths(), np.zeros(len(trace.requests), np.int64)
    for index, request in enumerate(trace.requests):
        hits[index] = paths.shared(request.path) * trace.unit
        paths.add(request.path, request.answer)
    return hits


def footprint_bytes(trace: Trace, layout: CacheLayout) -> int:
    """Keys and values of all distinct tokens of all paths, answers included, and a checkpoint for each request."""
    paths = Paths()
    for request in trace.requests:
        paths.add(request.path, request.answer)
    return int(paths.num_units * trace.unit * layout.bytes_per_token) + len(trace.requests) * layout.checkpoint_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """The state at `node`'s end (in units) and all before it, held from request `start` to `end`, which hits it."""

    node: Node
    start: int
    end: int


def offline_schedule(trace: Trace, layout: CacheLayout, budget_bytes: int) -> tuple[Hold, ...]:
    """The schedule above: at most one hold that ends at each request."""
    schedule = _Schedule(trace, layout, budget_bytes)
    for number in range(ROUNDS):
        if not schedule.fill(late_starts=number > 0):
            break
        schedule.rebuild()
    return tuple(schedule.chosen.values())


def offline_hits(trace: Trace, layout: CacheLayout, budget_bytes: int) -> NDArray[np.int64]:
    """Hit tokens of each request under `offline_schedule`, shape [requests]."""
    hits = np.zeros(len(trace.requests), np.int64)
    for hold in offline_schedule(trace, layout, budget_bytes):
        hits[hold.end] = hold.node.end * trace.unit
    return hits


class _Ledger:
    """Bytes held after each request, shape [requests], and when each run and each checkpoint is held."""

    def __init__(self, num_requests: int, unit_bytes: float, checkpoint_bytes: int) -> None:
        self.used = np.zeros(num_requests, np.float64)
        self._unit_bytes = unit_bytes
        self._checkpoint_bytes = checkpoint_bytes
        self._runs: dict[Node, _Spans] = {}
        self._states: dict[Node, _Spans] = {}

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
    def _add_gaps(more: NDArray[np.float64], spans: "_Spans | None", hold: Hold, size: float) -> bool:
        gaps = [(hold.start, hold.end)] if spans is None else spans.gaps(hold.start, hold.end)
        for start, end in gaps:
            more[start - hold.start : end - hold.start] += size
        return bool(gaps)

    def enter(self, hold: Hold, more: NDArray[np.float64]) -> None:
        self.used[hold.start : hold.end] += more
        self._states.setdefault(hold.node, _Spans()).add(hold.start, hold.end)
        node: Node | None = hold.node
        while node is not None and node.parent is not None:
            spans = self._runs.setdefault(node, _Spans())
            if not spans.gaps(hold.start, hold.end):
                break
            spans.add(hold.start, hold.end)
            node = node.parent


class _Spans:
    """Disjoint half-open spans of time that do not touch, ascending."""

    __slots__ = ("ends", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

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


class _Schedule:
    """Which request hits where, in units, and since when that is held."""

    def __init__(self, trace: Trace, layout: CacheLayout, budget_bytes: int) -> None:
        self._unit_bytes, self._checkpoint_bytes = trace.unit * layout.bytes_per_token, layout.checkpoint_bytes
        self._budget = budget_bytes
        number = len(trace.requests)
        self.hits = np.zeros(number, np.int64)
        self._seen = unlimited_hits(trace) // trace.unit
        self._ceiling = np.full(number, np.iinfo(np.int64).max)
        """Deepest hit that a request may have, since others rely on a position that it passes."""
        self.chosen: dict[int, Hold] = {}
        self._visits: dict[Node, list[int]] = {}
        self._candidates: list[Hold] = []
        self._ledger = _Ledger(number, self._unit_bytes, self._checkpoint_bytes)
        self._find_candidates(trace)

    def _find_candidates(self, trace: Trace) -> None:
        paths = Paths()
        for request in trace.requests:
            paths.add(request.path, request.answer)
        # where a prompt leaves what was seen before a node ends by now: a branch, or the prompt's end
        passed: dict[Node, int] = {}
        for index, request in enumerate(trace.requests):
            seen, latest = int(self._seen[index]), -1
            chain = paths.chain(request.path, request.answer)
            for node in reversed(chain):
                self._visits.setdefault(node, []).append(index)
                # of those held from the same request on, the deepest is worth most
                if node.end <= seen and passed[node] > latest:
                    latest = passed[node]
                    self._candidates.append(Hold(node, latest, index))
                if node.end >= seen:
                    passed[node] = index

    def fill(self, late_starts: bool) -> bool:
        """Enter hits, the best first, as long as they fit. False if none did."""
        heap = []
        for number, candidate in enumerate(self._candidates):
            hold = self._latest_start(candidate) if late_starts else candidate
            if hold.node.end > self.hits[hold.end]:
                heap.append((-self._worth(hold, self._ledger.more(hold)), number, hold))
        heapq.heapify(heap)
        changed = False
        while heap:
            worth, number, hold = heapq.heappop(heap)
            if not self.hits[hold.end] < hold.node.end <= self._ceiling[hold.end]:
                continue
            if self.hits[hold.start] > hold.node.end:
                continue  # its start has been given a deeper hit and does not pass there any more
            more = self._ledger.more(hold)
            now = -self._worth(hold, more)
            if heap and now > heap[0][0] and now > worth:
                heapq.heappush(heap, (now, number, hold))
                continue
            if (self._ledger.used[hold.start : hold.end] + more).max() <= self._budget:
                self._ledger.enter(hold, more)
                self._choose(hold)
                changed = True
        return changed

    def _worth(self, hold: Hold, more: NDArray[np.float64]) -> float:
        return float((hold.node.end - self.hits[hold.end]) / (1.0 + more.sum()))

    def _choose(self, hold: Hold) -> None:
        self.chosen[hold.end] = hold
        self.hits[hold.end] = hold.node.end
        self._ceiling[hold.start] = min(self._ceiling[hold.start], hold.node.end)

    def _latest_start(self, hold: Hold) -> Hold:
        """The same hit, held since the last request that passes it as things stand."""
        visits = self._visits[hold.node]
        last = bisect_left(visits, hold.end)
        for index in visits[max(0, last - MAX_LOOK_BACK) : last][::-1]:
            if index > hold.start and self.hits[index] <= hold.node.end:
                return Hold(hold.node, index, hold.end)
        return hold

    def rebuild(self) -> None:
        """Take out what is held for hits that were made deeper since."""
        self._ledger = _Ledger(len(self.hits), self._unit_bytes, self._checkpoint_bytes)
        self._ceiling[:] = np.iinfo(np.int64).max
        for hold in self.chosen.values():
            self._ledger.enter(hold, self._ledger.more(hold))
            self._choose(hold)
