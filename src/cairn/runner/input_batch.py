"""The requests in the runner's slots: what their admits said, and the tokens sampled since. Numpy alone, no torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.sampling.metadata import SamplingMetadata
from cairn.keys import KeyBuffer
from cairn.step import SAMPLED, Admit, SampledToken, StepPlan, TokenMasks

TABLE_ENTRY_BYTES = 8 + 4
"""What an entry of `block_table_updates` takes of a step's copy to the device: an index and a page."""


@dataclass(slots=True, eq=False)
class _SlotState:
    """`sampled_position`: of the newest sampled token, or of the one that an uncollected step samples."""

    admit: Admit
    history: KeyBuffer | None
    sampled_position: int | None = None


class InputBatch:
    """The admit of each slot, until the slot's next one. `image_slots`: slots whose prompts have images. `num_admits`:
    so many there were."""

    def __init__(self) -> None:
        self.image_slots: set[int] = set()
        self.num_admits = 0
        self._slots: dict[int, _SlotState] = {}

    def update(self, plan: StepPlan) -> None:
        """Apply the admits and samples of a plan that is launched. Raises LookupError for a row that continues with a
        token other than the newest one of its slot."""
        self.num_admits += len(plan.admits)
        for admit in plan.admits:
            history = None if admit.history is None else KeyBuffer(admit.history)
            self._slots[admit.slot] = _SlotState(admit, history)
            (self.image_slots.add if admit.images else self.image_slots.discard)(admit.slot)
        for row in np.flatnonzero(plan.decodes.tokens == SAMPLED):
            slot, position = int(plan.decodes.slots[row]), int(plan.decodes.positions[row])
            if (sampled := self._slot(slot).sampled_position) != position:
                raise LookupError(f"slot {slot} continues at {position}, but its last token was sampled for {sampled}")
        for slot, position in zip(plan.samples.slots.tolist(), plan.samples.positions.tolist(), strict=True):
            self._slot(slot).sampled_position = position

    def admit(self, slot: int) -> Admit:
        """Raises LookupError for a slot without a request."""
        return self._slot(slot).admit

    def sampling_metadata(self, plan: StepPlan, masks: TokenMasks) -> Iterator[SamplingMetadata]:
        """One record for each sample of the plan. Raises LookupError where a history is incomplete: then a step before
        the plan's has not been collected."""
        columns = plan.samples
        for slot, position, bans in zip(
            columns.slots.tolist(), columns.positions.tolist(), columns.bans_stop_tokens.tolist(), strict=True
        ):
            state = self._slot(slot)
            admit, history = state.admit, None if state.history is None else state.history.keys
            if history is not None and len(history) != position:
                raise LookupError(f"slot {slot}: {len(history)} tokens are known of the {position} before the sample")
            yield SamplingMetadata(
                admit.sampling,
                position,
                allowed_mask=masks.get(slot),
                banned_tokens=admit.stop_token_ids if bans else (),
                history=history,
                num_prompt_tokens=admit.num_prompt_tokens if history is not None else 0,
                logprobs=admit.logprobs,
            )

    def append(self, sampled: Iterable[SampledToken]) -> None:
        """Append the tokens of a step to the histories, in the order of the steps."""
        for token in sampled:
            history = self._slot(token.slot).history
            if history is not None:
                history.append(token.token)

    def _slot(self, slot: int) -> _SlotState:
        state = self._slots.get(slot)
        if state is None:
            raise LookupError(f"nobody was admitted to slot {slot}")
        return state


def block_table_updates(
    plan: StepPlan, num_groups: int, max_pages: int
) -> list[tuple[NDArray[np.int64], NDArray[np.int32]]]:
    """What a plan's admits and table updates write into the block tables: per attention group the indices into a
    flattened table of `max_pages` columns, each once, and the pages to write there, both of shape [n].
    Raises ValueError for a sequence of more pages: they would be the next slot's."""
    updates: list[tuple[NDArray[np.int64], NDArray[np.int32]]] = []
    for group in range(num_groups):
        indices, pages = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        for admit in plan.admits:
            table = admit.tables[group]
            _check_width(admit.slot, len(table), max_pages)
            indices.append(admit.slot * max_pages + np.arange(len(table)))
            pages.append(table)
        for update in plan.table_updates:
            if update.group == group:
                _check_width(update.slot, update.first + len(update.pages), max_pages)
                indices.append(update.slot * max_pages + update.first + np.arange(len(update.pages)))
                pages.append(update.pages)
        index, values = np.concatenate(indices), np.concatenate(pages)
        if plan.admits and plan.table_updates:
            # An update may follow an admit of the same plan: the later one counts, in whatever order a device writes.
            index, last = np.unique(index[::-1], return_index=True)
            values = values[::-1][last]
        updates.append((index, values))
    return updates


def _check_width(slot: int, num_pages: int, max_pages: int) -> None:
    if num_pages > max_pages:
        raise ValueError(f"slot {slot}: {num_pages} pages, and its block table has room for {max_pages}")
