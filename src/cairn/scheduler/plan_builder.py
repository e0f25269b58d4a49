"""A plan in the making, and what the scheduler must remember of it until it has been applied."""

from dataclasses import dataclass, field

import numpy as np

from cairn.scheduler.request import Request
from cairn.step import (
    SAMPLED,
    Admit,
    DecodeRows,
    PageCopy,
    PrefillRow,
    Restore,
    Samples,
    Save,
    Score,
    Snapshot,
    StepPlan,
    TableUpdate,
)


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """One request's share of a step: tokens [start, end) by a prefill or a decode row, no row where they are equal.

    `row`: its place among the rows of its kind. `samples`: whether a token comes back. `checkpoint_positions`: of its
    snapshots, or of its save.
    """

    request: Request
    start: int
    end: int
    samples: bool = False
    is_decode: bool = False
    row: int = 0
    checkpoint_positions: list[int] = field(default_factory=list)

    @property
    def has_row(self) -> bool:
        return self.end > self.start


@dataclass(slots=True, eq=False)
class PlanBuilder:
    """Collects the records of step `step`; `budget` is what is left of its tokens. `scheduled`: who takes part, each
    with a slot of its own, but for `plain`: requests and their decode rows. Theirs are the decodes with nothing but a
    token to them: no new page, no point of the placement, no constraint, no penalty, and `max_tokens` leaves a token to
    sample. Of many sequences nearly all are plain in nearly every step, so these take a short way.
    """

    step: int
    budget: int
    copies: list[PageCopy] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    plain: list[tuple[Request, int]] = field(default_factory=list)
    _admits: list[Admit] = field(default_factory=list)
    _table_updates: list[TableUpdate] = field(default_factory=list)
    _decodes: list[tuple[int, int, int, int]] = field(default_factory=list)
    _prefills: list[PrefillRow] = field(default_factory=list)
    _samples: list[tuple[int, int, bool]] = field(default_factory=list)

    def add_admit(self, request: Request) -> None:
        """The request begins in its slot, with the pages that it has by now."""
        spec, sequence = request.spec, request.sequence
        assert sequence is not None
        self._admits.append(
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
        added = ScheduledSequence(request, start, end, row=len(self._prefills))
        self._prefills.append(PrefillRow(request.slot, start, sequence.keys[start:end], sequence.kv_write_from, score))
        self._record_row(added)
        return added

    def add_decode(self, request: Request) -> ScheduledSequence:
        """A decode row of the token at num_scheduled, or of the one that a step still out samples."""
        sequence, start = request.sequence, request.num_scheduled
        assert sequence is not None
        added = ScheduledSequence(request, start, start + 1, is_decode=True, row=len(self._decodes))
        token = int(sequence.keys[start]) if start < sequence.num_tokens else SAMPLED
        self._decodes.append((request.slot, start, token, sequence.kv_write_from))
        self._record_row(added)
        return added

    def add_plain_decode(self, request: Request) -> None:
        """A decode row of the token that was sampled last, and the sample of the next one."""
        sequence, position = request.sequence, request.num_scheduled
        assert sequence is not None
        token = SAMPLED if request.sampling_step is not None else request.output[-1]
        self.plain.append((request, len(self._decodes)))
        self._decodes.append((request.slot, position, token, sequence.kv_write_from))
        request.num_scheduled = position = position + 1
        request.num_in_flight += 1
        self.budget -= 1
        self.add_sample(request, position)

    def add_sample(self, request: Request, position: int) -> None:
        """The token at absolute position `position` is sampled; no stop token before `min_tokens` have been."""
        bans_stop_tokens = position - request.num_prompt_tokens < request.spec.min_tokens
        self._samples.append((request.slot, position, bans_stop_tokens))
        request.sampling_step = self.step

    @property
    def is_empty(self) -> bool:
        """Whether nobody takes part."""
        return not (self.scheduled or self.plain)

    @property
    def num_decodes(self) -> int:
        """Rows of one token each."""
        return len(self._decodes)

    def plain_sequence(self, request: Request, row: int) -> ScheduledSequence:
        """One of `plain` as the long way takes it."""
        start = self._decodes[row][1]
        return ScheduledSequence(request, start, start + 1, samples=True, is_decode=True, row=row)

    def row_of(self, scheduled: ScheduledSequence) -> int:
        """The number of its row among all of the plan's, once all of them are there."""
        return scheduled.row if scheduled.is_decode else scheduled.row + self.num_decodes

    def plan(self) -> StepPlan:
        decodes = np.array(self._decodes, np.int64).reshape(-1, 4).T.copy()
        slots, positions, _, write_from = decodes.astype(np.int32)
        samples = np.array(self._samples, np.int32).reshape(-1, 3).T.copy()
        return StepPlan(
            step=self.step,
            admits=tuple(self._admits),
            copies=tuple(self.copies),
            restores=tuple(self.restores),
            saves=tuple(self.saves),
            table_updates=tuple(self._table_updates),
            decodes=DecodeRows(slots, positions, decodes[2], write_from),
            prefills=tuple(self._prefills),
            snapshots=tuple(self.snapshots),
            samples=Samples(samples[0], samples[1], samples[2].astype(np.bool_)),
        )

    def _record_row(self, added: ScheduledSequence) -> None:
        self.scheduled.append(added)
        self.budget -= added.end - added.start
        request = added.request
        assert request.sequence is not None
        for group, table in enumerate(request.sequence.tables):
            if table.num_sent < table.length:
                first, pages = table.drain_updates()
                self._table_updates.append(TableUpdate(request.slot, group, first, pages))
