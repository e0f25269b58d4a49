"""Where a prompt's state is kept: one small object behind the `PlacementPolicy` protocol, chosen by
`--mamba-cache-mode`.

A policy sees facts of one prompt and answers with positions inside the chunk at hand; it never asks for another
scheduling step or a smaller chunk.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cairn.cache.checkpoint import Kind
from cairn.step import GRID
from cairn.types import Boundary

__all__ = [
    "Align",
    "All",
    "Auto",
    "CheckpointPoint",
    "DivergenceStats",
    "Granular",
    "Junction",
    "PlacementPolicy",
    "PromptFacts",
    "hold_positions",
    "placement_for",
]

MAX_UNALIGNED = 6
"""Positions off the 64-token grid that one request may name: each costs a state product per layer."""

MAX_GRID, MAX_IDLE_GRID = 64, 256
"""Grid checkpoints of one request at most, and at most while idle memory holds twice as many."""

DENSE_TOKENS = 32_768
"""A prompt of up to so many tokens gets every grid point while idle memory holds twice as many."""

MAX_DIVERGENCES = 512
"""Branches that are remembered."""

MIN_DIVERGENCES, MIN_DIVERGENCES_IDLE = 8, 2
"""Before so many nothing is predicted; and before so many where memory is idle, so that a wrong guess costs nothing."""

MAX_DISTANCE_GROUPS = 48
"""Distances that come up seldom are put into so many groups."""

MIN_SHARE = 0.02
"""A position is named if it saves this share of what there is to save."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """What is known of a prompt when it is admitted: its length, hit c <= match m <= seen (the longest prefix ever
    seen, dropped ones included), where its messages and images end (ascending), whether only grid states can be
    continued from, how many checkpoint files idle memory has room for, and where later prompts are
    predicted to diverge from it (the likeliest first)."""

    num_tokens: int
    hit: int
    matched: int
    seen: int
    boundaries: tuple[Boundary, ...] = ()
    exact: bool = False
    idle_files: int = 0
    predicted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointPoint:
    """A position worth a checkpoint, which a client may want held for `hold_seconds`."""

    position: int
    kind: Kind
    hold_seconds: int = 0


class PlacementPolicy(Protocol):
    """Chooses checkpoint positions."""

    min_cacheable: int
    """The shortest prompt that can ever be hit, in tokens."""
    min_shared: int
    """The shortest beginning shared by two prompts that can be hit, in tokens."""
    keeps_answer_end: bool
    """Whether the state at an answer's end is kept."""
    step_tokens: int | None
    """Most tokens of one prompt that a step may compute; None for no limit, which is how it should be."""

    def in_prefill(self, facts: PromptFacts, start: int, end: int) -> list[CheckpointPoint]:
        """Positions p, start < p <= end, ascending and distinct, of the prefill chunk [start, end)."""
        ...

    def in_decode(self, facts: PromptFacts, position: int) -> CheckpointPoint | None:
        """Whether the state after `position` tokens is worth keeping while an answer is being generated."""
        ...


class Align:
    """The last block boundary of each step, as vLLM's `--mamba-cache-mode align`."""

    keeps_answer_end = False
    step_tokens: int | None = None

    def __init__(self, block_size: int, exact: bool) -> None:
        self._stride = lcm(GRID, block_size) if exact else block_size
        self.min_cacheable = self.min_shared = self._stride

    def in_prefill(self, facts: PromptFacts, start: int, end: int) -> list[CheckpointPoint]:
        last = end // self._stride * self._stride
        return [CheckpointPoint(last, Kind.BLOCK)] if last > start else []

    def in_decode(self, facts: PromptFacts, position: int) -> CheckpointPoint | None:
        return CheckpointPoint(position, Kind.BLOCK) if position % self._stride == 0 else None


