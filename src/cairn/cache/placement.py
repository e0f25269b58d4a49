"""Where a prompt's state is kept: one small object behind the `PlacementPolicy` protocol, chosen by
`--mamba-cache-mode`.

A policy sees facts of one prompt and answers with positions inside the chunk at hand; it never asks for another
scheduling step or a smaller chunk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

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


@dataclass(slots=True)
class PromptFacts:
    """What is known of a prompt when it is admitted: its length, its hit, the longest prefix of it that was ever seen
    (dropped ones included), where its messages and images end (ascending), whether only grid states can be continued
    from, and where else a checkpoint is worth its bytes because later prompts are likely to diverge after it: the worth
    is that of `EvictionPolicy.priority`; `recurring`: positions of `DivergenceStats.recurring`; `answer_worth` is that
    of a point in its answer, `stride` tokens after the one before."""

    num_tokens: int
    hit: int
    ever_matched: int
    boundaries: tuple[Boundary, ...] = ()
    exact: bool = False
    predicted: Mapping[int, float] = field(default_factory=dict)
    recurring: Sequence[int] = ()
    answer_worth: float = 0.0

    @property
    def stride(self) -> int:
        """The distance of its grid positions: a multiple of 64."""
        return GRID * max(1, -(-self.num_tokens // (GRID * MAX_CANDIDATES)))


@dataclass(frozen=True, slots=True)
class CheckpointPoint:
    """A position worth a checkpoint, which a client may want retained for `retain_seconds`. `worth`: what one on
    probation is expected to save, as `EvictionPolicy.priority`."""

    position: int
    kind: Kind
    retain_seconds: int = 0
    worth: float = 0.0


class PlacementPolicy:
    """Chooses checkpoint positions."""

    min_cacheable: int
    """The shortest prompt that can ever be hit, in tokens."""
    min_shared: int
    """The shortest beginning shared by two prompts that can be hit, in tokens."""
    keeps_answer_end = False
    """Whether the state at an answer's end is kept."""
    decode_stride: int
    """`in_decode` names multiples of it alone; 0: it names nothing."""
    step_tokens: int | None = None
    """Most tokens of one prompt that a step may compute; None for no limit, which is how it should be."""

    def in_prefill(self, facts: PromptFacts, start: int, end: int) -> list[CheckpointPoint]:
        """Positions p, start < p <= end, ascending and distinct, of the prefill chunk [start, end)."""
        raise NotImplementedError

    def in_decode(self, facts: PromptFacts, position: int) -> CheckpointPoint | None:
        """Whether the state after `position` tokens is worth keeping while an answer is being generated."""
        return None

    def candidates(self, facts: PromptFacts) -> tuple[Ints, Ints] | None:
        """Positions that it names whatever else there is, and others, of which it names those that are `predicted`;
        ascending, and each in one of both. None if it names none of the latter kind."""
        return None


class Align(PlacementPolicy):
    """The last block boundary of each step, as vLLM's `--mamba-cache-mode align`."""

    def __init__(self, block_size: int, exact: bool) -> None:
        self._stride = lcm(GRID, block_size) if exact else block_size
        self.min_cacheable = self.min_shared = self.decode_stride = self._stride

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
        last, divergence = (p // self._stride * self._stride for p in (facts.num_tokens, facts.ever_matched))
        kinds = ({divergence: Kind.JUNCTION} if divergence > facts.hit else {}) | {last: Kind.PROMPT_END}
        return [CheckpointPoint(position, kinds[position]) for position in sorted(kinds) if start < position <= end]

    def in_decode(self, facts: PromptFacts, position: int) -> CheckpointPoint | None:
        return None


class Auto(PlacementPolicy):
    """Every position that earns a checkpoint by what it is, and of a grid and those that recur, for sharing that nobody
    announced, those where one is worth more than what goes for it.

    In exact mode a state off the grid serves only a prompt that ends there, so the grid point below each such
    position is kept with it.
    """

    min_cacheable = 1
    min_shared = GRID
    keeps_answer_end = True
    decode_stride = GRID

    def in_prefill(self, facts: PromptFacts, start: int, end: int) -> list[CheckpointPoint]:
        kinds, retentions = self._places(facts), retain_positions(facts.boundaries, facts.exact)
        named = facts.predicted.keys() | {p for p, kind in kinds.items() if not kind.on_probation}
        return [
            CheckpointPoint(p, kinds.get(p, Kind.GRID), retentions.get(p, 0), facts.predicted.get(p, 0.0))
            for p in sorted(named)
            if start < p <= end
        ]

    def in_decode(self, facts: PromptFacts, position: int) -> CheckpointPoint | None:
        return None if position % facts.stride else CheckpointPoint(position, Kind.GRID, worth=facts.answer_worth)

    def candidates(self, facts: PromptFacts) -> tuple[Ints, Ints]:
        kinds, stride = self._places(facts), facts.stride
        earned = {p for p, kind in kinds.items() if not kind.on_probation}
        others = {
            *range((facts.hit // stride + 1) * stride, facts.num_tokens, stride),
            *(p for p in kinds if p % stride),
        }
        return np.array(sorted(earned)), np.array(sorted(others - earned), np.int64)

    def _places(self, facts: PromptFacts) -> dict[int, Kind]:
        """Every position that is more than one of the grid, the most valuable first; of those off the grid
        `MAX_UNALIGNED`. Positions that recur, and ends of messages and images that are not the last, are places like
        those of the grid."""
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
        if facts.exact:
            for position in [p for p in kinds if p % GRID][:MAX_UNALIGNED]:
                kinds.setdefault(position // GRID * GRID, kinds[position])
        for position in facts.recurring:
            if facts.hit < position < n and not (facts.exact and position % GRID):
                kinds.setdefault(position, Kind.GRID)
        for end in ends:
            if not (facts.exact and end.position % GRID) and kinds.get(end.position, Kind.GRID) is Kind.GRID:
                kinds[end.position] = Kind.INNER_END
        unaligned = [p for p in kinds if p % GRID][:MAX_UNALIGNED]
        return {p: kind for p, kind in kinds.items() if p % GRID == 0 or p in unaligned}


def placement_for(mode: str, block_size: int, exact: bool) -> PlacementPolicy:
    """The policy that `--mamba-cache-mode` names. `none` is not a policy: it switches the cache off. Raises ValueError
    for an unknown name."""
    blocks = {"align": Align, "all": All, "granular": Granular, "junction": Junction}
    if mode not in {"auto", *blocks}:
        raise ValueError(f"unknown mamba cache mode {mode!r}: align, all, granular, junction or auto")
    return Auto() if mode == "auto" else blocks[mode](block_size, exact)
