"""The requests in the runner's slots: what their admits said, and the tokens sampled since. Numpy alone, no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cairn.cache.layout import CacheLayout
from cairn.kernels.sampling.metadata import SamplingMetadata
from cairn.keys import KeyBuffer
from cairn.step import SAMPLED, Admit, DecodeRows, StepPlan, TokenMask, TokenMasks, VerifiedTokens
from cairn.types import Keys

TABLE_ENTRY_BYTES = 8 + 4
"""What an entry of `block_table_updates` takes of a step's copy to the device: an index and a page."""


@dataclass(slots=True, eq=False)
class _SlotState:
    admit: Admit
    history: KeyBuffer | None


class InputBatch:
    """The admit of each slot, until the slot's next one. `image_slots`: slots whose prompts have images. `num_admits`:
    so many there were."""

    def __init__(self, num_slots: int) -> None:
        self.image_slots: set[int] = set()
        self.num_admits = 0
        self._slots: dict[int, _SlotState] = {}
        self._with_history: set[int] = set()
        # of the newest sampled token, or of the one that an uncollected step samples
        self._sampled_positions = np.full(num_slots, -1, np.int64)

    def update(self, plan: StepPlan) -> bool:
        """Apply the admits and samples of a plan that is launched. Whether a row of it continues with a token that was
        sampled; raises LookupError where that is another than the newest one of the row's slot."""
        self.num_admits += len(plan.admits)
        for admit in plan.admits:
            history = None if admit.history is None else KeyBuffer(admit.history)
            self._slots[admit.slot] = _SlotState(admit, history)
            self._sampled_positions[admit.slot] = -1
            (self.image_slots.add if admit.images else self.image_slots.discard)(admit.slot)
            (self._with_history.add if admit.history is not None else self._with_history.discard)(admit.slot)
        decodes, samples = plan.decodes, plan.samples
        continues = decodes.continues
        if continues:
            self._check_continued(decodes)
        self._sampled_positions[samples.slots] = samples.positions
        return continues

    def _check_continued(self, decodes: DecodeRows) -> None:
        sampled = self._sampled_positions[decodes.slots]
        wrong = (decodes.tokens == SAMPLED) & (sampled != decodes.positions)
        if wrong.any():
            slot, position, last = (int(column[wrong][0]) for column in (decodes.slots, decodes.positions, sampled))
            self._slot(slot)
            raise LookupError(f"slot {slot} continues at {position}, but its last token was sampled for {last}")

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
            mask = masks.get(slot)
            assert mask is None or isinstance(mask, np.ndarray), f"slot {slot}: several masks for one sample"
            yield self.metadata_of(slot, position, mask, bans)

    def metadata_of(
        self, slot: int, position: int, mask: TokenMask | None, bans_stop_tokens: bool, sampled: Sequence[int] = ()
    ) -> SamplingMetadata:
        """Of the token at `position`. `sampled`: those right before it that the step at hand has sampled itself. Raises
        as `sampling_metadata`."""
        state = self._slot(slot)
        admit, history = state.admit, None if state.history is None else state.history.keys
        if history is not None:
            if len(history) + len(sampled) != position:
                raise LookupError(f"slot {slot}: {len(history)} tokens are known of the {position} before the sample")
            if sampled:
                history = np.concatenate([history, np.array(sampled, np.int64)])
        return SamplingMetadata(
            admit.sampling,
            position,
            allowed_mask=mask,
            banned_tokens=admit.stop_token_ids if bans_stop_tokens else (),
            history=history,
            num_prompt_tokens=admit.num_prompt_tokens if history is not None else 0,
            logprobs=admit.logprobs,
        )

    def append_verified(self, verified: Sequence[VerifiedTokens]) -> None:
        """As `append`, of the tokens after verify rows."""
        for each in verified:
            self.append(np.full(len(each.tokens), each.slot, np.int32), np.array(each.tokens, np.int64))

    def append(self, slots: NDArray[np.int32], tokens: Keys) -> None:
        """Append the tokens of a step to the histories, in the order of the steps."""
        if not self._with_history:
            return
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            history = self._slot(slot).history
            if history is not None:
                history.append(token)

    def _slot(self, slot: int) -> _SlotState:
        state = self._slots.get(slot)
        if state is None:
            raise LookupError(f"nobody was admitted to slot {slot}")
        return state


def pages_of_table(layout: CacheLayout, num_pages: int, max_model_len: int | None = None) -> int:
    """The most entries of a sequence in one group: as many as the longest sequence needs, and no more than there are
    pages, as they are distinct; of a group of limited reach also those of pages that it has let go of."""
    sizes = [group.tokens_per_page for group in layout.groups if group.reach is None]
    longest = num_pages * max(sizes, default=layout.block_size) if max_model_len is None else max_model_len
    entries = [
        group.pages_for(longest) if group.reach is not None else min(num_pages, group.pages_for(longest))
        for group in layout.groups
    ]
    return max(entries, default=num_pages if max_model_len is None else 0)


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
        group_updates = [update for update in plan.table_updates if update.group == group]
        for update in group_updates:
            _check_width(update.slot, update.first + len(update.pages), max_pages)
        if group_updates:
            begins = np.array([update.slot * max_pages + update.first for update in group_updates])
            lengths = np.array([len(update.pages) for update in group_updates])
            if len(begins) < (num_pages := lengths.sum()):  # decodes get one page at a time
                begins = np.repeat(begins - lengths.cumsum() + lengths, lengths) + np.arange(num_pages)
            indices.append(begins)
            pages += [update.pages for update in group_updates]
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
