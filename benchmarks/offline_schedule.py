"""A schedule of what to hold that knows the future: found greedily, then mended window by window.

Its rules and why it is feasible are in `benchmarks.offline_line`. The search for a better one is a large neighbourhood
search (Shaw, "Using Constraint Programming and Local Search Methods to Solve Vehicle Routing Problems", CP 1998):
forget a random half of what is held in a window of time, fill the room with slightly other preferences, and keep the
better of the two.
"""

import heapq
import random
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from benchmarks.offline_ledger import Hold, Ledger
from numpy.typing import NDArray

from cairn.cache.layout import CacheLayout
from cairn.cache.tree import Node, TokenKey, walk
from cairn.replay.bounds import Paths
from cairn.replay.trace import Trace, TraceRequest

__all__ = ["STEPS", "Schedule", "find_schedule", "nodes_of"]

STARTS, TRIES = 3, 1200
STEPS = STARTS + TRIES
"""Steps of the search, at most: schedules made from nothing, and windows of the best of them."""

ROUNDS = 4
"""How often what was refused is tried again."""

IDLE_TRIES, MAX_IDLE_TRIES = 8, 400
"""The search ends after so many windows in a row without a gain: for each request, and at most."""

MAX_OTHERS = 2
"""Of the hits of a request for which a deeper one could be held from the same time on, so many are looked at."""

MAX_LOOK_BACK = 64
"""Earlier visits that are looked at for a later start of a hold."""

WINDOWS = (4, 100)
"""Requests that a window spans, the least and the most."""

MAX_LOOKED_AT = 250_000
"""The search ends when it has looked at so many hits: a few of them take a millisecond."""

FORGOTTEN = 0.5
"""Share of a window's holds that a try ends."""

NOISE = 0.1
"""Deviation of the logarithm of what preferences are multiplied with in a try."""

CONGESTION, PEAK_CONGESTION = 3, 8
"""Bytes are priced with this power of how full the budget was in the schedule before: where there is room they cost
others nothing. In windows, and in schedules made from nothing."""


def nodes_of(paths: Paths, request: TraceRequest) -> list[Node]:
    """The nodes along a request's path and answer, which have been added, in order."""
    return walk(paths.root, TokenKey(np.concatenate([request.path, request.answer]))).evicted_tail


def find_schedule(
    trace: Trace,
    layout: CacheLayout,
    budget_bytes: int,
    seen: NDArray[np.int64],
    progress: Callable[[int], None] | None = None,
) -> tuple[Hold, ...]:
    """At most one hold that ends at each request. `seen`: units of each path that were seen before, shape [requests];
    `progress` is told how many of `STEPS` are done. The same arguments give the same schedule."""
    tell = progress if progress is not None else _tell_nobody
    schedule = Schedule(trace, layout, budget_bytes, seen)
    schedule.fill_all()
    tell(1)
    prices = schedule.prices(PEAK_CONGESTION)
    for number in range(1, STARTS):
        if schedule.complete:
            break
        other = Schedule(trace, layout, budget_bytes, seen)
        other.fill_all(prices)
        prices = other.prices(PEAK_CONGESTION)
        schedule = min(schedule, other, key=lambda each: each.missing)
        tell(number + 1)
    draw, idle = random.Random(0), 0
    most_idle = min(MAX_IDLE_TRIES, IDLE_TRIES * len(trace.requests))
    for number in range(TRIES):
        if schedule.complete or idle == most_idle or schedule.looked_at > MAX_LOOKED_AT:
            break
        idle = 0 if schedule.mend(draw) > 0 else idle + 1
        tell(STARTS + number + 1)
    tell(STEPS)
    return tuple(schedule.chosen.values())


def _tell_nobody(done: int) -> None:
    return None


