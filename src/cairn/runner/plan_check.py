"""Whether a plan can be carried out at all. What it names must exist; whether it is wise is the scheduler's affair."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cairn.cache.layout import CacheLayout
from cairn.step import GRID, FromStep, Row, StepPlan
from cairn.types import Pages


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What a plan may name. `aligned`: prefill rows must start on the 64-token grid (exact mode)."""

    layout: CacheLayout
    num_pages: int
    num_slots: int
    vocab_size: int
    aligned: bool

    def check(self, plan: StepPlan, sampled_steps: Sequence[int | None]) -> None:
        """Raises ValueError that names the record. `sampled_steps`: the step that last sampled in each slot."""
        for copy in plan.copies:
            self._pages(copy, np.array([copy.source, copy.target]))
        for restore in plan.restores:
            self._slots(restore, [restore.slot])
            self._file(restore, restore.pages)
        for fork in plan.forks:
            self._slots(fork, [fork.source, fork.target])
        for save in plan.saves:
            self._slots(save, [save.slot])
            self._file(save, save.pages)
        steps = self._steps_of_rows(plan, sampled_steps)
        for row in plan.rows:
            self._row(row, steps)
        for keep in plan.keeps:
            if not 0 <= keep.row < len(plan.rows):
                raise ValueError(f"{keep}: the plan has {len(plan.rows)} rows")
            row = plan.rows[keep.row]
            if not row.start < keep.position <= row.end:
                raise ValueError(f"{keep}: position must be in {row.start + 1}..{row.end}, inside its row")
            self._file(keep, keep.pages)
        for only in plan.sample_only:
            self._slots(only, [only.slot])
        self._distinct(plan)

    def _steps_of_rows(self, plan: StepPlan, sampled_steps: Sequence[int | None]) -> list[int | None]:
        """`sampled_steps` as they are when the rows' turn comes."""
        steps = list(sampled_steps)
        for restore in plan.restores:
            steps[restore.slot] = None
        for fork in plan.forks:
            steps[fork.target] = steps[fork.source]
        return steps

    def _row(self, row: Row, steps: Sequence[int | None]) -> None:
        name = f"row of slot {row.slot}, tokens {row.start}..{row.end}"
        self._slots(name, [row.slot])
        count = row.end - row.start
        if row.start < 0 or count < 1:
            raise ValueError(f"{name}: a row has at least one token, from position 0 on")
        if row.decode and count != 1:
            raise ValueError(f"{name}: a decode row has exactly one token")
        if self.aligned and not row.decode and row.start % GRID:
            raise ValueError(f"{name}: in exact mode a prefill row starts at a multiple of {GRID}")
        if row.kv_write_from < 0:
            raise ValueError(f"{name}: kv_write_from {row.kv_write_from} is negative")
        self._tokens(name, row, steps[row.slot])
        if row.score is not None and not (1 <= len(row.score.targets) <= count and row.score.top >= 0):
            raise ValueError(f"{name}: {len(row.score.targets)} tokens are to be scored, it has {count}")
        if len(row.pages) != len(self.layout.groups):
            raise ValueError(f"{name}: {len(row.pages)} page lists for {len(self.layout.groups)} attention groups")
        for group, pages in zip(self.layout.groups, row.pages, strict=True):
            self._pages(name, pages)
            if len(pages) < group.pages_for(row.end):
                raise ValueError(f"{name}: {len(pages)} pages, {group.pages_for(row.end)} are needed")

    def _tokens(self, name: str, row: Row, sampled_step: int | None) -> None:
        if isinstance(row.tokens, FromStep):
            if row.end - row.start != 1:
                raise ValueError(f"{name}: FromStep gives one token")
            if row.start == 0 or sampled_step != row.tokens.step:
                raise ValueError(f"{name}: {row.tokens}, but the slot's last token is of step {sampled_step}")
            return
        if row.tokens.shape != (row.end - row.start,):
            raise ValueError(f"{name}: tokens of shape {row.tokens.shape}, not ({row.end - row.start},)")
        pictured = np.zeros(row.end - row.start, np.bool_)
        for image in row.images:
            pictured[max(0, image.start - row.start) : max(0, image.end - row.start)] = True
        if row.tokens.max() >= self.vocab_size or not np.array_equal(row.tokens < 0, pictured):
            raise ValueError(f"{name}: token ids must be in 0..{self.vocab_size - 1}, and below 0 where images are")

    def _slots(self, record: object, slots: Iterable[int]) -> None:
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise ValueError(f"{record}: slot {slot} is not in 0..{self.num_slots - 1}")

    def _pages(self, record: object, pages: Pages | np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        if len(pages) and (pages.min() < 0 or pages.max() >= self.num_pages):
            raise ValueError(f"{record}: pages must be in 0..{self.num_pages - 1}")

    def _file(self, record: object, pages: Pages) -> None:
        self._pages(record, pages)
        if len(pages) != self.layout.pages_per_checkpoint or len(np.unique(pages)) != len(pages):
            raise ValueError(f"{record}: a file is {self.layout.pages_per_checkpoint} different pages")

    def _distinct(self, plan: StepPlan) -> None:
        slots = [row.slot for row in plan.rows] + [only.slot for only in plan.sample_only]
        if len(set(slots)) != len(slots):
            raise ValueError(f"step {plan.step}: a slot is in more than one row or sample_only: {sorted(slots)}")
