"""A runner without tensors: it executes plans on tags instead of numbers, and objects to reading what is not there.

A state, a token's keys and values and a hidden state are integers that name all that went into them, so that two runs
give the same token only if they read the same things. With `numerics` they also name *how* it was computed: where
prefill tiles began, and which tokens went through decode steps. Scheduler and engine are tested with it, and it shows
in a hundred lines what a step has to do.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from cairn.cache.layout import AttentionGroup, CacheLayout
from cairn.kernels.sampling.metadata import SamplingMetadata
from cairn.runner.contract import StepRunner
from cairn.runner.input_batch import InputBatch, block_table_updates, pages_of_table
from cairn.runner.plan_check import PlanCheck, PlanLimits
from cairn.step import (
    GRID,
    SAMPLED,
    Fold,
    Logprobs,
    SampledToken,
    Scored,
    Snapshot,
    StepPlan,
    StepResult,
    TokenMasks,
    VerifiedTokens,
    VerifyRow,
)
from cairn.types import Pages
from doubles.step_results import MAX_SLOTS, step_result

__all__ = ["BlockTables", "SimulatedRunner", "prefill_tags"]

State = tuple[int, int]
"""Tag of the recurrent state, tag of the last hidden state."""

FRESH: State = (0, 0)
PREFILL, DECODE = 1, 2


_ANY_TOKEN = 1 << 63


@dataclass(frozen=True, slots=True)
class _Row:
    """A decode, verify or prefill row."""

    slot: int
    start: int
    tokens: list[int]
    kv_write_from: int
    decode: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(slots=True, eq=False)
class _Out:
    """A step that has been launched; `sampled`: once it has been drawn."""

    plan: StepPlan
    scored: tuple[Scored, ...]
    advanced: list[bool]
    sampled: tuple[SampledToken, ...] | None = None
    verified: tuple[VerifiedTokens, ...] = ()


class BlockTables:
    """The block tables of all slots. `tables`: per attention group int32 [num_slots + 1, max_pages].

    The page of the token at position p is entry p // tokens_per_page of its slot's row. Nothing is cleared: entries at
    and behind the pages of the sequence may be those of a request that had the slot before.
    """

    def __init__(self, groups: Sequence[AttentionGroup], num_slots: int, max_pages: int) -> None:
        self._groups, self._max_pages = tuple(groups), max_pages
        self.tables = tuple(np.zeros((num_slots + 1, max_pages), np.int32) for _ in groups)

    def apply(self, plan: StepPlan) -> None:
        """Take in the plan's admits and table updates."""
        updates = block_table_updates(plan, len(self.tables), self._max_pages)
        for table, (indices, pages) in zip(self.tables, updates, strict=True):
            table.reshape(-1)[indices] = pages

    def pages_of(self, slot: int, num_tokens: int) -> tuple[Pages, ...]:
        """Per group the pages of the first `num_tokens` tokens in `slot`: views."""
        return tuple(
            table[slot, : group.pages_for(num_tokens)] for group, table in zip(self._groups, self.tables, strict=True)
        )


