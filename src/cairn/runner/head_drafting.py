"""Drafts of the model's own head, for the verify rows that a plan leaves to it.

They are made when the plan's states have been moved and its pages are there, right before the pass that verifies them:
the first one of a sequence from the hidden state in its slot and its newest token, each further one from what the head
has made of the last. What they leave as the head's keys and values the pass writes over, from hidden states of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.kernels.batch import Batch, HostBatch
from cairn.kernels.graphs import StepGraphs
from cairn.kernels.staging import Staging
from cairn.layers.memory import Memory
from cairn.layers.model import Model
from cairn.runner.batch_builder import SlotTensors
from cairn.runner.input_batch import InputBatch
from cairn.runner.vision import VisionEncoder, mrope_positions
from cairn.step import VerifyRow

_NOTHING = np.zeros(0, np.int32)
_FIELDS = 7


@dataclass(slots=True)
class _Pass:
    """A pass of the head over so many sequences. `replay`: None before it was recorded."""

    metadata: object
    run: Callable[[], None]
    replay: Callable[[], None] | None = None


class HeadDrafter:
    """Drafts with the head of a model that has one. `memory`: of a pass without snapshots. `vision`: None where no
    images are read.

    `tokens` int64 [slots + 1] and `hidden` [slots + 1, hidden]: in their first entries the last draft of each row at
    hand, and what the head has made of the token before it.
    """

    def __init__(
        self, model: Model, memory: Memory, inputs: InputBatch, slot_tensors: SlotTensors, vision: VisionEncoder | None
    ) -> None:
        self._model, self._memory, self._inputs, self._slot_tensors = model, memory, inputs, slot_tensors
        self._vision = vision
        self.hidden = torch.zeros_like(memory.hidden)
        self.tokens = self.hidden.new_zeros(len(self.hidden), dtype=torch.int64)
        # three positions; of each sequence slot, seq_start, seq_len and kv_write_from
        self._rows = self.tokens.new_zeros(_FIELDS, len(self.hidden), dtype=torch.int32)
        self._recorder: StepGraphs | None = None
        self._passes: dict[int, _Pass] = {}
        self._max_model_len = 0

    def record(self, graphs: StepGraphs, max_model_len: int) -> None:
        """From now on passes are recorded, those of any number of rows when they come for the second time."""
        self._recorder, self._max_model_len = graphs, max_model_len

    def release(self) -> None:
        """Forget what is recorded."""
        self._recorder, self._passes = None, {}

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
        counts, device = [len(row.tokens) - 1 for row in rows], self.tokens.device
        firsts = torch.tensor([[row.slot, int(row.tokens[0])] for row in rows], device=device)
        self.hidden[: len(rows)] = self._memory.hidden.index_select(0, firsts[:, 0])
        self.tokens[: len(rows)] = firsts[:, 1]
        columns = list[Tensor]()
        for depth in range(counts[0]):
            num_seqs = sum(count > depth for count in counts)
            self.advance(rows[:num_seqs], depth)
            columns.append(self.tokens[:num_seqs].clone())
        drafts = [column.tolist() for column in columns]
        return [np.array([column[row] for column in drafts[:count]], np.int64) for row, count in enumerate(counts)]

    def advance(self, rows: Sequence[VerifyRow], depth: int) -> None:
        """Take `tokens` and `hidden` on by draft number `depth` of each row."""
        host = self._host_batch(rows, depth)
        columns = [*self._positions(rows, host.seq_starts), host.slots, host.seq_starts, host.seq_lens]
        numbers = np.array([*columns, host.kv_write_from], np.int32)
        self._rows[:, : len(rows)] = torch.from_numpy(numbers).to(self._rows.device)
        recorder, first_time = self._recorder, len(rows) not in self._passes
        if recorder is None:
            self._make_pass(host).run()
            return
        if first_time:
            self._passes[len(rows)] = self._make_pass(HostBatch.captured(len(rows), self._max_model_len))
        head_pass = self._passes[len(rows)]
        recorder.set_lengths(head_pass.metadata, host)
        if head_pass.replay is not None:
            head_pass.replay()
        elif first_time:
            head_pass.run()  # compiles, and fills caches
        else:
            head_pass.replay = recorder.capture(head_pass.run)

    def _make_pass(self, host: HostBatch) -> _Pass:
        staging = Staging()
        metadata, cu_seqlens = self._model.kernels.build_metadata(host, staging), staging.add(host.cu_seqlens)
        staging.send(self._model.spec.device)
        return _Pass(metadata, partial(self._run, host, cu_seqlens.tensor, metadata))

    def _run(self, host: HostBatch, cu_seqlens: Tensor, metadata: object) -> None:
        """What is recorded."""
        num_seqs = host.num_seqs
        rows = self._rows[:, :num_seqs]
        batch = Batch(
            tokens=self.tokens[:num_seqs],
            positions=rows[:3].long(),
            cu_seqlens=cu_seqlens,
            slots=rows[3],
            state_slots=rows[3],
            seq_starts=rows[4],
            seq_lens=rows[5],
            kv_write_from=rows[6],
            block_tables=self._slot_tensors.block_tables,
            host=host,
            metadata=metadata,
        )
        hidden = self._model.draft(batch, self.hidden[:num_seqs], self._memory)
        self.hidden[:num_seqs] = hidden
        self.tokens[:num_seqs] = self._model.logits(hidden).argmax(-1)

    def _host_batch(self, rows: Sequence[VerifyRow], depth: int) -> HostBatch:
        """Token number `depth` of each row, as a decode of its own."""
        starts = np.array([row.start + depth for row in rows], np.int32)
        return HostBatch(
            num_decodes=len(rows),
            cu_seqlens=np.arange(len(rows) + 1, dtype=np.int32),
            slots=np.array([row.slot for row in rows], np.int32),
            seq_starts=starts,
            seq_lens=starts + 1,
            kv_write_from=np.array([row.kv_write_from for row in rows], np.int32),
            snapshot_seqs=_NOTHING,
            snapshot_offsets=_NOTHING,
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
