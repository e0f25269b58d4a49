"""A plan in the making, and what the scheduler must remember of it until it has been applied."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from cairn.scheduler.request import Request
from cairn.scheduler.slot_table import SlotTable
from cairn.step import (
    SAMPLED,
    Admit,
    DecodeRows,
    Fold,
    PageCopy,
    PrefillRow,
    Restore,
    Samples,
    Save,
    Score,
    Snapshot,
    StepPlan,
    TableUpdate,
    TokenMask,
    VerifyRow,
)
from cairn.types import Keys


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """One request's share of a step: tokens [start, end) by a prefill, verify or decode row, no row where they are
    equal.

    `row`: its place among the rows of its kind. `samples`: whether a token comes back. `checkpoint_positions`: of its
    snapshots, or of its save or fold. `masks`: of a verify row of a request with a constraint, see `TokenMasks`.
    """

    request: Request
    start: int
    end: int
    samples: bool = False
    is_decode: bool = False
    is_verify: bool = False
    row: int = 0
    checkpoint_positions: list[int] = field(default_factory=list)
    masks: Sequence[TokenMask | None] | None = None

    @property
    def has_row(self) -> bool:
        return self.end > self.start


class PlainDecodes(msgspec.Struct, frozen=True, eq=False):
    """The decodes with nothing but a token to them: no new page, no point of the placement, no constraint, no penalty,
    and `max_tokens` leaves a token to sample. Of many sequences nearly all are plain in nearly every step, so they have
    no records of their own.

    `requests`, in their order. `slots` and `rows`: the slot of each and its number among the decode rows, [n]; None
    where these are all of the decode rows.
    """

    requests: Sequence[Request] = ()
    slots: NDArray[np.intp] = msgspec.field(default_factory=lambda: np.zeros(0, np.intp))
    rows: NDArray[np.intp] | None = None

    def __len__(self) -> int:
        return len(self.requests)


_NO_PLAIN, _NO_DECODES, _NO_SAMPLES = PlainDecodes(), DecodeRows(), Samples()


class _SlotUpdates(msgspec.Struct, eq=False):
    admits: list[Admit] = msgspec.field(default_factory=list)
    tables: list[TableUpdate] = msgspec.field(default_factory=list)


class _LongRows(msgspec.Struct, eq=False):
    verifies: list[VerifyRow] = msgspec.field(default_factory=list)
    prefills: list[PrefillRow] = msgspec.field(default_factory=list)


class PlanBuilder(msgspec.Struct, eq=False):
    """Collects the records of step `step`; `budget` is what is left of its tokens. `scheduled`: who takes part, but for
    `plain`; each once, and once more for the checkpoints of its fold. `decodes`: complete when the running requests
    have got their rows."""

    step: int
    budget: int
    copies: list[PageCopy] = msgspec.field(default_factory=list)
    restores: list[Restore] = msgspec.field(default_factory=list)
    folds: list[Fold] = msgspec.field(default_factory=list)
    saves: list[Save] = msgspec.field(default_factory=list)
    snapshots: list[Snapshot] = msgspec.field(default_factory=list)
    scheduled: list[ScheduledSequence] = msgspec.field(default_factory=list)
    plain: PlainDecodes = _NO_PLAIN
    decodes: DecodeRows = _NO_DECODES
    _slot_updates: _SlotUpdates = msgspec.field(default_factory=_SlotUpdates)
    _decoding: dict[int, ScheduledSequence] = msgspec.field(default_factory=dict)  # by `running`'s index
    _long_rows: _LongRows = msgspec.field(default_factory=_LongRows)
    _decode_samples: Samples = _NO_SAMPLES
    _samples: list[tuple[int, int, bool]] = msgspec.field(default_factory=list)

    def add_admit(self, request: Request) -> None:
        """The request begins in its slot, with the pages that it has by now."""
        spec, sequence = request.spec, request.sequence
        assert sequence is not None
        self._slot_updates.admits.append(
            Admit(
                slot=request.slot,
                tables=tuple(table.drain_updates()[1] for table in sequence.tables),
                sampling=spec.sampling,
                num_prompt_tokens=request.num_prompt_tokens,
                history=sequence.keys if spec.sampling.needs_history else None,
                stop_token_ids=tuple(sorted(spec.stop_token_ids)),
                logprobs=spec.logprobs,
                images=spec.images,
            )
        )

    def add_prefill(self, request: Request, end: int, score: Score | None) -> ScheduledSequence:
        """A prefill row [num_scheduled, end)."""
        sequence, start = request.sequence, request.num_scheduled
        assert sequence is not None
        added = ScheduledSequence(request, start, end, row=len(self._long_rows.prefills))
        self._long_rows.prefills.append(
            PrefillRow(request.slot, start, sequence.keys[start:end], sequence.kv_write_from, score)
        )
        self._record_row(added)
        return added

    def add_verify(self, request: Request, drafts: Keys, masks: Sequence[TokenMask | None] | None) -> ScheduledSequence:
        """A verify row of the token at num_scheduled and the drafts after it, shape [drafts]. `masks`: see
        `ScheduledSequence`."""
        start, sequence = request.num_scheduled, request.sequence
        assert sequence is not None
        end, row = start + 1 + len(drafts), len(self._long_rows.verifies)
        added = ScheduledSequence(request, start, end, samples=True, is_verify=True, row=row, masks=masks)
        tokens = np.concatenate([np.array([request.last_token], np.int64), drafts])
        until = max(0, request.min_tokens_until)
        self._long_rows.verifies.append(VerifyRow(request.slot, start, tokens, sequence.kv_write_from, until))
        self._record_row(added)
        return added

    def add_decode(self, request: Request, index: int) -> ScheduledSequence:
        """A decode row of the token at num_scheduled, or of the one that a step still out samples, for the running
        request number `index`; `add_decodes` makes it."""
        start = request.num_scheduled
        added = self._decoding[index] = ScheduledSequence(request, start, start + 1, is_decode=True)
        self._record_row(added)
        return added

    def add_decodes(
        self, table: SlotTable, running: Sequence[Request], slots: NDArray[np.intp], plain: NDArray[np.bool_]
    ) -> None:
        """The decode rows of the running requests, in their order: for those that `plain` marks, bool [n], each with a
        sample of the next token, and those of `add_decode`. `slots`: of `running`, int [n]."""
        at = decoding = plain.nonzero()[0]
        rows = None
        if self._decoding:
            decoding = np.sort(np.concatenate([at, list(self._decoding)]))
            rows = decoding.searchsorted(at)
        plain_slots = slots
        if len(at) < len(running):
            running = [running[index] for index in at.tolist()]
            plain_slots, slots = slots[at], slots[decoding]
        self.plain = PlainDecodes(running, plain_slots, rows)
        self.budget -= len(at)
        table.num_scheduled[plain_slots] += 1
        table.num_in_flight[plain_slots] += 1
        ends, tokens = table.num_scheduled[slots], table.last_token[slots].astype(np.int64)
        # of the steps that name a plain one each samples a token
        tokens[table.num_in_flight[slots] > 1] = SAMPLED
        silent: list[int] = []
        for index, added in self._decoding.items():
            request, added.row = added.request, int(decoding.searchsorted(index))
            is_known = added.start < request.num_tokens
            tokens[added.row] = request.output[added.start - request.num_prompt_tokens] if is_known else SAMPLED
            if not added.samples:
                silent.append(added.row)
        numbers, bans_stop_tokens = slots.astype(np.int32), ends < table.min_tokens_until[slots]
        self.decodes = DecodeRows(numbers, ends - 1, tokens, table.kv_write_from[slots])
        if silent:
            is_told = np.ones(len(slots), np.bool_)
            is_told[silent] = False
            numbers, ends, bans_stop_tokens = numbers[is_told], ends[is_told], bans_stop_tokens[is_told]
        self._decode_samples = Samples(numbers, ends, bans_stop_tokens)

    def add_sample(self, request: Request, position: int) -> None:
        """The token at absolute position `position` is sampled after a prefill or a full hit; no stop token before
        `min_tokens` have been."""
        self._samples.append((request.slot, position, position < request.min_tokens_until))

    @property
    def is_empty(self) -> bool:
        """Whether nobody takes part."""
        return not (self.scheduled or self.plain)

    @property
    def num_decodes(self) -> int:
        """Rows of one token each."""
        return len(self.decodes)

    def row_of(self, scheduled: ScheduledSequence) -> int:
        """The number of its row among all of the plan's, once all of them are there."""
        assert not scheduled.is_verify, "what a verify row computes is kept by its fold"
        return (
            scheduled.row if scheduled.is_decode else scheduled.row + self.num_decodes + len(self._long_rows.verifies)
        )

    @property
    def samples(self) -> Samples:
        """Those of decode rows, then the others."""
        if not self._samples:
            return self._decode_samples
        slots, positions, bans = np.array(self._samples, np.int32).T.copy()
        first, others = self._decode_samples, Samples(slots, positions, bans.astype(np.bool_))
        if not len(first):
            return others
        return Samples(
            np.concatenate([first.slots, others.slots]),
            np.concatenate([first.positions, others.positions]),
            np.concatenate([first.bans_stop_tokens, others.bans_stop_tokens]),
        )

    def plan(self) -> StepPlan:
        return StepPlan(
            step=self.step,
            admits=tuple(self._slot_updates.admits),
            copies=tuple(self.copies),
            restores=tuple(self.restores),
            folds=tuple(self.folds),
            saves=tuple(self.saves),
            table_updates=tuple(self._slot_updates.tables),
            decodes=self.decodes,
            verifies=tuple(self._long_rows.verifies),
            prefills=tuple(self._long_rows.prefills),
            snapshots=tuple(self.snapshots),
            samples=self.samples,
        )

    def _record_row(self, added: ScheduledSequence) -> None:
        self.scheduled.append(added)
        self.budget -= added.end - added.start
        self.update_tables(added.request)

    def update_tables(self, request: Request) -> None:
        """The runner is told of pages that the request has got."""
        assert request.sequence is not None
        for group, table in enumerate(request.sequence.tables):
            if table.num_sent < table.length:
                first, pages = table.drain_updates()
                self._slot_updates.tables.append(TableUpdate(request.slot, group, first, pages))
