"""How soon checkpoints of a class are used again: hazard rates by age, learned online, and the index that ranks them.

A *class* is a short tuple, from the general to the particular; it is a row of the table, and so is each of its
beginnings. A row knows hits and time at risk by age. What a row has not seen enough of it takes from the row above it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Class = tuple[int, ...]

BINS, OLDEST = 34, 1 << 16
"""Two bins to an octave of age, and where the last begins, in requests."""

PSEUDO_HITS = 3.0
"""How many hits the row above counts for, unless a table is told otherwise."""

MAX_HITS = 1 << 14
"""When the table has seen so many, all counts are halved: what is learned goes with the times."""

_RANKED_AT_A_TIME = 24_000
"""Pairs of bins: of larger arrays than some 200 KB the allocator gives the memory back to the system and takes it anew,
which costs more than all of the arithmetic."""

_EDGES: NDArray[np.float64] = np.concatenate([[0.0], 2.0 ** (np.arange(BINS) / 2)])
_WIDTHS = np.diff(_EDGES)
_PRIOR = 0.1 / np.maximum(1.0, _EDGES[1:])
"""Before anything is known: as likely to be used in one octave of age as in the next, and seldom."""

Floats = NDArray[np.float64]


_BINS = np.minimum(np.searchsorted(_EDGES, np.arange(OLDEST + 1), side="right") - 1, BINS - 1)
_BIN_OF = bytes(_BINS.tolist())
"""The bin of each age up to `OLDEST`: for many at once, and for one."""


@dataclass(slots=True, eq=False, kw_only=True)
class Watched:
    """What waits for its next use. `since`: the number of the request that made or last used it. `row`: that of its
    class in the hazard table. `slot`: its place in the table's columns; None while nobody counts its time."""

    since: int = 0
    row: int = 0
    slot: int | None = None


