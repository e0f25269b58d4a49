"""Plans written by hand: rows that say all of themselves, of which a plan says what is new."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cairn.kernels.sampling.metadata import SamplingMetadata
from cairn.step import (
    SAMPLED,
    Admit,
    DecodeRows,
    Image,
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
)
from cairn.types import Keys, Pages, SamplingParams

__all__ = ["PlanWriter", "SampleOnly", "WholeRow", "masks_of", "slots_without_row"]


def slots_without_row(plan: StepPlan) -> set[int]:
    """Slots in which a token is drawn without a forward pass."""
    rows = {*plan.decodes.slots.tolist(), *(row.slot for row in plan.prefills)}
    return set(plan.samples.slots.tolist()) - rows


@dataclass(frozen=True, slots=True)
class WholeRow:
    """Tokens [start, end) of a sequence. `tokens`: an array, or SAMPLED; `pages`: a list a group."""

    slot: int
    start: int
    end: int
    tokens: Keys | int
    pages: tuple[Pages, ...]
    kv_write_from: int
    decode: bool
    sample: SamplingMetadata | None = None
    images: tuple[Image, ...] = ()
    score: Score | None = None


@dataclass(frozen=True, slots=True)
class SampleOnly:
    """A token from the hidden state that lies in `slot`."""

    slot: int
    sample: SamplingMetadata


class PlanWriter:
    """Admits a slot when a row begins in it, when it is restored, and when what is said of it has changed; tells of new
    pages otherwise."""

    def __init__(self, num_groups: int = 1) -> None:
        self._no_pages = (np.zeros(0, np.int32),) * num_groups
        self._slots: dict[int, Admit] = {}

    def plan(
        self,
        step: int,
        rows: Sequence[WholeRow] = (),
        sample_only: Sequence[SampleOnly] = (),
        snapshots: Sequence[Snapshot] = (),
        copies: Sequence[PageCopy] = (),
        restores: Sequence[Restore] = (),
        saves: Sequence[Save] = (),
    ) -> StepPlan:
        """`snapshots` number the rows as they are given here; the samples come in that order, too."""
        admits: list[Admit] = []
        updates: list[TableUpdate] = []
        restored = {restore.slot for restore in restores}
        for row in rows:
            anew = row.start == 0 or row.slot in restored
            self._say(row.slot, row.pages, row.images, row.sample, anew, admits, updates)
        for only in sample_only:
            known = self._slots.get(only.slot)
            pages = self._no_pages if known is None else known.tables
            self._say(only.slot, pages, (), only.sample, only.slot in restored, admits, updates)
        samples = [(row.slot, row.sample) for row in rows if row.sample is not None]
        samples += [(only.slot, only.sample) for only in sample_only]
        decodes, prefills = ([row for row in rows if row.decode is decode] for decode in (True, False))
        order = [*decodes, *prefills]
        places = [next(i for i, other in enumerate(order) if other is row) for row in rows]
        return StepPlan(
            step,
            admits=tuple(admits),
            copies=tuple(copies),
            restores=tuple(restores),
            saves=tuple(saves),
            table_updates=tuple(updates),
            decodes=decode_rows(decodes),
            prefills=tuple(
                PrefillRow(row.slot, row.start, np.asarray(row.tokens, np.int64), row.kv_write_from, row.score)
                for row in prefills
            ),
            snapshots=tuple(
                Snapshot(places[own.row] if own.row < len(rows) else own.row, own.position, own.pages)
                for own in snapshots
            ),
            samples=sample_columns(samples),
        )

    def _say(self, slot, pages, images, sample, anew, admits, updates) -> None:
        known = self._slots.get(slot)
        admit = _admit(slot, pages, images, sample, known)
        if anew or known is None or not _goes_on(known, admit):
            admits.append(admit)
        else:
            for group, (old, new) in enumerate(zip(known.tables, pages, strict=True)):
                if len(new) > len(old):
                    updates.append(TableUpdate(slot, group, len(old), new[len(old) :]))
        self._slots[slot] = admit


def decode_rows(rows: Sequence[WholeRow]) -> DecodeRows:
    tokens = [SAMPLED if isinstance(row.tokens, int) else int(row.tokens[0]) for row in rows]
    return DecodeRows(
        np.array([row.slot for row in rows], np.int32),
        np.array([row.start for row in rows], np.int32),
        np.array(tokens, np.int64),
        np.array([row.kv_write_from for row in rows], np.int32),
    )


def masks_of(rows: Sequence[WholeRow]) -> dict[int, TokenMask]:
    """By slot, what rows that are drawn allow."""
    return {
        row.slot: row.sample.allowed_mask
        for row in rows
        if row.sample is not None and row.sample.allowed_mask is not None
    }


def sample_columns(samples: Sequence[tuple[int, SamplingMetadata]]) -> Samples:
    return Samples(
        np.array([slot for slot, _ in samples], np.int32),
        np.array([sample.position for _, sample in samples], np.int32),
        np.array([bool(sample.banned_tokens) for _, sample in samples], np.bool_),
    )


def _admit(slot, pages, images, sample, known) -> Admit:
    if sample is None and known is not None:
        params, stops, logprobs = known.sampling, known.stop_token_ids, known.logprobs
    elif sample is None:
        params, stops, logprobs = SamplingParams(), (), None
    else:
        params, stops, logprobs = sample.params, sample.banned_tokens, sample.logprobs
    history = None if sample is None else sample.history
    return Admit(
        slot, pages, params, 0 if sample is None else sample.num_prompt_tokens, history, stops, logprobs, images
    )


def _goes_on(known: Admit, new: Admit) -> bool:
    said = (new.sampling, new.stop_token_ids, new.logprobs, new.images)
    same = said == (known.sampling, known.stop_token_ids, known.logprobs, known.images) and new.history is None
    return same and all(
        len(old) <= len(pages) and np.array_equal(old, pages[: len(old)])
        for old, pages in zip(known.tables, new.tables, strict=True)
    )