@dataclass(slots=True)
class _Preferences:
    """What a byte costs after each request, shape [requests]; `draw` shakes the order in which hits are tried."""

    prices: NDArray[np.float64] | None = None
    draw: random.Random | None = None

    def shaken(self) -> float:
        return 1.0 if self.draw is None else self.draw.lognormvariate(0.0, NOISE)

    def cost(self, hold: Hold, more: NDArray[np.float64]) -> float:
        if self.prices is None:
            return 1.0 + float(more.sum())
        return 1.0 + float((more * self.prices[hold.start : hold.end]).sum())


@dataclass(slots=True)
class _Changes:
    """Holds that came and went, in order, and the nodes of those that went."""

    steps: list[tuple[Hold, bool]] = field(default_factory=list)
    left: dict[Node, None] = field(default_factory=dict)


class Schedule:
    """Which request hits where, in units, and since when that is held.

    `chosen`: by the request that hits. `hits`: units, by request. `complete`: all hit what was seen before.
    `missing`: units that were and are not hit. `looked_at`: hits that `mend` has thought of.
    """

    def __init__(self, trace: Trace, layout: CacheLayout, budget_bytes: int, seen: NDArray[np.int64]) -> None:
        self._budget = budget_bytes
        self._seen = seen.tolist()
        self.missing = int(seen.sum())
        self.hits = [0] * len(trace.requests)
        self.looked_at = 0
        self.chosen: dict[int, Hold] = {}
        self._held_since = np.full(len(trace.requests), len(trace.requests))
        self._from: dict[int, dict[Hold, None]] = {}
        self._at: dict[Node, dict[Hold, None]] = {}
        self._visits: dict[Node, list[int]] = {}
        self._candidates: list[Hold] = []
        self._ledger = Ledger(len(trace.requests), trace.unit * layout.bytes_per_token, layout.checkpoint_bytes)
        self._changes = _Changes()
        self._find_candidates(trace)
        self._starts = np.array([hold.start for hold in self._candidates], np.int64)
        self._ends = np.array([hold.end for hold in self._candidates], np.int64)

    def _find_candidates(self, trace: Trace) -> None:
        paths = Paths()
        for request in trace.requests:
            paths.add(request.path, request.answer)
        # where a prompt leaves what was seen before a node ends by now: a branch, or the prompt's end
        passed: dict[Node, int] = {}
        for index, request in enumerate(trace.requests):
            seen, latest, others = self._seen[index], -1, []
            for node in reversed(nodes_of(paths, request)):
                self._visits.setdefault(node, []).append(index)
                # of those held from the same request on, the deepest is worth most and the others cost less
                if node.end <= seen and passed[node] > latest:
                    latest = passed[node]
                    self._candidates.append(Hold(node, latest, index))
                elif node.end <= seen:
                    others.append(Hold(node, passed[node], index))
                if node.end >= seen:
                    passed[node] = index
            self._candidates += others[:: max(1, -(-len(others) // MAX_OTHERS))]

    @property
    def complete(self) -> bool:
        return self.missing == 0

    def prices(self, power: int) -> NDArray[np.float64]:
        """What a byte costs after each request, shape [requests], from 0 to 1."""
        return (self._ledger.used / max(1, self._budget)) ** power

    def fill_all(self, prices: NDArray[np.float64] | None = None) -> None:
        """Enter hits, the best first, as long as they fit. `prices` None: a byte costs the same at all times."""
        for number in range(ROUNDS):
            self._changes = _Changes()
            self._fill(range(len(self._candidates)), _Preferences(prices), late_starts=number > 0)
            self._settle()
            if not self._changes.steps:
                break

    def mend(self, draw: random.Random) -> int:
        """Fill one window anew, if that is no loss. Returns the units that are hit more."""
        number, before = len(self.hits), self.missing
        length = draw.randint(*WINDOWS)
        begin = draw.randint(1 - length, number - 1)
        end = min(number, begin + length)
        self._changes = _Changes()
        preferences = _Preferences(self.prices(CONGESTION), draw)
        self._ledger.begin()
        behind = max(0, begin + 1)
        for index in (np.flatnonzero(self._held_since[behind:] < end) + behind).tolist():
            if draw.random() < FORGOTTEN:
                self._take_out(self.chosen[index])
        self._settle()
        # those that end behind the window's begin and start before its end; they stand in order of their ends
        first = int(np.searchsorted(self._ends, begin, "right"))
        numbers = (np.flatnonzero(self._starts[first:] < end) + first).tolist()
        self.looked_at += len(numbers)
        self._fill(numbers, preferences, late_starts=True)
        self._settle()
        if self.missing > before:
            self._undo()
            return 0
        self._ledger.keep()
        return before - self.missing

    def _fill(self, numbers: Iterable[int], preferences: _Preferences, late_starts: bool) -> None:
        heap = []
        for number in numbers:
            hold = self._candidates[number]
            if hold.node.end <= self.hits[hold.end]:
                continue
            hold = self._latest_start(hold) if late_starts else hold
            factor = preferences.shaken()
            heap.append((-factor * self._worth(hold, self._ledger.more(hold), preferences), number, factor, hold))
        heapq.heapify(heap)
        while heap:
            worth, number, factor, hold = heapq.heappop(heap)
            if not self._allowed(hold):
                continue
            more = self._ledger.more(hold)
            now = -factor * self._worth(hold, more, preferences)
            if heap and now > heap[0][0] and now > worth:
                heapq.heappush(heap, (now, number, factor, hold))
            elif (self._ledger.used[hold.start : hold.end] + more).max() <= self._budget:
                self._ledger.enter(hold, more)
                if hold.end in self.chosen:
                    self._take_out(self.chosen[hold.end])
                self._put_in(hold)

    def _allowed(self, hold: Hold) -> bool:
        """Whether the hit is a gain, others do not rely on its request for what is before it, and the request that it
        is held from passes it."""
        position = hold.node.end
        if not self.hits[hold.end] < position or self.hits[hold.start] > position:
            return False
        return all(other.node.end >= position for other in self._from.get(hold.end, ()))

    def _worth(self, hold: Hold, more: NDArray[np.float64], preferences: _Preferences) -> float:
        return (hold.node.end - self.hits[hold.end]) / preferences.cost(hold, more)

    def _latest_start(self, hold: Hold) -> Hold:
        """The same hit, held since the last request that passes it as things stand."""
        visits = self._visits[hold.node]
        last = bisect_left(visits, hold.end)
        for index in visits[max(0, last - MAX_LOOK_BACK) : last][::-1]:
            if index <= hold.start:
                break
            if self.hits[index] <= hold.node.end:
                return Hold(hold.node, index, hold.end)
        return hold

    # -- the books -----------------------------------------------------------------------------------------------

    def _put_in(self, hold: Hold) -> None:
        self._changes.steps.append((hold, True))
        self._link(hold)

    def _take_out(self, hold: Hold) -> None:
        """Its bytes are let go of by `_settle`."""
        self._changes.steps.append((hold, False))
        self._changes.left[hold.node] = None
        self._unlink(hold)

    def _link(self, hold: Hold) -> None:
        self.chosen[hold.end] = hold
        self.hits[hold.end] = hold.node.end
        self.missing -= hold.node.end
        self._held_since[hold.end] = hold.start
        self._from.setdefault(hold.start, {})[hold] = None
        self._at.setdefault(hold.node, {})[hold] = None

    def _unlink(self, hold: Hold) -> None:
        del self.chosen[hold.end], self._from[hold.start][hold], self._at[hold.node][hold]
        self.hits[hold.end] = 0
        self.missing += hold.node.end
        self._held_since[hold.end] = len(self.hits)

    def _settle(self) -> None:
        self._ledger.shrink(self._changes.left, self._at)
        self._changes.left.clear()

    def _undo(self) -> None:
        self._ledger.undo()
        for hold, came in reversed(self._changes.steps):
            if came:
                self._unlink(hold)
            else:
                self._link(hold)
