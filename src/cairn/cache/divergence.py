"""Where later prompts leave the paths of others: learned, and the positions that save most by it."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from cairn.cache.checkpoint import Lineage
from cairn.step import GRID

__all__ = ["DivergenceStats"]

MAX_DIVERGENCES, MIN_NEW = 512, 8
"""Divergences that are remembered; and how many new ones are waited for, at most, before they count."""

PRIOR, DECAY, MIN_WEIGHT = 4.0, 0.99, 0.002
"""How many divergences the guess counts for that all places are as likely; what is left, after each divergence, of how
well a view foretold those before; and a view of less weight is left out."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class DivergenceStats:
    """Where later prompts are likely to leave a path, learned from where they have left others.

    A prompt that leaves a known path for the first time makes a junction, and the state there comes too late for it:
    only the third prompt that goes that way hits. But prompts of one make leave at like places, so these can be
    predicted. Three views of the same divergences: tokens before the path's end (an instruction that is always last, a
    question behind a document), tokens from the prompt's start, and the share of the path. Each counts by how well it
    has foretold the last divergences. Before it has seen any, all places are as likely.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[float, ...]] = deque(maxlen=MAX_DIVERGENCES)
        self._views: list[list[float]] = [[], [], []]
        self._arrays: list[Floats] = [np.empty(0)] * 3
        self._scores = [0.0] * 3
        self._weights = [1 / 3] * 3
        self._often: Ints = np.empty(0, np.int64)
        self._new = 0

    def observe(self, path: Lineage, position: int) -> None:
        """A prompt left `path` at `position`, as nobody did before."""
        near = (position - GRID / 2, position + GRID / 2)
        self._scores = [
            DECAY * score + log(max(self._between(view, path, *near), 1e-4)) for view, score in enumerate(self._scores)
        ]
        odds = [exp(score - max(self._scores)) for score in self._scores]
        self._weights = [each / sum(odds) for each in odds]
        lines = [_in_view(view, path) for view in range(3)]
        self._recent.append(tuple(position * scale + shift for scale, shift in lines))
        self._new += 1
        if self._new >= MIN_NEW or 2 * self._new > len(self._recent):
            self._sum_up()

    def share(self, path: Lineage, start: float, end: float) -> float:
        """The part of all divergences from `path` that are expected at [start, end)."""
        total = 0.0
        for view, weight in enumerate(self._weights):
            if weight > MIN_WEIGHT:  # this is asked some fifty times a request
                total += weight * self._between(view, path, start, end)
        return total

    def _between(self, view: int, path: Lineage, start: float, end: float) -> float:
        """`share` by one view alone."""
        (scale, shift), places = _in_view(view, path), self._views[view]
        first = start if start > path.start else path.start
        low, high = (bisect_left(places, at * scale + shift) for at in (first, max(first, end)))
        even = max(0.0, min(end, path.end) - first) / (path.end - path.start or 1)
        seen = len(places) - bisect_left(places, path.start * scale + shift)
        return (high - low + PRIOR * even) / (seen + PRIOR)

    def shares_from(self, path: Lineage, positions: Ints) -> Floats:
        """`share` from each of `positions` on; shape [n]."""
        first, total = np.maximum(positions, path.start), np.zeros(len(positions))
        even = (path.end - first).clip(0) / (path.end - path.start or 1)
        for view, (weight, places) in enumerate(zip(self._weights, self._arrays, strict=True)):
            scale, shift = _in_view(view, path)
            seen = len(places) - places.searchsorted(path.start * scale + shift)
            left = len(places) - places.searchsorted(first * scale + shift)
            total += weight * (left + PRIOR * even) / (seen + PRIOR)
        return total

    def likely(self, path: Lineage) -> Ints:
        """Positions that come up again and again, as tokens before the path's end; ascending."""
        return path.end + self._often

    def choose(
        self, path: Lineage, hit: int, fixed: Ints, candidates: Ints, pays: Callable[[int, float], bool]
    ) -> dict[int, float]:
        """Positions among `candidates` in the order of what each saves in addition to those before it and to `fixed`
        (both ascending; the greedy rule for such coverage: Nemhauser, Wolsey and Fisher, 1978), as long as
        `pays(number chosen, tokens saved per visit)`. Returns these tokens by position.

        A prompt that leaves the path at b goes on from the deepest position p <= b and saves p - hit.
        """
        shares, below = self.shares_from(path, candidates), np.searchsorted(fixed, candidates, "right")
        above = np.append(fixed, hit)[below - 1]
        until = np.append(self.shares_from(path, fixed), 0.0)[below]
        if len(candidates) and pays(len(candidates) - 1, 0.0):  # all of them
            gains = np.diff(np.append(hit, candidates)) * -np.diff(np.append(shares, until[-1]))
            return dict(zip(candidates[::-1].tolist(), gains[::-1].tolist(), strict=True))
        chosen: dict[int, float] = {}
        while len(chosen) < len(candidates):
            gains = (candidates - above) * (shares - until)
            best = int(gains.argmax())
            if gains[best] <= 0 or not pays(len(chosen), float(gains[best])):
                break
            chosen[int(candidates[best])] = float(gains[best])
            above[best:] = np.maximum(above[best:], candidates[best])
            until[: best + 1] = np.maximum(until[: best + 1], shares[best])
        return chosen

    def _sum_up(self) -> None:
        self._new = 0
        self._arrays = [np.sort(np.array(places)) for places in zip(*self._recent, strict=True)]
        self._views = [view.tolist() for view in self._arrays]
        places, counts = np.unique(self._arrays[0], return_counts=True)
        self._often = places[counts >= max(4, len(self._recent) // 32)].astype(np.int64)


def _in_view(view: int, path: Lineage) -> tuple[float, float]:
    """Scale and shift that make a position on `path` a place in a view."""
    if view == 2:
        scale = 1 / (path.end - path.start or 1)
        return scale, -path.start * scale
    return 1.0, -path.end if view == 0 else 0.0
