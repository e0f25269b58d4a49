"""The steps that a server carries out before it serves: they show what the largest one takes of a GPU's memory, and
have all kernels compiled that requests would wait for otherwise.

What is computed is nobody's: both sequences have the same pages, and all checkpoints go to the same pages.
"""

from collections.abc import Iterator

import numpy as np

from cairn.cache.layout import CacheLayout
from cairn.cache.placement import PlacementPolicy, PromptFacts
from cairn.step import (
    DRAFTED,
    GRID,
    SAMPLED,
    Admit,
    DecodeRows,
    Fold,
    FoldSnapshot,
    PageCopy,
    PrefillRow,
    Restore,
    Samples,
    Save,
    Snapshot,
    StepPlan,
    TokenMasks,
    VerifyRow,
)
from cairn.types import Pages, SamplingParams

SLOTS = 2
"""That the plans name."""

_BEHIND = GRID, 2 * GRID + 6
"""Tokens of the second step's prompt: after a hit, and to an end off the grid."""

_LONG = 17 * 128
"""Tokens before a decode whose attention is in many parts. Of those the CUDA kernels put 16 together with one variant,
and more with another."""

_DRAWN, _GREEDY = SamplingParams(temperature=1.0, top_p=0.9, seed=0), SamplingParams(temperature=0.0)
_EVERYTHING = SamplingParams(frequency_penalty=1.0, logit_bias=((0, 1.0),), seed=0)


def num_profile_pages(layout: CacheLayout, num_tokens: int) -> int:
    """That the plans name."""
    return max(layout.pages_for(_longest(num_tokens)), layout.pages_per_checkpoint, 2)


def profile_plans(
    layout: CacheLayout, num_tokens: int, placement: PlacementPolicy | None, num_drafts: int = 0
) -> tuple[StepPlan, ...]:
    """A prompt of `num_tokens` tokens, with as many checkpoints as a step ever takes of it; and after it a step of all
    kinds: a decode, a prompt after a hit, a checkpoint between grid points, a save, a copy, and a greedy draw; and if
    anything is drafted, a step of as many tokens with `num_drafts` drafts, whose inputs are kept. `placement`: where
    checkpoints are kept; None without a cache."""
    tables = tuple(np.arange(group.pages_for(_longest(num_tokens)), dtype=np.int32) for group in layout.groups)
    state_pages = np.arange(layout.pages_per_checkpoint, dtype=np.int32)
    largest = StepPlan(
        0,
        admits=(Admit(0, tables, _DRAWN),),
        prefills=(PrefillRow(0, 0, np.zeros(num_tokens, np.int64), 0),),
        snapshots=_snapshots(placement, 0, 0, num_tokens, state_pages),
        samples=_samples((0, num_tokens)),
    )
    begin, end = _BEHIND
    position, first = np.array([num_tokens], np.int32), np.zeros(1, np.int32)
    mixed = StepPlan(
        1,
        admits=(Admit(1, tables, _GREEDY),),
        copies=(PageCopy(0, 1),),
        restores=() if placement is None else (Restore(1, state_pages),),
        saves=() if placement is None else (Save(0, state_pages),),
        decodes=DecodeRows(first, position, np.array([SAMPLED], np.int64), first),
        prefills=(PrefillRow(1, begin, np.zeros(end - begin, np.int64), begin),),
        snapshots=_snapshots(placement, 1, begin, end, state_pages),
        samples=_samples((1, end)),
    )
    if not num_drafts:
        return largest, mixed
    tokens = np.zeros(max(2, min(1 + num_drafts, num_tokens)), np.int64)
    rest = np.zeros(max(1, num_tokens - len(tokens)), np.int64)
    verifying = StepPlan(
        2,
        admits=(Admit(1, tables, _GREEDY),),
        verifies=(VerifyRow(0, 1, tokens, 0),),
        prefills=(PrefillRow(1, 0, rest, 0),),
    )
    return largest, mixed, verifying


