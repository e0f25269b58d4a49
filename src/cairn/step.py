"""The step: all that scheduler and runner tell each other. Plain data, no behaviour.

One step is `plan = scheduler.plan()`, `result = runner.run(plan)`, `scheduler.apply(result)`. The runner carries a
plan out in this order:

    copies -> restores -> forks -> saves -> rows (one forward pass, which also fills `keeps`) -> sampling

    copies    page -> page        copy on write
    restores  file -> slot        a hit: the checkpoint becomes the running state
    forks     slot -> slot        one sequence becomes two
    saves     slot -> file        the running state as it is before the forward pass
    rows      the batch of the forward pass
    keeps     (row, position) -> file, the state as it was at `position` inside the pass
    sample_only                   a token drawn from a slot's kept hidden state, without a forward pass

A *slot* is one place of the live arrays (recurrent state and last hidden state of one running sequence). A *file* is
the list of pages that holds one checkpoint. Neither slot, page nor file is reused before the step that last names it
has been applied.
"""

from dataclasses import dataclass

from cairn.types import Keys, Pages, SamplingParams

__all__ = [
    "GRID",
    "Fork",
    "FromStep",
    "Image",
    "Keep",
    "PageCopy",
    "Restore",
    "Row",
    "Sample",
    "SampleOnly",
    "SampledToken",
    "Save",
    "StepPlan",
    "StepResult",
]

GRID = 64
"""Prefill computes in chunks of this many tokens on an absolute grid; states at its points are exact."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy all bytes of page `source` to page `target`."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Checkpoint file -> live slot (state and hidden state)."""

    slot: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class Fork:
    """Live slot -> live slot (state and hidden state)."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Save:
    """Live slot -> checkpoint file, as the slot is before this step's forward pass."""

    slot: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class Keep:
    """Write the state after token `position - 1` of `rows[row]` to a checkpoint file, inside the pass.

    `start < position <= end` of that row; the file then resumes the sequence at `position`.
    """

    row: int
    position: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class Sample:
    """Draw the token at absolute position `position` of the sequence."""

    params: SamplingParams
    position: int


@dataclass(frozen=True, slots=True)
class FromStep:
    """The row's one input token is the one that step `step` sampled in this row's slot."""

    step: int


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """One image of a prompt, whose `length` placeholders begin at token `start`.

    `grid`: its patches in time, height and width. `digest`: 32 bytes that name pixels, size and processor settings.
    `rgb`: its pixels, uint8 [height, width, 3] in row order; empty where nobody is going to encode it.
    """

    start: int
    length: int
    grid: tuple[int, int, int]
    digest: bytes
    width: int
    height: int
    rgb: bytes

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of the forward pass: tokens [start, end).

    `tokens`: the input tokens, shape [end - start], or `FromStep`. `pages`: per attention group the page list that
    covers [0, end). Keys and values are written for tokens >= `kv_write_from` only; those below are read from shared
    pages. A row with start 0 begins from the zero state, whatever the slot held. `decode` rows have one token and
    run the decode kernels; all others run the prefill kernels, also with one token. `sample` draws from the last
    token's logits. `images`: all of the sequence's, in order; their placeholders are tokens below 0.
    """

    slot: int
    start: int
    end: int
    tokens: Keys | FromStep
    pages: tuple[Pages, ...]
    kv_write_from: int
    decode: bool
    sample: Sample | None
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleOnly:
    """Draw a token from the hidden state that lies in `slot` (a full hit)."""

    slot: int
    sample: Sample


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `step` numbers count up by one."""

    step: int
    copies: tuple[PageCopy, ...] = ()
    restores: tuple[Restore, ...] = ()
    forks: tuple[Fork, ...] = ()
    saves: tuple[Save, ...] = ()
    rows: tuple[Row, ...] = ()
    keeps: tuple[Keep, ...] = ()
    sample_only: tuple[SampleOnly, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What was drawn for the sequence in `slot`."""

    slot: int
    token: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the step with the same number gave: one entry for each `Row.sample` and each `SampleOnly`, in plan order
    (rows first)."""

    step: int
    sampled: tuple[SampledToken, ...] = ()
