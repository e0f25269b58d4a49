"""The block tables of all slots, kept up by what plans say has changed."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cairn.cache.layout import AttentionGroup
from cairn.step import StepPlan
from cairn.types import Pages


class BlockTables:
    """`tables`: per attention group int32 [num_slots + 1, max_pages]; the last row is no request's.

    The page of the token at position p is entry p // tokens_per_page of its slot's row. Nothing is cleared: entries at
    and behind the pages of the sequence may be those of a request that had the slot before.
    """

    def __init__(self, groups: Sequence[AttentionGroup], num_slots: int, max_pages: int) -> None:
        self._groups, self._max_pages = tuple(groups), max_pages
        self.tables = tuple(np.zeros((num_slots + 1, max_pages), np.int32) for _ in groups)

    def apply(self, plan: StepPlan) -> None:
        """Take in the plan's admits and table updates."""
        for table, (places, pages) in zip(
            self.tables, table_entries(plan, len(self.tables), self._max_pages), strict=True
        ):
            table.reshape(-1)[places] = pages

    def pages_of(self, slot: int, num_tokens: int) -> tuple[Pages, ...]:
        """Per group the pages of the first `num_tokens` tokens in `slot`: views."""
        return tuple(
            table[slot, : group.pages_for(num_tokens)] for group, table in zip(self._groups, self.tables, strict=True)
        )


def table_entries(plan: StepPlan, num_groups: int, max_pages: int) -> list[tuple[NDArray[np.int64], NDArray[np.int32]]]:
    """What a plan's admits and table updates write: per group the places in a flattened table of `max_pages` columns,
    each once, and their pages, both of shape [n]."""
    found: list[tuple[NDArray[np.int64], NDArray[np.int32]]] = []
    for group in range(num_groups):
        places, pages = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        for admit in plan.admits:
            own = admit.tables[group]
            places.append(admit.slot * max_pages + np.arange(len(own)))
            pages.append(own)
        for update in plan.table_updates:
            if update.group == group:
                places.append(update.slot * max_pages + update.first + np.arange(len(update.pages)))
                pages.append(update.pages)
        at, entries = np.concatenate(places), np.concatenate(pages)
        if plan.admits and plan.table_updates:
            # An update may follow an admit of the same plan: the later one counts, in whatever order a device writes.
            at, last = np.unique(at[::-1], return_index=True)
            entries = entries[::-1][last]
        found.append((at, entries))
    return found
