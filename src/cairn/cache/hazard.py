"""How soon checkpoints of a class are used again: hazard rates by age, learned online, and the index that ranks them.

A *class* is a short tuple, from the general to the particular; it is a row of the table, and so is each of its
beginnings. A row knows hits and time at risk by age. What a row has not seen enough of it takes from the row above it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Class = tuple[int, ...]

BINS = 34
"""Two to an octave of age: the last begins at 2**16 requests."""

PSEUDO_HITS = 3.0
"""How many hits the row above counts for, unless a table is told otherwise."""

MAX_HITS = 1 << 14
"""When the table has seen so many, all counts are halved: what is learned goes with the times."""

_EDGES: NDArray[np.float64] = np.concatenate([[0.0], 2.0 ** (np.arange(BINS) / 2)])
_WIDTHS = np.diff(_EDGES)
_PRIOR = 0.1 / np.maximum(1.0, _EDGES[1:])
"""Before anything is known: as likely to be used in one octave of age as in the next, and seldom."""

Floats = NDArray[np.float64]


def _bin(age: float) -> int:
    position = int(age * age).bit_length()
    return position if position < BINS else BINS - 1


def _bins(ages: Floats) -> NDArray[np.intp]:
    """`_bin` of each."""
    return np.minimum(np.searchsorted(_EDGES, ages, side="right") - 1, BINS - 1)


@dataclass(slots=True, eq=False, kw_only=True)
class Watched:
    """What waits for its next use. `since`: the number of the request that made or last used it. `row`: that of its
    class in the hazard table. `slot`: its place in the columns of `TimesAtRisk`; None while nobody counts its time."""

    since: int = 0
    row: int = 0
    slot: int | None = None


class TimesAtRisk:
    """Counts in `table` how long things wait without a use, all of them at once now and then: in columns, since there
    are thousands."""

    def __init__(self, table: "HazardTable") -> None:
        self.table = table
        self._rows: NDArray[np.int64] = np.zeros(64, np.int64)
        self._since: Floats = np.zeros(64)
        self._counted: Floats = np.full(64, np.inf)
        """Up to when the time of each has been counted; infinite where there is none."""
        self._free = list(range(63, -1, -1))

    def restart(self, watched: Watched, row: int, now: int) -> None:
        """It was made or used `now`, and is of class `row`."""
        if watched.slot is None:
            if not self._free:
                self._grow()
            watched.slot = self._free.pop()
        watched.since, watched.row = now, row
        slot = watched.slot
        self._rows[slot], self._since[slot], self._counted[slot] = row, now, now

    def use(self, watched: Watched, now: int) -> None:
        """Count a use `now`, and the time before it; where its time is not counted, neither."""
        if watched.slot is not None:
            self._count(watched, now)
            self.table.hit(watched.row, now - watched.since)

    def move(self, watched: Watched, row: int, now: int) -> None:
        """It is of class `row` from now on."""
        self._count(watched, now)
        watched.row = self._rows[watched.slot] = row

    def remove(self, watched: Watched, now: int) -> None:
        """Its time is counted up to `now`, and no further."""
        if watched.slot is not None:
            self._count(watched, now)
            self._counted[watched.slot] = np.inf
            self._free.append(watched.slot)
            watched.slot = None

    def count_all(self, now: int) -> None:
        """Count the time of all up to `now`."""
        (there,) = np.nonzero(self._counted < np.inf)
        since = self._since[there]
        self.table.all_at_risk(self._rows[there], self._counted[there] - since, now - since)
        self._counted[there] = now

    def _count(self, watched: Watched, now: int) -> None:
        slot, since = watched.slot, watched.since
        assert slot is not None, "its time is not counted"
        self.table.at_risk(watched.row, self._counted.item(slot) - since, now - since)
        self._counted[slot] = now

    def _grow(self) -> None:
        size = len(self._rows)
        self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._since = np.concatenate([self._since, np.zeros_like(self._since)])
        self._counted = np.concatenate([self._counted, np.full(size, np.inf)])
        self._free = list(range(2 * size - 1, size - 1, -1))


class HazardTable:
    """Hits and time at risk by class and age. Ages and times in requests; counts show in `index` after the next
    `refresh`. `prior`: hits per request by age before anything was counted, [BINS]."""

    prior = _PRIOR

    def __init__(self, max_classes: int = 4096, pseudo_hits: float = PSEUDO_HITS) -> None:
        """At most `max_classes` rows. `pseudo_hits`: for how many hits the row above counts, of which the
        first one is `prior`."""
        self._rows: dict[Class, int] = {(): 0}
        self._levels: list[list[int]] = [[0]]
        self._parents: list[int] = [-1]
        self._max_classes, self._pseudo_hits = max_classes, pseudo_hits
        self._hits: Floats = np.zeros((64, BINS))
        self._risk: Floats = np.zeros((64, BINS))
        # read one at a time, for which lists are several times as fast as arrays
        self._index: list[list[float]] = [[PSEUDO_HITS / 1000] * BINS]

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, kind: Class) -> int:
        """The row of a class, made if need be; that of its longest known beginning when the table is full."""
        row = self._rows.get(kind)
        if row is None:
            parent = self.row(kind[:-1])
            row = len(self._rows)
            if row >= self._max_classes:
                return parent
            self._rows[kind] = row
            self._parents.append(parent)
            while len(self._levels) <= len(kind):
                self._levels.append([])
            self._levels[len(kind)].append(row)
            if row == len(self._hits):
                self._hits = np.concatenate([self._hits, np.zeros_like(self._hits)])
                self._risk = np.concatenate([self._risk, np.zeros_like(self._risk)])
        return row

    def hit(self, row: int, age: float) -> None:
        """Count a use at `age` of a checkpoint of class `row`."""
        self._hits[row, _bin(age)] += 1

    def at_risk(self, row: int, since: float, until: float) -> None:
        """Count that a checkpoint of class `row` went from age `since` to age `until` without a use."""
        position = _bin(since)
        while since < until:
            end = until if position == BINS - 1 else min(until, float(_EDGES[position + 1]))
            self._risk[row, position] += end - since
            since, position = end, position + 1

    def all_at_risk(self, rows: NDArray[np.int64], since: Floats, until: Floats) -> None:
        """`at_risk` for many at once; all of shape [n].

        From its first bin to its last each goes through those between as a whole, so these need only be counted.
        """
        first, last = _bins(since), _bins(until)
        shape, size = self._risk.shape, self._risk.size
        begins, ends = rows * BINS + first, rows * BINS + last
        into = last > first
        self._risk += np.bincount(begins, np.where(into, _EDGES[first + 1], until) - since, size).reshape(shape)
        begins, ends, rest = begins[into], ends[into], (until - _EDGES[last])[into]
        self._risk += np.bincount(ends, rest, size).reshape(shape)
        # the first bin after `begins` is never the next row's: nothing goes on after a row's last bin
        through = np.bincount(begins + 1, minlength=size) - np.bincount(ends, minlength=size)
        self._risk += through.reshape(shape).cumsum(axis=1) * _WIDTHS

    def index(self, row: int, age: float) -> float:
        """Expected uses per request of a checkpoint of class `row` at `age`, for the best time to keep it: see
        `refresh`."""
        while row >= len(self._index):
            row = self._parents[row]  # not refreshed since it was made
        return self._index[row][_bin(age)]

    def refresh(self) -> None:
        """Compute the index of each row and age anew. O(rows x BINS^2) of array arithmetic.

        It is the Gittins index of keeping something until some age and no longer: the most hits per unit of time over
        all such ages (Gittins, "Bandit processes and dynamic allocation indices", J. R. Stat. Soc. B 41, 1979; for
        stopping problems of one arm Aalto, Ayesta and Righter, "On the Gittins index in the M/G/1 queue", 2009). Ranked
        by the present hazard alone, what is used after a pause would be dropped during the pause.
        """
        number = len(self._rows)
        hits, risk = self._summed(number)
        if hits[0].sum() > MAX_HITS:
            self._hits /= 2
            self._risk /= 2
        hazards = self.hazards(hits, risk)
        self._index = self.rank(hazards).tolist()

    def _summed(self, number: int) -> tuple[Floats, Floats]:
        """Each row with all rows below it."""
        counts = np.concatenate([self._hits[:number], self._risk[:number]], axis=1)
        parents = np.array(self._parents)
        for level in reversed(self._levels[1:]):
            np.add.at(counts, parents[level], counts[level])
        return counts[:, :BINS], counts[:, BINS:]

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
        parents = np.array(self._parents)
        for level in self._levels[1:]:
            above = hazards[parents[level]]
            expected = (above * risk[level]).sum(axis=1, keepdims=True)
            height = (hits[level].sum(axis=1, keepdims=True) + self._pseudo_hits) / (expected + self._pseudo_hits)
            least = np.maximum(above * height, 1e-12)
            hazards[level] = (near_hits[level] + self._pseudo_hits) / (near_risk[level] + self._pseudo_hits / least)
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
        for position in range(BINS):
            gained, waited = alive[position] - alive[position + 1 :], time[position + 1 :] - time[position]
            np.divide(gained, np.maximum(waited, 1e-9, out=waited), out=gained)
            gained.max(axis=0, out=index[position])
        return index.T
