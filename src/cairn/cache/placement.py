"""Where a prompt's state is kept: one small object behind the `Placement` protocol, chosen by `--mamba-cache-mode`.

A policy sees facts of one prompt and answers with positions inside the chunk at hand; it never asks for another
scheduling step or a smaller chunk.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm
from typing import Protocol

from cairn.cache.checkpoint import Kind
from cairn.step import GRID
from cairn.types import Boundary

__all__ = [
    "Align",
    "All",
    "Auto",
    "Granular",
    "Junction",
    "Placement",
    "PromptFacts",
    "Wanted",
    "hold_positions",
    "placement_for",
]

MAX_UNALIGNED = 6
"""Positions off the 64-token grid that one request may name: each costs a state product per layer."""

MAX_GRID, MAX_IDLE_GRID = 64, 256
"""Grid checkpoints of one request at most, and at most while idle memory holds twice as many."""

DENSE_TOKENS = 32_768
"""A prompt of up to so many tokens gets every grid point while idle memory holds twice as many."""


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """What is known of a prompt when it is admitted: its length, hit c <= match m <= seen (the longest prefix ever
    seen, dropped ones included), where its messages and images end (ascending), whether only grid states can be
    continued from, how many checkpoint files idle memory has room for, and where it is likely to be left by
    later ones, because prompts before it were (the likeliest first)."""

    num_tokens: int
    hit: int
    matched: int
    seen: int
    boundaries: tuple[Boundary, ...] = ()
    exact: bool = False
    idle_files: int = 0
    foretold: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """A position worth a checkpoint, which a client may want held for `hold_seconds`."""

    position: int
    kind: Kind
    hold_seconds: int = 0


class Placement(Protocol):
    """Chooses checkpoint positions."""

    min_cacheable: int
    """The shortest prompt that can ever be hit, in tokens."""
    min_shared: int
    """The shortest beginning shared by two prompts that can be hit, in tokens."""
    keeps_answer_end: bool
    """Whether the state at an answer's end is kept."""
    step_tokens: int | None
    """Most tokens of one prompt that a step may compute; None for no limit, which is how it should be."""

    def in_prefill(self, facts: PromptFacts, start: int, end: int) -> list[Wanted]:
        """Positions p, start < p <= end, ascending and distinct, of the prefill chunk [start, end)."""
        ...

    def in_decode(self, facts: PromptFacts, position: int) -> Wanted | None:
        """Whether the state after `position` tokens is worth keeping while an answer is being generated."""
        ...


class Align:
    """The last block boundary of each step, as vLLM's `--mamba-cache-mode align`."""

    keeps_answer_end = False
    step_tokens: int | None = None

    def __init__(self, block_size: int, exact: bool) -> None:
        self._stride = lcm(GRID, block_size) if exact else block_size
        self.min_cacheable = self.min_shared = self._stride

    def in_prefill(self, facts: PromptFacts, start: int, end: int) -> list[Wanted]:
        last = end // self._stride * self._stride
        return [Wanted(last, Kind.BLOCK)] if last > start else []

    def in_decode(self, facts: PromptFacts, position: int) -> Wanted | None:
        return Wanted(position, Kind.BLOCK) if position % self._stride == 0 else None


class All(Align):
    """Each block boundary."""

    def in_prefill(self, facts: PromptFacts, start: int, end: int) -> list[Wanted]:
        first = (start // self._stride + 1) * self._stride
        return [Wanted(position, Kind.BLOCK) for position in range(first, end + 1, self._stride)]


class Granular(Align):
    """One block a step, so that no block's end is missed: more hits than `align` for many more steps. The cure that
    was tried for vllm#43587 and withdrawn (#43628); here to be compared with."""

    def __init__(self, block_size: int, exact: bool) -> None:
        super().__init__(block_size, exact)
        self.step_tokens = max(GRID, self._stride)


class Junction:
    """The last block boundary of the prompt, and where it left a known path: hits at the third sighting."""

    keeps_answer_end = False
    step_tokens: int | None = None

    def __init__(self, block_size: int, exact: bool) -> None:
        self._stride = lcm(GRID, block_size) if exact else block_size
        self.min_cacheable = self.min_shared = self._stride

    def in_prefill(self, facts: PromptFacts, start: int, end: int) -> list[Wanted]:
        last = facts.num_tokens // self._stride * self._stride
        left = facts.seen // self._stride * self._stride
        wanted = {last: Kind.PROMPT_END}
        if left > facts.hit:
            wanted.setdefault(left, Kind.JUNCTION)
        return [Wanted(position, wanted[position]) for position in sorted(wanted) if start < position <= end]

    def in_decode(self, facts: PromptFacts, position: int) -> Wanted | None:
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

    def in_prefill(self, facts: PromptFacts, start: int, end: int) -> list[Wanted]:
        wanted, holds = self._earned(facts), hold_positions(facts.boundaries, facts.exact)
        stride = _grid_stride(facts.num_tokens, facts.idle_files)
        for position in range((start // stride + 1) * stride, end + 1, stride):
            wanted.setdefault(position, Kind.GRID)
        return [Wanted(p, wanted[p], holds.get(p, 0)) for p in sorted(wanted) if start < p <= end]

    def in_decode(self, facts: PromptFacts, position: int) -> Wanted | None:
        return Wanted(position, Kind.GRID) if position % _grid_stride(position, facts.idle_files) == 0 else None

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
    for position in facts.foretold:
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


def placement_for(mode: str, block_size: int, exact: bool) -> Placement:
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
