"""Checks that a plan can be executed: the slots, pages and rows that it names must exist. In tests, and with
`--check-plans`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.cache.layout import CacheLayout
from cairn.runner.contract import StepRunner
from cairn.step import (
    DRAFTED,
    GRID,
    SAMPLED,
    Admit,
    Image,
    PrefillRow,
    StepPlan,
    StepResult,
    TableUpdate,
    TokenMasks,
    VerifyRow,
)
from cairn.types import Keys, Pages


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What a plan may name. `aligned`: prefill rows must start on the grid (exact mode)."""

    layout: CacheLayout
    num_pages: int
    num_slots: int
    vocab_size: int
    aligned: bool


@dataclass(frozen=True, slots=True)
class _Slot:
    """`num_pages`: block table entries, a number a group. `sampled`: the position of the newest sampled token."""

    num_pages: tuple[int, ...]
    images: tuple[Image, ...]
    sampled: int | None = None


class PlanCheck:
    """Checks plans in the order in which they are launched."""

    def __init__(self, limits: PlanLimits) -> None:
        self._limits = limits
        self._slots: dict[int, _Slot] = {}
        self._step: int | None = None
        self._verified: dict[int, VerifyRow] = {}

    def check(self, plan: StepPlan) -> None:
        """Raises ValueError that names the record which cannot be executed; then nothing is remembered of the plan."""
        if self._step is not None and plan.step <= self._step:
            raise ValueError(f"step {plan.step} does not follow step {self._step}")
        slots = dict(self._slots)
        for admit in plan.admits:
            slots[admit.slot] = self._admit(admit)
        for copy in plan.copies:
            self._pages(copy, np.array([copy.source, copy.target]))
        for restore in plan.restores:
            self._slot_state_pages(f"restore of slot {restore.slot}", restore.slot, restore.pages)
            if restore.slot in slots:
                slots[restore.slot] = replace(slots[restore.slot], sampled=None)
        folded = self._folds(plan)
        for save in plan.saves:
            self._slot_state_pages(f"save of slot {save.slot}", save.slot, save.pages)
        for update in plan.table_updates:
            slots[update.slot] = self._table_update(update, _slot_of(slots, update.slot, "table update"))
        ends = self._rows(plan, slots)
        self._unfolded(plan, folded, {slot: start for slot, start, _ in ends})
        for snapshot in plan.snapshots:
            name = f"snapshot of row {snapshot.row}"
            if snapshot.row >= len(ends):
                raise ValueError(f"{name}: the plan has {len(ends)} rows")
            if len(plan.decodes) <= snapshot.row < len(plan.decodes) + len(plan.verifies):
                raise ValueError(f"{name}: the states of a verify row are those of its fold")
            _, start, end = ends[snapshot.row]
            if not start < snapshot.position <= end:
                raise ValueError(f"{name}: position must be in {start + 1}..{end}, inside its row")
            self._state_pages(name, snapshot.pages)
        self._samples(plan, slots, {slot: end for slot, _, end in ends})
        self._verified = {row.slot: row for row in plan.verifies}
        self._slots, self._step = slots, plan.step

    def _folds(self, plan: StepPlan) -> dict[int, int]:
        """By slot, where the state is after the plan's folds."""
        folded = dict[int, int]()
        for fold in plan.folds:
            name, row = f"fold of slot {fold.slot}", self._verified.get(fold.slot)
            if row is None or fold.slot in folded:
                raise ValueError(f"{name}: the plan before has no verify row for it")
            if not 1 <= fold.num_tokens <= len(row.tokens):
                raise ValueError(f"{name}: {fold.num_tokens} tokens of a row of {len(row.tokens)}")
            end = folded[fold.slot] = row.start + fold.num_tokens
            positions = [snapshot.position for snapshot in fold.snapshots]
            if positions != sorted(set(positions)) or not all(row.start < position <= end for position in positions):
                raise ValueError(f"{name}: snapshots at {positions}, which are to rise within {row.start + 1}..{end}")
            for snapshot in fold.snapshots:
                self._state_pages(name, snapshot.pages)
        return folded

    def _unfolded(self, plan: StepPlan, folded: dict[int, int], begins: dict[int, int]) -> None:
        """A slot in which the plan before has verified drafts goes on after a fold, or begins anew."""
        anew = {admit.slot for admit in plan.admits} | {restore.slot for restore in plan.restores}
        begins = begins | {save.slot: folded.get(save.slot, -1) for save in plan.saves}
        for slot in self._verified.keys() & begins.keys() - anew:
            if folded.get(slot) != begins[slot]:
                raise ValueError(f"slot {slot}: its state is at {folded.get(slot)}, and goes on at {begins[slot]}")

    def _admit(self, admit: Admit) -> _Slot:
        name = f"admit of slot {admit.slot}"
        self._slot_number(name, admit.slot)
        groups = self._limits.layout.groups
        if len(admit.tables) != len(groups):
            raise ValueError(f"{name}: {len(admit.tables)} page lists for {len(groups)} attention groups")
        for pages in admit.tables:
            self._pages(name, pages)
        return _Slot(tuple(map(len, admit.tables)), admit.images)

    def _table_update(self, update: TableUpdate, slot: _Slot) -> _Slot:
        name = f"table update of slot {update.slot}"
        if update.group >= len(slot.num_pages):
            raise ValueError(f"{name}: group {update.group} of {len(slot.num_pages)}")
        known, end = slot.num_pages[update.group], update.first + len(update.pages)
        if not len(update.pages) or not known - 1 <= update.first <= known or end < known:
            raise ValueError(f"{name}: entries {update.first}..{end} do not go on from the {known} that are there")
        self._pages(name, update.pages)
        num_pages = (*slot.num_pages[: update.group], end, *slot.num_pages[update.group + 1 :])
        return replace(slot, num_pages=num_pages)

    def _rows(self, plan: StepPlan, slots: dict[int, _Slot]) -> list[tuple[int, int, int]]:
        """(slot, start, end) of all rows, in their order."""
        decodes = plan.decodes
        columns = (decodes.slots, decodes.positions, decodes.tokens, decodes.kv_write_from)
        if any(column.shape != decodes.slots.shape for column in columns):
            raise ValueError("decode rows: columns of different lengths")
        rows = []
        for slot, start, token, write_from in decodes:
            rows.append((slot, start, start + 1))
            name = _row_name(*rows[-1])
            slot_state = self._row(name, slots, slot, start, start + 1, write_from)
            if token == SAMPLED and slot_state.sampled != start:
                raise ValueError(f"{name}: the slot's last sampled token stands at {slot_state.sampled}")
            if token != SAMPLED and not 0 <= token < self._limits.vocab_size:
                raise ValueError(f"{name}: token ids must be in 0..{self._limits.vocab_size - 1}")
        for verify in plan.verifies:
            rows.append((verify.slot, verify.start, verify.end))
            name = _row_name(*rows[-1])
            self._row(name, slots, *rows[-1], verify.kv_write_from)
            known = verify.tokens[:1] if (verify.tokens[1:] == DRAFTED).all() else verify.tokens
            if len(verify.tokens) < 2 or known.min() < 0 or known.max() >= self._limits.vocab_size:
                raise ValueError(f"{name}: one draft at least, and token ids in 0..{self._limits.vocab_size - 1}")
        for row in plan.prefills:
            rows.append((row.slot, row.start, row.end))
            name = _row_name(*rows[-1])
            self._prefill(name, row, self._row(name, slots, *rows[-1], row.kv_write_from))
        numbers = [slot for slot, _, _ in rows]
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"step {plan.step}: a slot is in more than one row: {sorted(numbers)}")
        return rows

    def _row(self, name: str, slots: dict[int, _Slot], slot: int, start: int, end: int, write_from: int) -> _Slot:
        self._slot_number(name, slot)
        if start < 0 or end <= start:
            raise ValueError(f"{name}: a row has at least one token, from position 0 on")
        if write_from < 0:
            raise ValueError(f"{name}: kv_write_from {write_from} is negative")
        slot_state = _slot_of(slots, slot, name)
        for group, num_pages in zip(self._limits.layout.groups, slot_state.num_pages, strict=True):
            if num_pages < group.pages_for(end):
                raise ValueError(f"{name}: {num_pages} pages, {group.pages_for(end)} are needed")
        return slot_state

    def _prefill(self, name: str, row: PrefillRow, slot: _Slot) -> None:
        if self._limits.aligned and row.start % GRID:
            raise ValueError(f"{name}: in exact mode a prefill row starts at a multiple of {GRID}")
        if row.score is not None and not (1 <= len(row.score.targets) <= len(row.tokens) and row.score.top >= 0):
            raise ValueError(f"{name}: {len(row.score.targets)} tokens are to be scored, it has {len(row.tokens)}")
        in_image = np.zeros(len(row.tokens), np.bool_)
        for image in slot.images:
            in_image[max(0, image.start - row.start) : max(0, image.end - row.start)] = True
        if row.tokens.max() >= self._limits.vocab_size or not np.array_equal(row.tokens < 0, in_image):
            last = self._limits.vocab_size - 1
            raise ValueError(f"{name}: token ids must be in 0..{last}, and below 0 where images are")

    def _samples(self, plan: StepPlan, slots: dict[int, _Slot], ends: dict[int, int]) -> None:
        samples = plan.samples
        if not samples.slots.shape == samples.positions.shape == samples.bans_stop_tokens.shape:
            raise ValueError("samples: columns of different lengths")
        numbers = samples.slots.tolist()
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"step {plan.step}: a slot has more than one sample: {sorted(numbers)}")
        verified = {row.slot for row in plan.verifies}
        for slot, position in zip(numbers, samples.positions.tolist(), strict=True):
            name = f"sample of slot {slot}"
            if slot in verified:
                raise ValueError(f"{name}: its verify row samples already")
            self._slot_number(name, slot)
            if ends.get(slot, position) != position:
                raise ValueError(f"{name}: position {position}, but its row ends at {ends[slot]}")
            slots[slot] = replace(_slot_of(slots, slot, name), sampled=position)

    def _slot_state_pages(self, name: str, slot: int, pages: Pages) -> None:
        self._slot_number(name, slot)
        self._state_pages(name, pages)

    def _slot_number(self, name: str, slot: int) -> None:
        if not 0 <= slot < self._limits.num_slots:
            raise ValueError(f"{name}: slot {slot} is not in 0..{self._limits.num_slots - 1}")

    def _pages(self, name: object, pages: NDArray[np.integer[Any]]) -> None:
        if len(pages) and (pages.min() < 0 or pages.max() >= self._limits.num_pages):
            raise ValueError(f"{name}: pages must be in 0..{self._limits.num_pages - 1}")

    def _state_pages(self, name: str, pages: Pages) -> None:
        self._pages(name, pages)
        size = self._limits.layout.pages_per_checkpoint
        if len(pages) != size or len(np.unique(pages)) != len(pages):
            raise ValueError(f"{name}: a state is {size} different pages")