class SimulatedRunner(StepRunner):
    """Same face as `cairn.runner.runner.Runner`; tokens are drawn from 0 .. `vocab_size` - 1.

    `tables`: what it knows of the pages of its slots. Raises LookupError when a plan reads a page, file or slot that
    does not hold what the plan says, and ValueError for one that cannot be carried out at all.
    """

    def __init__(self, layout: CacheLayout, num_pages: int, num_slots: int, vocab_size: int, numerics: bool) -> None:
        self.forward_passes = 0
        self.steps = 0
        self.tables = BlockTables(layout.groups, num_slots, pages_of_table(layout, num_pages))
        aligned = numerics and layout.state_bytes > 0
        self._check = PlanCheck(PlanLimits(layout, num_pages, num_slots, _ANY_TOKEN, aligned))
        self._input_batch = InputBatch(MAX_SLOTS)
        self._layout = layout
        self._vocab_size = vocab_size
        self._numerics = numerics
        # by page, the tag of each of its tokens, None where none was written; and the sum of all, once asked for
        self._tags: dict[int, list[int | None]] = {}
        self._sums: dict[int, int] = {}
        self._files: dict[int, State] = {}
        self._slots: dict[int, State] = {}
        self._unfolded: dict[int, tuple[int, list[State]]] = {}  # by slot, where a verify row began, and its states
        self._drawn: dict[int, int] = {}  # by slot, the token drawn last
        self._ended: set[int] = set()  # slots that have gone on with a stop token: they stay as they were
        self._out: deque[_Out] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Its records in the order that `cairn.step` lays down, but for the draws."""
        self._check.check(plan)
        self.steps += 1
        self._input_batch.update(plan)
        for admit in plan.admits:
            self._ended.discard(admit.slot)
        for copy in plan.copies:
            self._copy(copy.source, copy.target)
        for restore in plan.restores:
            self._slots[restore.slot] = self._read_file(restore.pages)
        for fold in plan.folds:
            self._fold(fold)
        self._unfolded.clear()
        for save in plan.saves:
            self._write_file(save.pages, self._slots[save.slot])
        self.tables.apply(plan)
        scored: list[Scored] = []
        rows = self._rows(plan)
        self.forward_passes += bool(rows)
        states = [self._row(row, _files_of(index, plan.snapshots)) for index, row in enumerate(rows)]
        hidden = [[tag for _, tag in each] for each in states]
        for verify, each in zip(plan.verifies, states[len(plan.decodes) :], strict=False):
            self._unfolded[verify.slot] = verify.start, each
        for slot in plan.samples.slots.tolist():
            self._drawn.pop(slot, None)
        for row, own in zip(plan.prefills, hidden[len(plan.decodes) + len(plan.verifies) :], strict=True):
            if row.score is not None:
                targets = row.score.targets.tolist()
                told = [self._logprobs(tag, token, row.score.top) for tag, token in zip(own, targets, strict=False)]
                scored += [Scored(row.slot, position, one) for position, one in enumerate(told, row.start + 1)]
        advanced = [slot not in self._ended for slot in plan.decodes.slots.tolist()]
        self._out.append(_Out(plan, tuple(scored), advanced))

    def sample(self, step: int, masks: TokenMasks) -> None:
        """The draws of the step that was launched last."""
        out = self._out[-1]
        assert out.plan.step == step and out.sampled is None, f"step {step} is not to be drawn now"
        samples = zip(
            out.plan.samples.slots.tolist(), self._input_batch.sampling_metadata(out.plan, masks), strict=True
        )
        out.sampled = tuple(self._sample(slot, sample, self._slots[slot][1]) for slot, sample in samples)
        out.verified = tuple(self._verify(row, masks.get(row.slot)) for row in out.plan.verifies)

    def _verify(self, row: VerifyRow, masks) -> VerifiedTokens:
        """Tokens one after the other, until one is not the draft in its place."""
        tokens: list[int] = []
        told: list[Logprobs] = []
        _, states = self._unfolded[row.slot]
        for _, hidden in states:
            position = row.start + 1 + len(tokens)
            mask, bans = None if masks is None else masks[len(tokens)], position < row.min_tokens_until
            sample = self._input_batch.metadata_of(row.slot, position, mask, bans, tokens)
            drawn = self._sample(row.slot, sample, hidden)
            tokens.append(drawn.token)
            told += [] if drawn.logprobs is None else [drawn.logprobs]
            if row.tokens[1 : 1 + len(tokens)].tolist() != tokens:
                break
        joined = None
        if told:
            columns = zip(*((one.token_ids, one.values, one.ranks) for one in told), strict=True)
            joined = Logprobs(*(np.concatenate(column) for column in columns))
        return VerifiedTokens(row.slot, tuple(tokens), joined)

    def _fold(self, fold: Fold) -> None:
        start, states = self._unfolded[fold.slot]
        for snapshot in fold.snapshots:
            self._write_file(snapshot.pages, states[snapshot.position - start - 1])
        self._slots[fold.slot] = states[fold.num_tokens - 1]

    def collect(self, step: int) -> StepResult:
        """What the oldest step that is out has given."""
        out = self._out.popleft()
        assert out.plan.step == step and out.sampled is not None, f"step {step} is not to be collected now"
        result = msgspec.structs.replace(
            step_result(step, out.sampled, out.scored, out.advanced), verified=out.verified
        )
        self._input_batch.append(result.slots, result.tokens)
        self._input_batch.append_verified(result.verified)
        return result

    def close(self) -> None:
        """Nothing runs beside it."""

    def _rows(self, plan: StepPlan) -> list[_Row]:
        rows = []
        for slot, start, token, write_from in plan.decodes:
            if token == SAMPLED:
                token = self._drawn[slot]
                if token in self._input_batch.admit(slot).stop_token_ids:
                    self._ended.add(slot)
            rows.append(_Row(slot, start, [token], write_from, decode=True))
        rows += [
            _Row(row.slot, row.start, row.tokens.tolist(), row.kv_write_from, isinstance(row, VerifyRow))
            for row in plan.long_rows
        ]
        return rows

    def _row(self, row: _Row, files: dict[int, Pages]) -> list[State]:
        """The states after each of the row's tokens; drafts leave the slot's as it was."""
        states = []
        groups, tables = self._layout.groups, [pages.tolist() for pages in self.tables.pages_of(row.slot, row.end)]
        state, _ = FRESH if row.start == 0 else self._slots[row.slot]
        unlimited = sum(
            self._read_first(group, pages, row.start)
            for group, pages in zip(groups, tables, strict=True)
            if group.reach is None
        )
        for position, token in enumerate(row.tokens, row.start):
            if self._numerics and not row.decode and (position % GRID == 0 or position == row.start):
                # a tile begins: off the grid its sums are grouped otherwise
                state = hash((state, position % GRID))
            kind = DECODE if self._numerics and row.decode else PREFILL
            state = hash((state, token, kind))
            context = 0
            for group, pages in zip(groups, tables, strict=True):
                page, offset = divmod(position, group.tokens_per_page)
                if position >= row.kv_write_from:
                    self._write(group, pages[page], offset, hash((state, token)))
                if group.reach is None:
                    unlimited += self._read(group, pages[page], offset)
                else:
                    context += self._read_span(group, pages, group.needed_at(position), position + 1)
            live = (state, hash((state, unlimited + context)))
            states.append(live)
            if position + 1 in files:
                self._write_file(files[position + 1], live)
        drafted = row.decode and len(row.tokens) > 1
        if row.slot not in self._ended and not drafted:
            self._slots[row.slot] = live
        return states

    def _sample(self, slot: int, sample: SamplingMetadata, hidden: int) -> SampledToken:
        seen: tuple[int, ...] = ()
        if sample.params.needs_history:
            if sample.history is None:
                raise LookupError(f"slot {slot}: a penalty at {sample.position} without the tokens before it")
            seen = (*sample.history.tolist(), sample.num_prompt_tokens)
        token = hash((hidden, sample.params.seed or 0, sample.position, *seen)) % self._vocab_size
        others = ((token + step) % self._vocab_size for step in range(self._vocab_size))
        ends = sample.bad_word_ends()
        token = next((other for other in others if other not in ends and self._may_come(other, sample)), token)
        self._drawn[slot] = token
        told = None if sample.logprobs is None else self._logprobs(hidden, token, sample.logprobs)
        return SampledToken(slot, token, told)

    def _may_come(self, token: int, sample: SamplingMetadata) -> bool:
        allowed = sample.allowed_mask is None or bool(int(sample.allowed_mask[token // 32]) >> token % 32 & 1)
        listed = not sample.params.allowed_token_ids or token in sample.params.allowed_token_ids
        return allowed and listed and token not in sample.banned_tokens

    def _logprobs(self, hidden: int, token: int, top: int) -> Logprobs:
        """What depends on the same things as the real ones do."""
        values = {other: -(hash((hidden, other)) % 1000) / 100 - 0.01 for other in range(self._vocab_size)}
        best = sorted(values, key=lambda other: (-values[other], other))[:top]
        rank = 1 + sum(value > values[token] for value in values.values())
        told = [token, *best]
        numbers = np.array([[values[other] for other in told]], np.float32)
        return Logprobs(np.array([told], np.int32), numbers, np.array([rank], np.int32))

    # -- what others write ---------------------------------------------------------------------------------------

    def write_tokens(self, page: int, tags: Sequence[int | None]) -> None:
        """Somebody else writes a page: the tags of its first tokens, None where there is none."""
        self._files.pop(page, None)
        self._sums.pop(page, None)
        size = max((group.tokens_per_page for group in self._layout.groups), default=0)
        self._tags[page] = [*tags, *[None] * (size - len(tags))]

    def write_state(self, pages: Pages, state: State) -> None:
        """Somebody else writes the pages of a checkpoint."""
        self._write_file(pages, state)

    # -- memory --------------------------------------------------------------------------------------------------

    def _read(self, group: AttentionGroup, page: int, offset: int) -> int:
        tags = self._tags.get(page)
        if tags is None or (tag := tags[offset]) is None:
            raise LookupError(f"token {offset} of page {page} was never written")
        return tag

    def _read_span(self, group: AttentionGroup, pages: Sequence[int], start: int, end: int) -> int:
        """The sum of the tags of tokens [start, end). A context is read in each step: whole pages are summed once."""
        size, total = group.tokens_per_page, 0
        for index in range(start // size, -(-end // size)):
            page, first, last = pages[index], max(0, start - index * size), min(size, end - index * size)
            if last - first < size:
                total += self._sum(page, first, last)
            else:
                if page not in self._sums:
                    self._sums[page] = self._sum(page, 0, size)
                total += self._sums[page]
        return total

    def _read_first(self, group: AttentionGroup, pages: Sequence[int], count: int) -> int:
        """The sum of the tags of the first `count` tokens in `pages`."""
        return self._read_span(group, pages, 0, count)

    def _sum(self, page: int, first: int, end: int) -> int:
        """The sum of the tags of its tokens [first, end)."""
        tags = self._tags.get(page, ())[first:end]
        if len(tags) < end - first or None in tags:
            raise LookupError(f"a token in [{first}, {end}) of page {page} was never written")
        return sum(tags)

    def _write(self, group: AttentionGroup, page: int, offset: int, tag: int) -> None:
        self._files.pop(page, None)
        self._sums.pop(page, None)
        size = max(group.tokens_per_page for group in self._layout.groups)
        self._tags.setdefault(page, [None] * size)[offset] = tag

    def _forget(self, page: int) -> None:
        self._tags.pop(page, None)
        self._sums.pop(page, None)

    def _copy(self, source: int, target: int) -> None:
        self._files.pop(target, None)
        self._forget(target)
        if source in self._tags:
            self._tags[target] = self._tags[source].copy()

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
            self._forget(page)
            self._files[page] = state


def prefill_tags(tokens: Sequence[int]) -> tuple[list[int], list[State]]:
    """What prefill leaves, without `numerics`, of each of these tokens, which begin a prompt: the tag of its keys and
    values, and the state after it."""
    tags: list[int] = []
    states: list[State] = []
    state, _ = FRESH
    for token in tokens:
        state = hash((state, token, PREFILL))
        tags.append(hash((state, token)))
        states.append((state, hash((state, sum(tags)))))
    return tags, states


def _files_of(row: int, snapshots: Sequence[Snapshot]) -> dict[int, Pages]:
    """The files of a row's snapshots, by position."""
    return {snapshot.position: snapshot.pages for snapshot in snapshots if snapshot.row == row}
