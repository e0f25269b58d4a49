"""Where later prompts leave the paths of others: learned, and the positions that save most by it."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from math import exp, inf, log
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cairn.cache.checkpoint import Lineage
from cairn.step import GRID

__all__ = ["DivergenceStats"]

MAX_DIVERGENCES, MIN_NEW = 512, 8
"""Divergences that are remembered; and how many new ones are waited for, at most, before they count."""

PRIOR, DECAY, MIN_WEIGHT = 2.0, 0.99, 0.002
"""How many divergences `_guess` counts for; what is left, after each divergence, of how well a view foretold those
before; and a view of less weight is left out."""

AGAIN, SHARE_AGAIN = 4, 1 / 32
"""A place recurs that has come up so often, to the token, and makes up such a part of those that are remembered."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Number = TypeVar("Number", float, Floats)


class DivergenceStats:
    """Where later prompts are likely to leave a path, learned from where they have left others.

    A prompt that leaves a known path for the first time makes a junction, and the state there comes too late for it:
    only the third prompt that goes that way hits. But prompts of one make leave at like places, so these can be
    predicted. Three views of the same divergences: tokens before the path's end (an instruction that is always last, a
    question after a document), tokens from the prompt's start, and the share of the path. Each counts by how well it
    has foretold the last divergences. Before it has seen any, the later part of a path is likelier than its beginning.

    `version` changes whenever the answers may.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[float, ...]] = deque(maxlen=MAX_DIVERGENCES)
        self._views: list[list[float]] = [[], [], []]
        self._arrays: list[Floats] = [np.empty(0)] * 3
        self._recurring: list[tuple[int, float, int]] = []
        self._scores = [0.0] * 3
        self._weights = [1 / 3] * 3
        self._new = self.version = 0

    def observe(self, path: Lineage, position: int) -> None:
        """A prompt left `path` at `position`, as nobody did before."""
        self.version += 1
        near = np.array([position - GRID // 2, position + GRID // 2])
        likelihoods = [-np.diff(shares)[0] for shares in self._by_view(path, near)]
        self._scores = [DECAY * s + log(max(share, 1e-4)) for s, share in zip(self._scores, likelihoods, strict=True)]
        odds = [exp(score - max(self._scores)) for score in self._scores]
        self._weights = [each / sum(odds) for each in odds]
        self._recent.append(tuple(position * scale + shift for scale, shift in _lines(path)))
        self._new += 1
        if self._new >= MIN_NEW or 2 * self._new > len(self._recent):
            self._new = 0
            self._arrays = [np.sort(np.array(places)) for places in zip(*self._recent, strict=True)]
            self._views = [view.tolist() for view in self._arrays]
            self._recurring = sorted(self._find_recurring(), reverse=True)

    def _find_recurring(self) -> Iterator[tuple[int, float, int]]:
        """How often, where and in which view; no share of a path comes up to the token."""
        for view in range(2):
            places, counts = np.unique(self._arrays[view], return_counts=True)
            often = counts >= max(AGAIN, SHARE_AGAIN * len(self._recent))
            yield from zip(counts[often].tolist(), places[often].tolist(), repeat(view))

    def recurring(self, path: Lineage) -> list[int]:
        """Where prompts are likely to leave `path` to the token, since they have left others there again and again: so
        many from its end, or from the start. The most frequent first; perhaps not on the path at all."""
        return [int(place) + (path.end, 0)[view] for _, place, view in self._recurring]

    def share(self, path: Lineage, start: float, end: float) -> float:
        """The part of all divergences from `path` that are expected at [start, end)."""
        # asked some thirty times a request, so what all views have in common is worked out once
        begin, length = path.start, path.end - path.start or 1
        first = start if start > begin else begin
        last = end if end > first else first
        total, tails = 0.0, (max(0.0, path.end - first) / length, max(0.0, path.end - last) / length)
        guess = PRIOR * (_guess(tails[0]) - _guess(tails[1]))
        for weight, places, (scale, shift) in zip(self._weights, self._views, _lines(path), strict=True):
            if weight > MIN_WEIGHT:
                all_from, there = bisect_left(places, begin * scale + shift), len(places)
                left = bisect_left(places, first * scale + shift, all_from)
                right = there if last == inf else bisect_left(places, last * scale + shift, left)
                total += weight * (right - left + guess) / (there - all_from + PRIOR)
        return total

    def shares_from(self, path: Lineage, positions: Ints) -> Floats:
        """`share` from each of `positions` on; shape [n]."""
        total = np.zeros(len(positions))
        for weight, shares in zip(self._weights, self._by_view(path, positions), strict=True):
            total += weight * shares
        return total

    def _by_view(self, path: Lineage, positions: Ints) -> Iterator[Floats]:
        """`shares_from` by each view alone."""
        first = np.maximum(positions, path.start)
        guess = _guess(np.maximum(path.end - first, 0) / (path.end - path.start or 1))
        for places, array, (scale, shift) in zip(self._views, self._arrays, _lines(path), strict=True):
            # a single place is sought several times as fast in a list
            seen = len(places) - bisect_left(places, path.start * scale + shift)
            left = len(places) - array.searchsorted(first * scale + shift)
            yield (left + PRIOR * guess) / (seen + PRIOR)

    def choose(
        self, path: Lineage, hit: int, fixed: Ints, candidates: Ints, pays: Callable[[int, float], bool]
    ) -> dict[int, float]:
        """Positions among `candidates` in the order of what each saves in addition to those before it and to `fixed`
        (both ascending; the greedy rule for such coverage: Nemhauser, Wolsey and Fisher, 1978), as long as
        `pays(number chosen, tokens saved per visit)`. Returns these tokens by position.

        A prompt that leaves the path at b goes on from the deepest position p <= b and saves p - hit.
        """
        shares = self.shares_from(path, np.concatenate([candidates, fixed]))
        shares, fixed_shares = shares[: len(candidates)], shares[len(candidates) :]
        below = fixed.searchsorted(candidates)
        above, until = np.concatenate([fixed, [hit]])[below - 1], np.concatenate([fixed_shares, [0.0]])[below]
        if len(candidates) and pays(len(candidates) - 1, 0.0):  # all of them
            gains = np.diff(np.append(hit, candidates)) * -np.diff(np.append(shares, until[-1]))
            return dict(zip(candidates[::-1].tolist(), gains[::-1].tolist(), strict=True))
        chosen: dict[int, float] = {}
        while len(chosen) < len(candidates):
            gains = (candidates - above) * (shares - until)
            best = int(gains.argmax())
            if (gain := float(gains[best])) <= 0 or not pays(len(chosen), gain):
                break
            chosen[int(candidates[best])] = gain
            np.maximum(above[best:], candidates[best], out=above[best:])
            np.maximum(until[: best + 1], shares[best], out=until[: best + 1])
        return chosen


def _guess(remaining: Number) -> Number:
    """The part of all divergences that come after a place with the share `remaining` of the path still to come, as
    long as nothing is known: a beta distribution of parameters 5 and 2, whose mean is .71. On the traces of
    docs/benchmarks.md prompts leave at .57 to .92 on the mean."""
    passed = 1 - remaining
    return 1 - passed**5 * (6 - 5 * passed)


def _lines(path: Lineage) -> tuple[tuple[float, float], ...]:
    """By view the scale and shift that make a position on `path` a place in it."""
    share = 1 / (path.end - path.start or 1)
    return (1.0, -path.end), (1.0, 0.0), (share, -path.start * share)