def _slot_of(slots: dict[int, _Slot], slot: int, name: str) -> _Slot:
    if slot not in slots:
        raise ValueError(f"{name}: nobody was admitted to slot {slot}")
    return slots[slot]


def _row_name(slot: int, start: int, end: int) -> str:
    return f"row of slot {slot}, tokens {start}..{end}"


class CheckedRunner(StepRunner):
    """A runner whose plans are checked before another runner executes them."""

    def __init__(self, runner: StepRunner, limits: PlanLimits) -> None:
        self.forward_passes = self.steps = 0
        self._runner = runner
        self._check = PlanCheck(limits)

    def launch(self, plan: StepPlan) -> None:
        """Raises ValueError for a plan that cannot be executed; then nothing has been done."""
        self._check.check(plan)
        self._runner.launch(plan)

    def drafts(self, step: int) -> Mapping[int, Keys]:
        return self._runner.drafts(step)

    def sample(self, step: int, masks: TokenMasks) -> None:
        self._runner.sample(step, masks)

    def collect(self, step: int) -> StepResult:
        result = self._runner.collect(step)
        self.forward_passes, self.steps = self._runner.forward_passes, self._runner.steps
        return result

    def settle(self, *, has_slots: bool = True) -> None:
        self._runner.settle(has_slots=has_slots)

    def close(self) -> None:
        self._runner.close()
