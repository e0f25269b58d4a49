"""Where prompts are left by later ones, measured from their ends, and where the next one will be.

A prompt that leaves a known path for the first time makes a junction, and the state there comes too late for it: only
the third prompt that goes that way hits. But prompts of one make are left at like distances from their ends (an
instruction that is always last, a question behind a document), so the places can be foretold.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from cairn.step import GRID

WINDOW = 512
"""Branches that are remembered."""

LEAST, LEAST_IDLE = 8, 2
"""Before so many nothing is foretold; and before so many where memory is idle, so that a wrong guess costs nothing."""

MAX_GROUPS = 48
"""Distances that come up seldom are put into so many groups."""

LEAST_SHARE = 0.02
"""A position is named if it saves this share of what there is to save."""

Ints = NDArray[np.int64]


class BranchDistances:
    """The distances, in tokens, from the ends of prompts back to where later prompts have left them."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=WINDOW)
        self._distances: Ints = np.empty(0, np.int64)
        self._counts: Ints = np.empty(0, np.int64)
        self._exactly: Ints = np.empty(0, np.int64)
        """The bits of a position that count: all of them, or those from `GRID`, a power of two, on."""
        self._new = 0

    def left(self, distance: int) -> None:
        """A prompt was left `distance` tokens before its end."""
        self._recent.append(distance)
        self._new += 1

    def positions(self, num_tokens: int, hit: int, most: int) -> list[int]:
        """At most `most` positions in (hit, num_tokens) that save the most tokens, the best first, if a prompt of
        `num_tokens` tokens of which `hit` are cached is left as those before it were. `most` is 1 where memory is not
        idle.

        A branch at b is served by the deepest position p <= b and saves p - hit. Each position is chosen for what it
        adds to those before it (the greedy rule for such coverage; Nemhauser, Wolsey and Fisher, 1978). Distances that
        come up often count to the token, others to the 64-token grid, where a state costs nothing to take.
        """
        if len(self._recent) < (LEAST if most == 1 else LEAST_IDLE):
            return []
        if self._new >= LEAST or 2 * self._new > len(self._recent):
            self._sum_up()
        branches = (num_tokens - self._distances) & self._exactly
        ahead = branches > hit
        branches, weights = branches[ahead], self._counts[ahead]
        if not len(branches):
            return []
        order = branches.argsort()
        branches, weights = branches[order], weights[order]
        saved = branches - hit
        worth = LEAST_SHARE * float(saved @ weights)
        # alone, a position serves all branches from it on
        gains = saved * weights[::-1].cumsum()[::-1]
        best = int(gains.argmax())
        if gains[best] <= worth:
            return []
        first = int(branches[best])
        return [first, *self._further(branches, weights, hit, first, most, worth)] if most > 1 else [first]

    @staticmethod
    def _further(branches: Ints, weights: Ints, hit: int, first: int, most: int, worth: float) -> list[int]:
        """The positions behind `first` in the order of `positions`."""
        candidates = np.unique(branches)
        served = np.where(first <= branches, first, hit)
        chosen: list[int] = []
        while len(chosen) < most - 1:
            gains = (np.maximum(candidates[:, None] - served, 0) * (candidates[:, None] <= branches)) @ weights
            best = int(gains.argmax())
            if gains[best] <= worth:
                break
            position = int(candidates[best])
            chosen.append(position)
            served = np.where(position <= branches, np.maximum(served, position), served)
        return chosen

    def _sum_up(self) -> None:
        """Distances that come up often one by one, the others in steps, so that there are not too many."""
        self._new = 0
        distances, counts = np.unique(np.array(self._recent), return_counts=True)
        often = counts >= max(4, len(self._recent) // 32)
        seldom = np.repeat(distances[~often], counts[~often])
        # as many in each group, each at the furthest from the end, so that none of it lies before the branch
        groups = np.array_split(seldom, min(MAX_GROUPS, len(seldom))) if len(seldom) else []
        self._distances = np.concatenate([distances[often], *(group[-1:] for group in groups)])
        self._counts = np.concatenate([counts[often], np.array([len(group) for group in groups], np.int64)])
        self._exactly = np.where(np.arange(len(self._distances)) < np.count_nonzero(often), -1, -GRID)
