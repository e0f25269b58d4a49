"""Where a prompt's state is kept: one small object behind the `PlacementPolicy` protocol, chosen by
`--mamba-cache-mode`.

A policy sees facts of one prompt and answers with positions inside the chunk at hand; it never asks for another
scheduling step or a smaller chunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import lcm
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cairn.cache.checkpoint import Kind
from cairn.cache.retained import retain_positions
from cairn.step import GRID
from cairn.types import Boundary

__all__ = [
    "Align",
    "All",
    "Auto",
    "CheckpointPoint",
    "Granular",
    "Junction",
    "PlacementPolicy",
    "PromptFacts",
    "placement_for",
]

MAX_UNALIGNED = 6
"""Positions off the 64-token grid that one request may name: each costs a state product per layer."""

MAX_CANDIDATES = 512
"""Grid positions of a prompt among which is chosen, evenly spaced."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """What is known of a prompt when it is admitted: its length, hit c <= match m <= ever_matched (the longest prefix
    ever seen, dropped ones included), where its messages and images end (ascending), whether only grid states can be
    continued from, and where else a checkpoint is worth its bytes because later prompts are likely to diverge after
    it: the worth is that of `EvictionPolicy.priority`; `answer_worth` is that of a point in its answer, `stride` tokens
    after the one before."""

    num_tokens: int
    hit: int
    matched: int
    ever_matched: int
    boundaries: tuple[Boundary, ...] = ()
    exact: bool = False
    predicted: Mapping[int, float] = field(default_factory=dict)
    stride: int = GRID
    answer_worth: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckpointPoint:
    """A position worth a checkpoint, which a client may want retained for `retain_seconds`. `worth`: what one on
    probation is expected to save, as `EvictionPolicy.priority`."""

    position: int
    kind: Kind
    retain_seconds: int = 0
    worth: float = 0.0


class PlacementPolicy(Protocol):
    """Chooses checkpoint positions."""

    min_cacheable: int
    """The shortest prompt that can ever be hit, in tokens."""
    min_shared: int
    """The shortest beginning shared by two prompts that can be hit, in tokens."""
    keeps_answer_end: bool
    """Whether the state at an answer's end is kept."""
    decode_stride: int
    """`in_decode` names multiples of it alone; 0: it names nothing."""
    step_tokens: int | None
    """Most tokens of one prompt that a step may compute; None for no limit, which is how it should be."""

    def in_prefill(self, facts: PromptFacts, start: int, end: int) -> list[CheckpointPoint]:
        """Positions p, start < p <= end, ascending and distinct, of the prefill chunk [start, end)."""

    def in_decode(self, facts: PromptFacts, position: int) -> CheckpointPoint | None:
        """Whether the state after `position` tokens is worth keeping while an answer is being generated."""

    def candidates(self, facts: PromptFacts) -> tuple[Ints, Ints] | None:
        """Positions that it names whatever else there is, and others, of which it names those that are `predicted`;
        ascending, and each in one of both. None if it names none of the latter kind."""


class Align:
    """The last block boundary of each step, as vLLM's `--mamba-cache-mode align`."""

    keeps_answer_end = False
    step_tokens: int | None = None

    def __init__(self, block_size: int, exact: bool) -> None:
        self._stride = lcm(GRID, block_size) if exact else block_size
        self.min_cacheable = self.min_shared = self.decode_stride = self._stride

    def in_prefill(self, facts: PromptFacts, start: int, end: int) -> list[CheckpointPoint]:
        last = end // self._stride * self._stride
        return [CheckpointPoint(last, Kind.BLOCK)] if last > start else []

    def in_decode(self, facts: PromptFacts, position: int) -> CheckpointPoint | None:
        return CheckpointPoint(position, Kind.BLOCK) if position % self._stride == 0 else None

    def candidates(self, facts: PromptFacts) -> None:
        return None


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
        divergence = facts.ever_matched // self._stride * self._stride
        kinds = {last: Kind.PROMPT_END}
        if divergence > facts.hit:
            kinds.setdefault(divergence, Kind.JUNCTION)
        return [CheckpointPoint(position, kinds[position]) for position in sorted(kinds) if start < position <= end]

    def in_decode(self, facts: PromptFacts, position: int) -> CheckpointPoint | None:
        return None


