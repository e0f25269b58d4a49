"""A runner without tensors: it carries plans out on tags instead of numbers, and objects to reading what is not there.

A state, a token's keys and values and a hidden state are integers that name all that went into them, so that two runs
give the same token only if they read the same things. With `numerics` they also name *how* it was computed: where
prefill tiles began, and which tokens went through decode steps. Scheduler and engine are tested with it, and it shows
in a hundred lines what a step has to do.
"""

from collections.abc import Sequence

import numpy as np

from cairn.cache.layout import CacheLayout
from cairn.runner.bad_words import ends_of_bad_words
from cairn.step import GRID, FromStep, Logprobs, Row, Sample, SampledToken, Scored, StepPlan, StepResult
from cairn.types import Pages

__all__ = ["SimulatedRunner"]

State = tuple[int, int]
"""Tag of the recurrent state, tag of the last hidden state."""

FRESH: State = (0, 0)
PREFILL, DECODE = 1, 2


class SimulatedRunner:
    """Same face as `cairn.runner.runner.Runner`; tokens are drawn from 0 .. `vocab_size` - 1.

    Raises LookupError when a plan reads a page, file or slot that does not hold what the plan says.
    """

    def __init__(self, layout: CacheLayout, vocab_size: int, numerics: bool) -> None:
        self.forward_passes = 0
        self.steps = 0
        self._layout = layout
        self._vocab_size = vocab_size
        self._numerics = numerics
        self._tokens: dict[tuple[int, int], int] = {}
        self._files: dict[int, State] = {}
        self._slots: dict[int, State] = {}
        self._sampled: dict[int, tuple[int, int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """Carry out one plan, in the order that `cairn.step` lays down."""
        self.steps += 1
        for copy in plan.copies:
            self._copy(copy.source, copy.target)
        for restore in plan.restores:
            self._slots[restore.slot] = self._read_file(restore.pages)
        for fork in plan.forks:
            self._slots[fork.target] = self._slots[fork.source]
        for save in plan.saves:
            self._write_file(save.pages, self._slots[save.slot])
        sampled, scored = [], []
        self.forward_passes += bool(plan.rows)
        for index, row in enumerate(plan.rows):
            keeps = {keep.position: keep.pages for keep in plan.keeps if keep.row == index}
            hidden = self._row(row, keeps)
            if row.score is not None:
                targets = row.score.targets.tolist()
                told = [self._logprobs(tag, token, row.score.top) for tag, token in zip(hidden, targets, strict=False)]
                scored += [Scored(row.slot, position, one) for position, one in enumerate(told, row.start + 1)]
            if row.sample is not None:
                sampled.append(self._draw(row.slot, row.sample, plan.step))
        for only in plan.sample_only:
            sampled.append(self._draw(only.slot, only.sample, plan.step))
        return StepResult(plan.step, tuple(sampled), tuple(scored))

    def close(self) -> None:
        """Nothing runs beside it."""

    def _row(self, row: Row, keeps: dict[int, Pages]) -> list[int]:
        """The hidden states after each of the row's tokens."""
        hidden = []
        state, _ = FRESH if row.start == 0 else self._slots[row.slot]
        context = sum(self._read(row, position) for position in range(row.start))
        for position, token in enumerate(self._inputs(row), row.start):
            if self._numerics and not row.decode and (position % GRID == 0 or position == row.start):
                # a tile begins: off the grid its sums are grouped otherwise
                state = hash((state, position % GRID))
            kind = DECODE if self._numerics and row.decode else PREFILL
            state = hash((state, token, kind))
            if position >= row.kv_write_from:
                self._write(row, position, hash((state, token)))
            context += self._read(row, position)
            live = (state, hash((state, context)))
            hidden.append(live[1])
            if position + 1 in keeps:
                self._write_file(keeps[position + 1], live)
        self._slots[row.slot] = live
        return hidden

    def _inputs(self, row: Row) -> Sequence[int]:
        if isinstance(row.tokens, FromStep):
            step, token = self._sampled[row.slot]
            if step != row.tokens.step:
                raise LookupError(f"slot {row.slot} holds the token of step {step}, not of {row.tokens.step}")
            return [token]
        tokens: list[int] = row.tokens.tolist()
        if len(tokens) != row.end - row.start:
            raise LookupError(f"{len(tokens)} tokens for [{row.start}, {row.end})")
        return tokens

    def _draw(self, slot: int, sample: Sample, step: int) -> SampledToken:
        _, hidden = self._slots[slot]
        seen: tuple[int, ...] = ()
        if sample.params.needs_history:
            if sample.history is None or len(sample.history) != sample.position:
                raise LookupError(f"slot {slot}: a penalty at {sample.position} without the tokens before it")
            seen = (*sample.history.tolist(), sample.num_prompt_tokens)
        token = hash((hidden, sample.params.seed, sample.position, *seen)) % self._vocab_size
        others = ((token + step) % self._vocab_size for step in range(self._vocab_size))
        ends = ends_of_bad_words(sample)
        token = next((other for other in others if other not in ends and self._may_come(other, sample)), token)
        self._sampled[slot] = (step, token)
        told = None if sample.logprobs is None else self._logprobs(hidden, token, sample.logprobs)
        return SampledToken(slot, token, told)

    def _may_come(self, token: int, sample: Sample) -> bool:
        allowed = sample.allowed is None or bool(int(sample.allowed[token // 32]) >> token % 32 & 1)
        listed = not sample.params.allowed_tokens or token in sample.params.allowed_tokens
        return allowed and listed and token not in sample.banned

    def _logprobs(self, hidden: int, token: int, top: int) -> Logprobs:
        """What depends on the same things as the real ones do."""
        values = {other: -(hash((hidden, other)) % 1000) / 100 - 0.01 for other in range(self._vocab_size)}
        best = sorted(values, key=lambda other: (-values[other], other))[:top]
        rank = 1 + sum(value > values[token] for value in values.values())
        told = [token, *best]
        numbers = np.array([[values[other] for other in told]], np.float32)
        return Logprobs(np.array([told], np.int32), numbers, np.array([rank], np.int32))

    # -- memory --------------------------------------------------------------------------------------------------

    def _slot_of(self, row: Row, position: int) -> tuple[int, int]:
        size = self._layout.block_size
        return int(row.pages[0][position // size]), position % size

    def _read(self, row: Row, position: int) -> int:
        if not row.pages:
            return 0
        slot = self._slot_of(row, position)
        if slot not in self._tokens:
            raise LookupError(f"token {position} of slot {row.slot} was never written to page {slot[0]}")
        return self._tokens[slot]

    def _write(self, row: Row, position: int, tag: int) -> None:
        if row.pages:
            slot = self._slot_of(row, position)
            self._files.pop(slot[0], None)
            self._tokens[slot] = tag

    def _copy(self, source: int, target: int) -> None:
        self._files.pop(target, None)
        for index in range(self._layout.block_size):
            self._tokens.pop((target, index), None)
            if (source, index) in self._tokens:
                self._tokens[(target, index)] = self._tokens[(source, index)]

    def _read_file(self, pages: Pages) -> State:
        found = {self._files.get(page) for page in pages.tolist()}
        if len(found) != 1 or None in found:
            raise LookupError(f"pages {pages.tolist()} hold no checkpoint")
        state = found.pop()
        assert state is not None
        return state

    def _write_file(self, pages: Pages, state: State) -> None:
        if len(pages) != self._layout.pages_per_checkpoint:
            raise LookupError(f"a file of {len(pages)} pages")
        for page in pages.tolist():
            for index in range(self._layout.block_size):
                self._tokens.pop((page, index), None)
            self._files[page] = state