def warm_up_plans(
    layout: CacheLayout,
    num_tokens: int,
    placement: PlacementPolicy | None,
    vocab_size: int,
    step: int = 2,
    num_drafts: int = 0,
    has_head: bool = False,
) -> Iterator[tuple[StepPlan, TokenMasks]]:
    """Behind `profile_plans`, from number `step` on, small steps for what else kernels are compiled for: prompts of
    each power of 2 below `num_tokens`, as tiles are as large as there are rows; a decode alone, whose one row lies
    otherwise than several do, and whose attention is in one part or in many; drafts, if there are any, perhaps of the
    model's head; and a draw with all that may be asked of one."""
    tables = tuple(np.arange(group.pages_for(_longest(num_tokens)), dtype=np.int32) for group in layout.groups)
    state_pages = np.arange(layout.pages_per_checkpoint, dtype=np.int32)
    count = 1
    while count < num_tokens:
        yield (
            StepPlan(
                step,
                admits=(Admit(0, tables, _GREEDY),),
                prefills=(PrefillRow(0, 0, np.zeros(count, np.int64), 0),),
                snapshots=_snapshots(placement, 0, 0, count, state_pages),
            ),
            {},
        )
        step, count = step + 1, 2 * count
    first = np.zeros(1, np.int32)
    long = DecodeRows(first, first + _LONG, first.astype(np.int64), first)
    yield StepPlan(step, admits=(Admit(0, tables, _GREEDY),), decodes=long), {}
    if num_drafts:
        yield from ((plan, {}) for plan in _drafting(step + 1, placement, state_pages, has_head))
        step += 3
    asked = Admit(0, tables, _EVERYTHING, num_prompt_tokens=1, history=np.zeros(1, np.int64), logprobs=1)
    alone = StepPlan(
        step + 1,
        admits=(asked,),
        decodes=DecodeRows(first, first, first.astype(np.int64), first),
        samples=_samples((0, 1)),
    )
    yield alone, {0: np.full(-(-vocab_size // 32), -1, np.int32)}


def _drafting(step: int, placement: PlacementPolicy | None, state_pages: Pages, has_head: bool) -> tuple[StepPlan, ...]:
    """Verifies of both sequences, whose attention is in one part and in many; folds, of which one has a checkpoint in
    it, a decode, and a verify, perhaps of what the head drafts; and its fold."""
    first, tokens = np.zeros(1, np.int32), np.zeros(3, np.int64)
    drafts = np.array([0, DRAFTED, DRAFTED], np.int64) if has_head else tokens
    start = _LONG - len(tokens)
    snapshots = () if placement is None else (FoldSnapshot(start + 1, state_pages),)
    return (
        StepPlan(step, verifies=(VerifyRow(0, start, tokens, 0), VerifyRow(1, 1, tokens, 0))),
        StepPlan(
            step + 1,
            folds=(Fold(0, 2, snapshots), Fold(1, 1)),
            decodes=DecodeRows(first, first + start + 2, first.astype(np.int64), first),
            verifies=(VerifyRow(1, 2, drafts, 0),),
        ),
        StepPlan(step + 2, folds=(Fold(1, 1),)),
    )


def _longest(num_tokens: int) -> int:
    """Tokens of the longest sequence: the first one decodes a token after its prompt."""
    return max(num_tokens + 1, _BEHIND[1], _LONG + 1)


def _snapshots(
    placement: PlacementPolicy | None, row: int, start: int, end: int, state_pages: Pages
) -> tuple[Snapshot, ...]:
    """Where an idle pool has room for all that the policy would keep."""
    if placement is None:
        return ()
    grid = dict.fromkeys(range((start // GRID + 1) * GRID, end, GRID), 0.0)
    facts = PromptFacts(end, hit=start, ever_matched=start, predicted=grid)
    return tuple(Snapshot(row, point.position, state_pages) for point in placement.in_prefill(facts, start, end))


def _samples(*columns: tuple[int, int]) -> Samples:
    """(slot, position) of each."""
    slots, positions = np.array(columns, np.int32).T.copy()
    return Samples(slots, positions, np.zeros(len(slots), np.bool_))