class HazardTable:
    """Hits and time at risk by class and age, and what is waiting for its next use. Ages and times in requests; counts
    show in `index` after the next `refresh`. `prior`: hits per request by age before anything was counted, [BINS]."""

    prior = _PRIOR

    def __init__(self, max_classes: int = 4096, pseudo_hits: float = PSEUDO_HITS) -> None:
        """At most `max_classes` rows. `pseudo_hits`: for how many hits the row above counts, of which the
        first one is `prior`."""
        self._rows: dict[Class, int] = {(): 0}
        # by length of the class the rows, and those of their beginnings
        self._levels: list[tuple[list[int], list[int]]] = []
        self._max_classes, self._pseudo_hits = max_classes, pseudo_hits
        self._counts: Floats = np.zeros((64, 2 * BINS))
        """By row the hits, and then the time at risk, of each age."""
        # read one at a time, for which lists are several times as fast as arrays; a new row reads what is above it
        self._index: list[list[float]] = [[PSEUDO_HITS / 1000] * BINS]
        # in columns, since there are thousands: row, since when it waits, up to when that has been counted, and its end
        self._waits: Floats = np.full((4, 64), np.inf)
        # the first three of those that have begun since the last count, by slot
        self._begun: dict[int, tuple[int, int, int]] = {}
        self._free = list(range(63, -1, -1))

    def row(self, kind: Class) -> int:
        """The row of a class, made if need be; that of its longest known beginning when the table is full."""
        row = self._rows.get(kind)
        if row is None:
            parent = self.row(kind[:-1])
            row = len(self._rows)
            if row >= self._max_classes:
                return parent
            self._rows[kind] = row
            self._index.append(self._index[parent])
            if len(self._levels) < len(kind):
                self._levels.append(([], []))
            rows, parents = self._levels[len(kind) - 1]
            rows.append(row)
            parents.append(parent)
            if row == len(self._counts):
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        return row

    def watch(self, watched: Watched, kind: Class, now: int) -> None:
        """From `now` on the time of `watched`, which waits since `watched.since`, counts for class `kind`."""
        self.forget(watched, now)
        if not self._free:
            self._count_waits(now)
            if 2 * len(self._free) < self._waits.shape[1]:
                size = self._waits.shape[1]
                self._free += range(2 * size - 1, size - 1, -1)
                self._waits = np.concatenate([self._waits, np.full_like(self._waits, np.inf)], axis=1)
        watched.row, watched.slot = self.row(kind), self._free.pop()
        self._waits[3, watched.slot] = np.inf
        self._begun[watched.slot] = watched.row, watched.since, now

    def use(self, watched: Watched, now: int) -> None:
        """Count a use `now`, from which it waits anew; where its time is not counted, no use is."""
        if watched.slot is not None:
            self._counts[watched.row, _BIN_OF[min(now - watched.since, OLDEST)]] += 1
        watched.since = now

    def forget(self, watched: Watched, now: int) -> None:
        """Its time is counted up to `now`, and no further."""
        if watched.slot is not None:
            self._waits[3, watched.slot] = now
            watched.slot = None

    def _count_waits(self, now: int) -> None:
        """Count how long each has waited, all of them at once, and make room for others where waiting is over."""
        self._waits[:3, list(self._begun)] = np.array([*self._begun.values()], np.float64).reshape(-1, 3).T
        self._begun.clear()
        (there,) = np.nonzero(self._waits[2] < np.inf)
        rows, since, counted, end = self._waits[:, there]
        self._waits[2, there] = np.where(end < np.inf, np.inf, now)
        self._free += there[end < np.inf].tolist()
        # the time up to its age now, less that up to the age to which it has been counted
        ages, signs = np.concatenate([np.minimum(end, now) - since, counted - since]), np.repeat([1.0, -1.0], len(rows))
        bins, risk = _BINS[np.minimum(ages, OLDEST).astype(np.intp)], self._counts[:, BINS:]
        at = np.tile(rows.astype(np.int64), 2) * BINS + bins
        in_last = np.bincount(at, signs * (ages - _EDGES[bins]), risk.size).reshape(risk.shape)
        ended = np.bincount(at, signs, risk.size).reshape(risk.shape)
        # each has gone through all bins before its last one as a whole
        risk += in_last + (ended[:, ::-1].cumsum(axis=1)[:, ::-1] - ended) * _WIDTHS

    def index(self, row: int, age: int) -> float:
        """Expected uses per request of a checkpoint of class `row` at `age`, for the best time to keep it: see
        `refresh`."""
        return self._index[row][_BIN_OF[age] if age < OLDEST else BINS - 1]

    def refresh(self, now: int) -> None:
        """Count up to `now`, and compute the index of each row and age anew. O(waiting + rows x BINS^2) of array
        arithmetic.

        It is the Gittins index of keeping something until some age and no longer: the most hits per unit of time over
        all such ages (Gittins, "Bandit processes and dynamic allocation indices", J. R. Stat. Soc. B 41, 1979; for
        stopping problems of one arm Aalto, Ayesta and Righter, "On the Gittins index in the M/G/1 queue", 2009). Ranked
        by the present hazard alone, what is used after a pause would be dropped during the pause.
        """
        self._count_waits(now)
        counts = self._counts[: len(self._rows)].copy()
        by_row = list(counts)
        for rows, parents in reversed(self._levels):
            # one by one, which takes half as long as `np.add.at`
            for row, parent in zip(rows, parents, strict=True):
                by_row[parent] += by_row[row]
        hits, risk = counts[:, :BINS], counts[:, BINS:]
        if hits[0].sum() > MAX_HITS:
            self._counts /= 2
        self._index = self.rank(self.hazards(hits, risk)).tolist()

    def hazards(self, hits: Floats, risk: Floats) -> Floats:
        """Hits per unit of time from hits and time at risk, [rows, BINS]. A row has the shape of the one above it, at
        its own height, but where it knows better.

        A bin alone has seen little, and rates change slowly with the logarithm of the age: the bins around it count,
        too (a kernel estimate, as in Ramlau-Hansen, "Smoothing counting process intensities by means of kernel
        functions", Ann. Stat. 11, 1983).
        """
        near_hits, near_risk = self.smooth(hits), self.smooth(risk)
        hazards = np.empty_like(hits)
        hazards[0] = (near_hits[0] + self._pseudo_hits) / (near_risk[0] + self._pseudo_hits / self.prior)
        known = int(np.flatnonzero(risk[0])[-1]) if risk[0].any() else 0
        for position in range(known + 1, BINS):
            hazards[0, position] = hazards[0, position - 1] * _WIDTHS[position - 1] / _WIDTHS[position] / 2
        for level, parents in self._levels:
            above, rows = hazards[parents], np.array(level)
            expected = (above * risk[rows]).sum(axis=1, keepdims=True)
            height = (hits[rows].sum(axis=1, keepdims=True) + self._pseudo_hits) / (expected + self._pseudo_hits)
            least = np.maximum(above * height, 1e-12)
            hazards[rows] = (near_hits[rows] + self._pseudo_hits) / (near_risk[rows] + self._pseudo_hits / least)
        return hazards

    @staticmethod
    def smooth(counts: Floats) -> Floats:
        """Per row and bin its own counts and those of the bins up to an octave away, which count the less the further;
        in all twice what one bin would. Shape [rows, BINS]."""
        for _ in range(2):
            spread = counts.copy()
            spread[:, 1:] += counts[:, :-1] / 2
            spread[:, :-1] += counts[:, 1:] / 2
            counts = spread
        return counts / 2

    @staticmethod
    def rank(hazards: Floats) -> Floats:
        """Per row and bin the most hits per unit of time over all later bins to stop at; shape [rows, BINS]."""
        # a column a row: numpy compares whole bins much faster than the few numbers of a row
        by_bin, widths = hazards.T, _WIDTHS[:, None]
        survive = np.exp(-by_bin * widths)
        alive, time = np.ones((BINS + 1, len(hazards))), np.zeros((BINS + 1, len(hazards)))
        np.cumprod(survive, axis=0, out=alive[1:])
        np.cumsum(alive[:-1] * (1 - survive) / by_bin, axis=0, out=time[1:])
        index = np.empty(by_bin.shape)
        at_a_time = max(1, _RANKED_AT_A_TIME // index.size)
        for start in range(0, BINS, at_a_time):
            # several in one go: where that pairs a bin with an earlier one, less than nothing is gained
            end = min(start + at_a_time, BINS)
            gained, waited = alive[start:end, None] - alive[start + 1 :], time[start + 1 :] - time[start:end, None]
            np.divide(gained, np.maximum(waited, 1e-9, out=waited), out=gained)
            np.maximum.reduce(gained, axis=1, out=index[start:end])
        return index.T
