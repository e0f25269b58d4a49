"""Drafts of the model's own head, for the verify rows that a plan leaves to it.

They are made when the plan's states have been moved and its pages are there, right before the pass that verifies them:
the first one of a sequence from the hidden state in its slot and its newest token, each further one from what the head
has made of the last. What they leave as the head's keys and values the pass writes over, from hidden states of its own.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.kernels.batch import Batch, HostBatch
from cairn.kernels.staging import Staging
from cairn.layers.memory import Memory
from cairn.layers.model import Model
from cairn.runner.batch_builder import SlotTensors
from cairn.runner.input_batch import InputBatch
from cairn.runner.vision import VisionEncoder, mrope_positions
from cairn.step import VerifyRow

_NOTHING = np.zeros(0, np.int32)


class HeadDrafter:
    """Drafts with the head of a model that has one. `memory`: of a pass without snapshots. `vision`: None where no
    images are read."""

    def __init__(
        self, model: Model, memory: Memory, inputs: InputBatch, slot_tensors: SlotTensors, vision: VisionEncoder | None
    ) -> None:
        self._model, self._memory, self._inputs, self._slot_tensors = model, memory, inputs, slot_tensors
        self._vision = vision

    def draft(self, verifies: Sequence[VerifyRow]) -> tuple[VerifyRow, ...]:
        """The same rows, with drafts where there were none yet: at each place the token that the head holds for the
        likeliest."""
        rows = sorted((row for row in verifies if row.is_open), key=lambda row: -len(row.tokens))
        drafts = dict(zip((row.slot for row in rows), self._draft(rows), strict=True)) if rows else {}
        return tuple(
            replace(row, tokens=np.concatenate([row.tokens[:1], drafts[row.slot]])) if row.slot in drafts else row
            for row in verifies
        )

    def _draft(self, rows: Sequence[VerifyRow]) -> list[NDArray[np.int64]]:
        """Of each row, of which the longest come first."""
        device, counts = self._model.spec.device, np.array([len(row.tokens) - 1 for row in rows])
        tokens = torch.from_numpy(np.array([row.tokens[0] for row in rows], np.int64)).to(device)
        slots = torch.tensor([row.slot for row in rows], device=device)
        hidden, found = self._memory.hidden.index_select(0, slots), list[Tensor]()
        for depth in range(int(counts[0])):
            num_rows = int(np.count_nonzero(counts > depth))
            batch = self._batch(rows[:num_rows], depth, tokens[:num_rows])
            hidden = self._model.draft(batch, hidden[:num_rows], self._memory)
            tokens = self.choose(hidden, rows[:num_rows], depth)
            found.append(tokens)
        columns = [column.cpu().numpy() for column in found]
        return [np.array([column[row] for column in columns[:count]], np.int64) for row, count in enumerate(counts)]

    def choose(self, hidden: Tensor, rows: Sequence[VerifyRow], depth: int) -> Tensor:
        """The draft number `depth` of each row, int64 [rows], from the head's hidden states [rows, hidden]."""
        return self._model.logits(hidden).argmax(-1)

    def _batch(self, rows: Sequence[VerifyRow], depth: int, tokens: Tensor) -> Batch:
        """Token number `depth` of each row, as a decode of its own."""
        starts = np.array([row.start + depth for row in rows], np.int32)
        slots = np.array([row.slot for row in rows], np.int32)
        write_from = np.array([row.kv_write_from for row in rows], np.int32)
        host = HostBatch(
            num_decodes=len(rows),
            cu_seqlens=np.arange(len(rows) + 1, dtype=np.int32),
            slots=slots,
            seq_starts=starts,
            seq_lens=starts + 1,
            kv_write_from=write_from,
            snapshot_seqs=_NOTHING,
            snapshot_offsets=_NOTHING,
        )
        staging = Staging()
        positions = staging.add(self._positions(rows, starts))
        lengths = [staging.add(array) for array in (host.cu_seqlens, slots, starts, host.seq_lens, write_from)]
        metadata = self._model.kernels.build_metadata(host, staging)
        staging.send(self._model.spec.device)
        cu_seqlens, slot_numbers, seq_starts, seq_lens, kv_write_from = (each.tensor for each in lengths)
        return Batch(
            tokens=tokens,
            positions=positions.tensor,
            cu_seqlens=cu_seqlens,
            slots=slot_numbers,
            state_slots=slot_numbers,
            seq_starts=seq_starts,
            seq_lens=seq_lens,
            kv_write_from=kv_write_from,
            block_tables=self._slot_tensors.block_tables,
            host=host,
            metadata=metadata,
        )

    def _positions(self, rows: Sequence[VerifyRow], starts: NDArray[np.int32]) -> NDArray[np.int64]:
        """Of the head's entries, int64 [3, rows]: one after the token before each."""
        positions = np.tile(starts.astype(np.int64), (3, 1))
        if self._vision is not None and self._inputs.image_slots:
            for column, (row, start) in enumerate(zip(rows, starts.tolist(), strict=True)):
                images = self._inputs.admit(row.slot).images
                if images:
                    before = mrope_positions(start - 1, start, images, self._vision.merge)
                    positions[:, column] = before[:, 0] + 1
        return positions
