"""The step: all that scheduler and runner tell each other. Plain data, no behaviour.

One step is `plan = scheduler.plan()`, `runner.launch(plan)`, `runner.sample(plan.step, scheduler.masks())`,
`result = runner.collect(plan.step)`, `scheduler.apply(result)`. The next plan may be launched before this one is
collected: of this one it needs on the device what was sampled, and nothing on the host. The runner carries a plan out
in this order:

    admits -> copies -> restores -> folds -> saves -> table updates -> drafts -> rows (one forward pass, which also
    fills snapshots) -> samples

    admits         a request begins in a slot: its block tables, sampling parameters and images, until the next admit
    copies         page -> page        copy on write
    restores       pages -> slot       a hit: the checkpoint becomes the running state
    folds          slot -> slot        the running state goes on by the drafts that the last plan has verified
    saves          slot -> pages       the running state as it is before the forward pass
    table updates  pages into a slot's block tables: growth and copy on write
    drafts         of verify rows that have none yet, by the model's head
    rows           the batch of the forward pass: decode rows, then verify rows, then prefill rows
    snapshots      (row, position) -> pages, the state as it was at `position` inside the pass
    samples        tokens sampled from slots' final hidden states, with or without a row in this step (`sample`)

A *slot* is one place of the live arrays (recurrent state and last hidden state of one running sequence) and of the
block tables. *State pages* are the list of pages that holds one checkpoint. Neither slot nor page is reused before the
step that last names it has been applied. What a slot's admit said is not said again: a plan has what has changed.

Plans go to the other ranks as they are (`cairn.engine.ranks.wire`), so integers have the ranges that are read there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from cairn.types import Keys, Pages, SamplingParams

GRID = 64
"""Prefill computes in chunks of this many tokens on an absolute grid; states at its points are exact."""

SAMPLED = -1
"""As a decode row's token: the one that was sampled last in its slot, by a step that may still be out. Where it is one
of the slot's stop tokens the sequence has ended: the row is computed, and the slot's state stays as it was."""

DRAFTED = -2
"""As the drafts of a verify row: those that the model's head makes of the tokens before them, when the plan is carried
out."""

TokenMask = NDArray[np.int32]
"""Which tokens may come, one bit each, shape [(vocab + 31) // 32]: token t is bit t % 32 of word t // 32."""

TokenMasks = Mapping[int, TokenMask | Sequence[TokenMask | None]]
"""By slot: the tokens that may come, before anything else is looked at; all where a slot has none. Of a verify row one
mask for each of its tokens, None for all tokens; if there are fewer, nothing is sampled after the further tokens."""

Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""A slot, page, position or count."""


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """One image of a prompt, whose `length` placeholders begin at token `start`.

    `grid`: its patches in time, height and width. `digest`: 32 bytes that name pixels, size and processor settings.
    `rgb`: its pixels, uint8 [height, width, 3] in row order; empty where nobody is going to encode it. `bounds`: least
    and most pixels after resizing; None: the checkpoint's.
    """

    start: Index
    length: Index
    grid: tuple[Index, Index, Index]
    digest: bytes
    width: Index
    height: Index
    rgb: bytes
    bounds: tuple[int, int] | None = None

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True, eq=False)
class Admit:
    """A request begins, or begins again, in `slot`: what is said of it once.

    `tables`: per attention group all of its pages, shape [pages]. `num_prompt_tokens`: of `history`. `history`: prompt
    and answer so far, where `sampling` needs it: the runner itself adds what it samples in the slot.
    `stop_token_ids`: ascending. `logprobs`: how many of the best tokens to tell of beside each sampled one; None: of
    none. `images`: all of the prompt's, in order; their placeholders are tokens below 0.
    """

    slot: Index
    tables: tuple[Pages, ...]
    sampling: SamplingParams
    num_prompt_tokens: Index = 0
    history: Keys | None = None
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy all bytes of page `source` to page `target`."""

    source: Index
    target: Index


@dataclass(frozen=True, slots=True, eq=False)
class Restore:
    """State pages -> live slot (state and hidden state)."""

    slot: Index
    pages: Pages


@dataclass(frozen=True, slots=True, eq=False)
class Save:
    """Live slot -> state pages, as the slot is before this step's forward pass."""

    slot: Index
    pages: Pages


class TableUpdate(msgspec.Struct, frozen=True, eq=False):
    """From entry `first` on, the block table of `slot` for attention group `group` has `pages`, shape [n], n > 0.

    They follow what is there already, or take the place of its last entry (copy on write).
    """

    slot: Index
    group: Index
    first: Index
    pages: Pages


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """How likely the model held `targets`, shape [n]: what follows each of a row's first n tokens. `top`: how many of
    the best tokens to tell of beside each."""

    targets: Keys
    top: Index


@dataclass(frozen=True, slots=True, eq=False)
class PrefillRow:
    """Tokens [start, end) of the sequence in `slot`, through the prefill kernels, also if it is one token alone.

    `tokens`: shape [end - start]; below 0 where an image stands. Keys and values are written for tokens >=
    `kv_write_from` only; those below are read from shared pages. A row with start 0 begins from the zero state,
    whatever the slot held. `score`: also tell how likely what follows its tokens was held.
    """

    slot: Index
    start: Index
    tokens: Keys
    kv_write_from: Index
    score: Score | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


_NO_SLOTS, _NO_TOKENS, _NO_FLAGS = np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.bool_)


