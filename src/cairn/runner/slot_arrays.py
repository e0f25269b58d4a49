"""What the device knows of the slots beside their states: kept up by what plans say has changed."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.staging import Staging
from cairn.runner.block_tables import table_entries
from cairn.step import StepPlan

_STOP_TOKENS = 8
"""Room for so many in a slot at first."""


class SlotArrays:
    """By slot, and a last one that is nobody's: `tables`, block tables int32 [num_slots + 1, max_pages] per attention
    group, and `last_tokens` int64 [num_slots + 1], what was drawn last. Nothing is cleared: entries at and behind the
    pages of a sequence may be those of a request that had the slot before."""

    def __init__(self, num_groups: int, num_slots: int, max_pages: int, device: torch.device) -> None:
        shape = (num_slots + 1, max_pages)
        self.tables = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(num_groups)]
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._stop_tokens = torch.full((num_slots + 1, _STOP_TOKENS), -1, dtype=torch.int64, device=device)
        self._ended = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)

    def stage(self, plan: StepPlan, staging: Staging) -> Callable[[], None]:
        """What the plan's admits and table updates change, to be called once `staging` has been sent."""
        if not plan.admits and not plan.table_updates:
            return lambda: None
        entries = [
            (table, staging.add(places), staging.add(pages))
            for table, (places, pages) in zip(
                self.tables, table_entries(plan, len(self.tables), self._max_pages), strict=True
            )
        ]
        begin = self._stage_admits(plan, staging) if plan.admits else None

        def write() -> None:
            for table, places, pages in entries:
                table.view(-1).index_copy_(0, places.tensor, pages.tensor)
            if begin is not None:
                begin()

        return write

    def state_slots(self, slots: Tensor, rows: Tensor, of_rows: Tensor) -> Tensor:
        """Where the sequences of a batch in `slots`, int32 [B], have their states: sequences number `rows`, in
        `of_rows`, go on with what was drawn last there, and where that is a stop token they have ended. Then it is
        nobody's slot, so that the sequence's own stays as it was before the stop token."""
        ended = (self._stop_tokens[of_rows] == self.last_tokens[of_rows, None]).any(1) | self._ended[of_rows]
        self._ended[of_rows] = ended
        found = slots.clone()
        found[rows] = torch.where(ended, len(self._ended) - 1, of_rows).int()
        return found

    @property
    def _max_pages(self) -> int:
        return self.tables[0].shape[1] if self.tables else 0

    def _stage_admits(self, plan: StepPlan, staging: Staging) -> Callable[[], None]:
        longest = max(len(admit.stop_token_ids) for admit in plan.admits)
        width = max(longest, self._stop_tokens.shape[1])
        stops = np.full((len(plan.admits), width), -1, np.int64)
        for row, admit in zip(stops, plan.admits, strict=True):
            row[: len(admit.stop_token_ids)] = admit.stop_token_ids
        slots, tokens = staging.add(np.array([admit.slot for admit in plan.admits])), staging.add(stops)

        def begin() -> None:
            if width > self._stop_tokens.shape[1]:
                wider = self._stop_tokens.new_full((len(self._ended), width), -1)
                wider[:, : self._stop_tokens.shape[1]] = self._stop_tokens
                self._stop_tokens = wider
            self._stop_tokens[slots.tensor] = tokens.tensor
            self._ended[slots.tensor] = False

        return begin