class Auto:
    """Every position that earns a checkpoint by what it is, and of a grid, for sharing that nobody announced, those
    where one is worth more than what goes for it.

    Positions off the grid are named in the order of their worth until there are `MAX_UNALIGNED`: the prompt's end, the
    end of the last message, what clients have marked, the ends of the system segment and of the last image, the
    junction, and then the other messages and images from the last to the first, which are places like those of the
    grid.

    In exact mode a state off the grid serves only a prompt that ends there, so the grid point below each such
    position is kept with it.
    """

    min_cacheable = 1
    min_shared = GRID
    keeps_answer_end = True
    decode_stride = GRID
    step_tokens: int | None = None

    def in_prefill(self, facts: PromptFacts, start: int, end: int) -> list[CheckpointPoint]:
        inner = {boundary.position for boundary in facts.boundaries}
        kinds = {p: Kind.INNER_END if p in inner else Kind.GRID for p in facts.predicted} | self._earned(facts)
        retentions = retain_positions(facts.boundaries, facts.exact)
        return [
            CheckpointPoint(p, kinds[p], retentions.get(p, 0), facts.predicted.get(p, 0.0))
            for p in sorted(kinds)
            if start < p <= end
        ]

    def in_decode(self, facts: PromptFacts, position: int) -> CheckpointPoint | None:
        if position % facts.stride:
            return None
        return CheckpointPoint(position, Kind.GRID, worth=facts.answer_worth)

    def candidates(self, facts: PromptFacts) -> tuple[Ints, Ints]:
        earned, stride, n = self._earned(facts), grid_stride(facts.num_tokens), facts.num_tokens
        others = {*range((facts.hit // stride + 1) * stride, n, stride)}
        if not facts.exact:
            ends = [end.position for end in reversed(facts.boundaries) if facts.hit < end.position < n]
            ends = [position for position in ends if position % GRID and position not in earned]
            others.update(ends[: MAX_UNALIGNED - sum(position % GRID != 0 for position in earned)])
        return np.array(sorted(earned)), np.array(sorted(others - earned.keys()), np.int64)

    def _earned(self, facts: PromptFacts) -> dict[int, Kind]:
        """Every position that earns a checkpoint by what it is, the most valuable first."""
        n = facts.num_tokens
        # what lies within the hit is computed by nobody, so it must not use up the positions off the grid
        ends = [boundary for boundary in reversed(facts.boundaries) if facts.hit < boundary.position < n]
        last = {end.kind: end.position for end in reversed(ends)}
        kinds = {n: Kind.PROMPT_END}
        if "message_end" in last:
            kinds[last["message_end"]] = Kind.MESSAGE_END
        kinds |= {end.position: Kind.BREAKPOINT for end in ends if end.retain_seconds}
        for end in ends:
            if end.kind == "system_end":
                kinds.setdefault(end.position, Kind.SYSTEM_END)
        if "image_end" in last:
            kinds.setdefault(last["image_end"], Kind.IMAGE_END)
        if facts.hit < facts.ever_matched < n:
            kinds.setdefault(facts.ever_matched, Kind.JUNCTION)
        unaligned = [p for p in kinds if p % GRID][:MAX_UNALIGNED]
        earned = {p: kind for p, kind in kinds.items() if p % GRID == 0 or p in unaligned}
        if facts.exact:
            for position in unaligned:
                earned.setdefault(position // GRID * GRID, earned[position])
        return earned


def grid_stride(num_tokens: int) -> int:
    """The distance of a prompt's grid positions: a multiple of 64."""
    return GRID * max(1, -(-num_tokens // (GRID * MAX_CANDIDATES)))


def placement_for(mode: str, block_size: int, exact: bool) -> PlacementPolicy:
    """The policy that `--mamba-cache-mode` names. `none` is not a policy: it switches the cache off."""
    blocks = {"align": Align, "all": All, "granular": Granular, "junction": Junction}
    if mode in blocks:
        return blocks[mode](block_size, exact)
    if mode == "auto":
        return Auto()
    raise ValueError(f"unknown mamba cache mode {mode!r}: align, all, granular, junction or auto")