class DecodeRows(msgspec.Struct, frozen=True, eq=False):
    """Sequences that go on by one token through the decode kernels, in columns of shape [rows].

    `positions`: where the token stands: so many were computed before. `tokens`: the input token, or SAMPLED.
    `kv_write_from`: as of a prefill row.
    """

    slots: NDArray[np.int32] = msgspec.field(default_factory=lambda: _NO_SLOTS)
    positions: NDArray[np.int32] = msgspec.field(default_factory=lambda: _NO_SLOTS)
    tokens: Keys = msgspec.field(default_factory=lambda: _NO_TOKENS)
    kv_write_from: NDArray[np.int32] = msgspec.field(default_factory=lambda: _NO_SLOTS)

    @property
    def continues(self) -> bool:
        """Whether a row continues with a token that only the device knows."""
        return bool(np.count_nonzero(self.tokens == SAMPLED))

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """Slot, position, token and `kv_write_from` of one row after the other."""
        columns = (self.slots, self.positions, self.tokens, self.kv_write_from)
        return zip(*(column.tolist() for column in columns), strict=True)


@dataclass(frozen=True, slots=True, eq=False)
class VerifyRow:
    """The newest token of the sequence in `slot`, which stands at `start`, and drafts of those after it, each through
    the decode kernels as if it were right. Their keys and values are written; the slot's state stays as it was, until
    the next plan folds those into it that were right.

    `tokens`: shape [1 + drafts], one draft at least, all of them known or all DRAFTED. A token is sampled after the
    first one, and after each draft that equals what was sampled before it: see `VerifiedTokens`. `kv_write_from`: as of
    a prefill row. `min_tokens_until`: no stop token may be sampled at a position before this one.
    """

    slot: Index
    start: Index
    tokens: Keys
    kv_write_from: Index
    min_tokens_until: Index = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_open(self) -> bool:
        """Whether its drafts are still to be made."""
        return bool(self.tokens[-1] == DRAFTED)


@dataclass(frozen=True, slots=True, eq=False)
class FoldSnapshot:
    """Write the state after token `position - 1` to state pages, inside a fold."""

    position: Index
    pages: Pages


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """The state in `slot`, as it was before its verify row in the plan before this one, goes on by the first
    `num_tokens` tokens of that row, one at least. `snapshots`: by position, all of them in these tokens."""

    slot: Index
    num_tokens: Index
    snapshots: tuple[FoldSnapshot, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, eq=False):
    """Write the state after token `position - 1` of row number `row` to state pages, inside the pass.

    Decode rows are numbered first, then verify rows, then prefill rows. `start < position <= end` of the row; the state
    then resumes the sequence at `position`. Never of a verify row: see `Fold`.
    """

    row: Index
    position: Index
    pages: Pages


class Samples(msgspec.Struct, frozen=True, eq=False):
    """Tokens to sample, in columns of shape [samples]: each from the final hidden state that lies in its slot when the
    rows are through, or was restored (a full hit).

    `positions`: the absolute position of the token that is sampled. `bans_stop_tokens`: whether the slot's stop tokens
    may not come here.
    """

    slots: NDArray[np.int32] = msgspec.field(default_factory=lambda: _NO_SLOTS)
    positions: NDArray[np.int32] = msgspec.field(default_factory=lambda: _NO_SLOTS)
    bans_stop_tokens: NDArray[np.bool_] = msgspec.field(default_factory=lambda: _NO_FLAGS)

    def __len__(self) -> int:
        return len(self.slots)


