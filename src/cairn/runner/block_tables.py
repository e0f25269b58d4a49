"""The block tables of all slots, kept up by what plans say has changed."""

from collections.abc import Sequence

import numpy as np

from cairn.cache.layout import AttentionGroup
from cairn.step import StepPlan
from cairn.types import Pages


class BlockTables:
    """`tables`: per attention group int32 [num_slots + 1, max_pages]; the last row is no request's.

    The page of the token at position p is entry p // tokens_per_page of its slot's row. Nothing is cleared: entries at
    and behind the pages of the sequence may be those of a request that had the slot before.
    """

    def __init__(self, groups: Sequence[AttentionGroup], num_slots: int, max_pages: int) -> None:
        self._groups = tuple(groups)
        self.tables = tuple(np.zeros((num_slots + 1, max_pages), np.int32) for _ in groups)

    def apply(self, plan: StepPlan) -> None:
        """Take in the plan's admits and table updates."""
        for admit in plan.admits:
            for table, pages in zip(self.tables, admit.tables, strict=True):
                table[admit.slot, : len(pages)] = pages
        for update in plan.table_updates:
            end = update.first + len(update.pages)
            self.tables[update.group][update.slot, update.first : end] = update.pages

    def pages_of(self, slot: int, num_tokens: int) -> tuple[Pages, ...]:
        """Per group the pages of the first `num_tokens` tokens in `slot`: views."""
        return tuple(
            table[slot, : group.pages_for(num_tokens)] for group, table in zip(self._groups, self.tables, strict=True)
        )