class All(Align):
    """Each block boundary."""

    def in_prefill(self, facts: PromptFacts, start: int, end: int) -> list[CheckpointPoint]:
        first = (start // self._stride + 1) * self._stride
        return [CheckpointPoint(position, Kind.BLOCK) for position in range(first, end + 1, self._stride)]


class Granular(Align):
    """One block a step, so that no block's end is missed: more hits than `align` for many more steps. The cure that
    was tried for vllm#43587 and withdrawn (#43628); here to be compared with."""

    def __init__(self, block_size: int, exact: bool) -> None:
        super().__init__(block_size, exact)
        self.step_tokens = max(GRID, self._stride)


class Junction(Align):
    """The last block boundary of the prompt, and the last one before it diverges from a known path: hits at the third
    sighting."""

    def in_prefill(self, facts: PromptFacts, start: int, end: int) -> list[CheckpointPoint]:
        last = facts.num_tokens // self._stride * self._stride
        divergence = facts.seen // self._stride * self._stride
        kinds = {last: Kind.PROMPT_END}
        if divergence > facts.hit:
            kinds.setdefault(divergence, Kind.JUNCTION)
        return [CheckpointPoint(position, kinds[position]) for position in sorted(kinds) if start < position <= end]

    def in_decode(self, facts: PromptFacts, position: int) -> CheckpointPoint | None:
        return None


class Auto:
    """Every position that earns a checkpoint by what it is, a few where prompts like this one were left by later ones,
    and a probationary grid for sharing nobody announced.

    Positions off the grid are named in the order of their worth until there are `MAX_UNALIGNED`: the prompt's end, the
    end of the last message, what clients have marked, the ends of the system segment and of the last image, the
    junction, where prompts were left, and then the other messages and images from the last to the first.

    In exact mode a state off the grid serves only a prompt that ends there, so the grid point below each such
    position is kept with it.
    """

    min_cacheable = 1
    min_shared = GRID
    keeps_answer_end = True
    step_tokens: int | None = None

    def in_prefill(self, facts: PromptFacts, start: int, end: int) -> list[CheckpointPoint]:
        wanted, holds = self._earned(facts), hold_positions(facts.boundaries, facts.exact)
        stride = _grid_stride(facts.num_tokens, facts.idle_files)
        for position in range((start // stride + 1) * stride, end + 1, stride):
            wanted.setdefault(position, Kind.GRID)
        return [CheckpointPoint(p, wanted[p], holds.get(p, 0)) for p in sorted(wanted) if start < p <= end]

    def in_decode(self, facts: PromptFacts, position: int) -> CheckpointPoint | None:
        return (
            CheckpointPoint(position, Kind.GRID) if position % _grid_stride(position, facts.idle_files) == 0 else None
        )

    def _earned(self, facts: PromptFacts) -> dict[int, Kind]:
        kinds = _by_worth(facts)
        unaligned = [p for p in kinds if p % GRID][:MAX_UNALIGNED]
        earned = {p: kind for p, kind in kinds.items() if p % GRID == 0 or p in unaligned}
        if facts.exact:
            for position in unaligned:
                below = position // GRID * GRID
                if earned.get(below, Kind.GRID).on_probation:
                    earned[below] = earned[position]
        return earned


def _by_worth(facts: PromptFacts) -> dict[int, Kind]:
    """Every position that is worth something to `Auto`, the most valuable first."""
    n = facts.num_tokens
    # what lies within the hit is computed by nobody, so it must not use up the positions off the grid
    ends = [boundary for boundary in reversed(facts.boundaries) if facts.hit < boundary.position < n]
    kinds = {n: Kind.PROMPT_END}
    for position in [end.position for end in ends if end.kind == "message_end"][:1]:
        kinds[position] = Kind.MESSAGE_END
    for end in ends:
        if end.hold_seconds:
            kinds[end.position] = Kind.BREAKPOINT
    for position in [end.position for end in ends if end.kind == "system_end"]:
        kinds.setdefault(position, Kind.SYSTEM_END)
    for position in [end.position for end in ends if end.kind == "image_end"][:1]:
        kinds.setdefault(position, Kind.IMAGE_END)
    if facts.hit < facts.seen < n:
        kinds.setdefault(facts.seen, Kind.JUNCTION)
    for position in facts.predicted:
        kinds.setdefault(position, Kind.OFFSET)
    for end in ends:
        kinds.setdefault(end.position, Kind.INNER_END)
    return kinds


def hold_positions(boundaries: Iterable[Boundary], exact: bool) -> dict[int, int]:
    """Position to seconds of the checkpoints that a client wants held. In exact mode no prompt goes on from a state off
    the grid, so the one at the grid point below is held for it."""
    holds: dict[int, int] = {}
    for boundary in boundaries:
        position = boundary.position // GRID * GRID if exact else boundary.position
        if boundary.hold_seconds and position:
            holds[position] = max(holds.get(position, 0), boundary.hold_seconds)
    return holds


def _grid_stride(num_tokens: int, idle_files: int) -> int:
    if num_tokens <= DENSE_TOKENS and 2 * (num_tokens // GRID) <= idle_files:
        return GRID
    most = min(MAX_IDLE_GRID, max(MAX_GRID, idle_files // 2))
    return GRID * max(1, -(-num_tokens // (GRID * most)))


def placement_for(mode: str, block_size: int, exact: bool) -> PlacementPolicy:
    """The policy that `--mamba-cache-mode` names. `none` is not a policy: it switches the cache off."""
    match mode:
        case "align":
            return Align(block_size, exact)
        case "all":
            return All(block_size, exact)
        case "granular":
            return Granular(block_size, exact)
        case "junction":
            return Junction(block_size, exact)
        case "auto":
            return Auto()
    raise ValueError(f"unknown mamba cache mode {mode!r}: align, all, granular, junction or auto")


class DivergenceStats:
    """Where the next prompt is likely to diverge: the distances, in tokens, from the ends of prompts back to the points
    where later prompts have diverged from them.

    A prompt that diverges from a known path for the first time makes a junction, and the state there comes too late for
    it: only the third prompt that goes that way hits. But prompts of one make diverge at like distances from their ends
    (an instruction that is always last, a question behind a document), so the positions can be predicted.
    """

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=MAX_DIVERGENCES)
        self._distances: Ints = np.empty(0, np.int64)
        self._counts: Ints = np.empty(0, np.int64)
        self._exactly: Ints = np.empty(0, np.int64)
        """The bits of a position that count: all of them, or those from `GRID`, a power of two, on."""
        self._new = 0

    def observe_divergence(self, distance: int) -> None:
        """A prompt diverged from an earlier one `distance` tokens before that one's end."""
        self._recent.append(distance)
        self._new += 1

    def predict(self, num_tokens: int, hit: int, most: int) -> list[int]:
        """At most `most` positions in (hit, num_tokens) that save the most tokens, the best first, if a prompt of
        `num_tokens` tokens of which `hit` are cached diverges from those before it as they did. `most` is 1 where
        memory is not idle.

        A branch at b is served by the deepest position p <= b and saves p - hit. Each position is chosen for what it
        adds to those before it (the greedy rule for such coverage; Nemhauser, Wolsey and Fisher, 1978). Distances that
        come up often count to the token, others to the 64-token grid, where a state costs nothing to take.
        """
        if len(self._recent) < (MIN_DIVERGENCES if most == 1 else MIN_DIVERGENCES_IDLE):
            return []
        if self._new >= MIN_DIVERGENCES or 2 * self._new > len(self._recent):
            self._sum_up()
        branches = (num_tokens - self._distances) & self._exactly
        ahead = branches > hit
        branches, weights = branches[ahead], self._counts[ahead]
        if not len(branches):
            return []
        order = branches.argsort()
        branches, weights = branches[order], weights[order]
        saved = branches - hit
        worth = MIN_SHARE * float(saved @ weights)
        # alone, a position serves all branches from it on
        gains = saved * weights[::-1].cumsum()[::-1]
        best = int(gains.argmax())
        if gains[best] <= worth:
            return []
        first = int(branches[best])
        return [first, *self._further(branches, weights, hit, first, most, worth)] if most > 1 else [first]

    @staticmethod
    def _further(branches: Ints, weights: Ints, hit: int, first: int, most: int, worth: float) -> list[int]:
        """The positions behind `first` in the order of `predict`."""
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
        groups = np.array_split(seldom, min(MAX_DISTANCE_GROUPS, len(seldom))) if len(seldom) else []
        self._distances = np.concatenate([distances[often], *(group[-1:] for group in groups)])
        self._counts = np.concatenate([counts[often], np.array([len(group) for group in groups], np.int64)])
        self._exactly = np.where(np.arange(len(self._distances)) < np.count_nonzero(often), -1, -GRID)