class StepPlan(msgspec.Struct, frozen=True, eq=False):
    """One step. `step` numbers count up by one."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    admits: tuple[Admit, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    restores: tuple[Restore, ...] = ()
    folds: tuple[Fold, ...] = ()
    saves: tuple[Save, ...] = ()
    table_updates: tuple[TableUpdate, ...] = ()
    decodes: DecodeRows = msgspec.field(default_factory=DecodeRows)
    verifies: tuple[VerifyRow, ...] = ()
    prefills: tuple[PrefillRow, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    samples: Samples = msgspec.field(default_factory=Samples)

    @property
    def is_open(self) -> bool:
        """Whether drafts are still to be made: see `VerifyRow`."""
        return bool(self.verifies) and any(row.is_open for row in self.verifies)

    def split(self) -> "tuple[StepPlan, StepPlan]":
        """What comes before the rows, and the rows with all that comes after them."""
        moves = msgspec.structs.replace(
            self, decodes=DecodeRows(), verifies=(), prefills=(), snapshots=(), samples=Samples()
        )
        rows = msgspec.structs.replace(self, admits=(), copies=(), restores=(), folds=(), saves=(), table_updates=())
        return moves, rows

    @property
    def samples_rows(self) -> bool:
        """Whether its rows are decodes alone, and its samples those after them, in the same order, as far as that is
        seen at once: the same array says so."""
        return self.samples.slots is self.decodes.slots and not (self.verifies or self.prefills)

    @property
    def num_seqs(self) -> int:
        return len(self.decodes) + len(self.verifies) + len(self.prefills)

    @property
    def long_rows(self) -> "tuple[VerifyRow | PrefillRow, ...]":
        """The rows after the decodes, in their order."""
        return (*self.verifies, *self.prefills)


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Logarithms of probabilities before any transform, for n tokens: `token_ids` int32 and `values` float32, both
    [n, 1 + top], the token itself first and then the best, falling. `ranks`: int32 [n], 1 for the most likely token."""

    token_ids: NDArray[np.int32]
    values: NDArray[np.float32]
    ranks: NDArray[np.int32]

    def first(self, num_tokens: int) -> "Logprobs":
        """Those of the first `num_tokens` tokens."""
        return Logprobs(self.token_ids[:num_tokens], self.values[:num_tokens], self.ranks[:num_tokens])


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What was sampled for the sequence in `slot`. `logprobs`: of this token, where they were asked for."""

    slot: int
    token: int
    logprobs: Logprobs | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Scored:
    """What became of a `PrefillRow.score`: `logprobs` of the tokens from absolute position `position` on."""

    slot: int
    position: int
    logprobs: Logprobs = field(compare=False)


@dataclass(frozen=True, slots=True)
class VerifiedTokens:
    """What a verify row in `slot` gave: `tokens`, shape [n], one more than the drafts that were right, which they begin
    with. `logprobs`: of these tokens, where they were asked for."""

    slot: int
    tokens: tuple[int, ...]
    logprobs: Logprobs | None = field(default=None, compare=False)


class StepResult(msgspec.Struct, frozen=True, eq=False):
    """What the step with the same number gave, in plan order.

    `slots`: of the plan's samples. `tokens`: what was sampled in each. `logprobs`: of these tokens, by slot, where they
    were asked for; rank 0 alone has them. `scored`: one entry for each `PrefillRow.score`. `verified`: one for each
    verify row.

    `advanced`: bool [decodes], whether each decode row has taken the sequence of its slot a token further. One that
    continues with a stop token, sampled by a step that was still out, has not: nobody but the runner knew.
    `is_first`: whether its pass, or its folds, were no repetition of what had been recorded, but will be the next time,
    and take less.
    """

    step: int
    slots: NDArray[np.int32] = msgspec.field(default_factory=lambda: _NO_SLOTS)
    tokens: Keys = msgspec.field(default_factory=lambda: _NO_TOKENS)
    logprobs: Mapping[int, Logprobs] = msgspec.field(default_factory=dict)
    scored: tuple[Scored, ...] = ()
    advanced: NDArray[np.bool_] = msgspec.field(default_factory=lambda: _NO_FLAGS)
    verified: tuple[VerifiedTokens, ...] = ()
    is_first: bool = False

    @property
    def sampled(self) -> tuple[SampledToken, ...]:
        """One record for each token."""
        tokens = zip(self.slots.tolist(), self.tokens.tolist(), strict=True)
        return tuple(SampledToken(slot, token, self.logprobs.get(slot)) for slot, token in tokens)
