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

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cairn.types import Keys, Pages, SamplingParams

__all__ = [
    "GRID",
    "Fork",
    "FromStep",
    "Image",
    "Keep",
    "Logprobs",
    "PageCopy",
    "Restore",
    "Row",
    "Sample",
    "SampleOnly",
    "SampledToken",
    "Save",
    "Score",
    "Scored",
    "StepPlan",
    "StepResult",
    "TokenMask",
]

GRID = 64
"""Prefill computes in chunks of this many tokens on an absolute grid; states at its points are exact."""

TokenMask = NDArray[np.int32]
"""Which tokens may come, one bit each, shape [(vocab + 31) // 32]: token t is bit t % 32 of word t // 32."""


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
    """Draw the token at absolute position `position` of the sequence.

    `allowed`: the tokens that may come, before anything else is looked at; None: all. `banned`: tokens that may not
    come at this position. `history`: the `position` tokens before it, of which the first `num_prompt_tokens` are the
    prompt's; given where `params` need it. `logprobs`: how many of the best tokens to tell of beside the drawn one;
    None: of none.
    """

    params: SamplingParams
    position: int
    allowed: TokenMask | None = field(default=None, compare=False)
    banned: tuple[int, ...] = ()
    history: Keys | None = field(default=None, compare=False)
    num_prompt_tokens: int = 0
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """How likely the model held `targets`, shape [n]: what follows each of a row's first n tokens. `top`: how many of
    the best tokens to tell of beside each."""

    targets: Keys = field(compare=False)
    top: int


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Logarithms of probabilities before any transform, for n tokens: `token_ids` int32 and `values` float32, both
    [n, 1 + top], the token itself first and then the best, falling. `ranks`: int32 [n], 1 for the most likely token."""

    token_ids: NDArray[np.int32]
    values: NDArray[np.float32]
    ranks: NDArray[np.int32]


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
    token's logits. `images`: all of the sequence's, in order; their placeholders are tokens below 0. `score`: also tell
    how likely what follows its tokens was held.
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
    score: Score | None = None


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
    """What was drawn for the sequence in `slot`. `logprobs`: of this token, where they were asked for; rank 0 alone
    has them."""

    slot: int
    token: int
    logprobs: Logprobs | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Scored:
    """What became of a `Row.score`: `logprobs` of the tokens from absolute position `position` on."""

    slot: int
    position: int
    logprobs: Logprobs = field(compare=False)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the step with the same number gave: one entry for each `Row.sample` and each `SampleOnly`, in plan order
    (rows first), and one for each `Row.score`."""

    step: int
    sampled: tuple[SampledToken, ...] = ()
    scored: tuple[Scored, ...] = ()
