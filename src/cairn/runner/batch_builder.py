"""Rows of a plan -> one flattened batch (see `cairn.kernels.batch`). Numpy until the step's one copy to the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.kernels.batch import Batch, HostBatch, Vectors
from cairn.kernels.contract import Kernels
from cairn.kernels.staging import Staged, Staging
from cairn.runner.slot_arrays import SlotArrays
from cairn.step import SAMPLED, Snapshot, StepPlan

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowContent:
    """What a plan row has besides text: `positions` int64 [3, tokens] of all its tokens, and at `offsets` int64 [k]
    from its first one `vectors` [k, hidden] instead of embeddings."""

    positions: Ints
    offsets: Ints
    vectors: Tensor


def host_batch(plan: StepPlan, snapshots: Sequence[Snapshot]) -> HostBatch:
    """The lengths of a plan's rows. `snapshots`: the plan's, in the order of their rows and positions."""
    decodes, prefills = plan.decodes, plan.prefills
    starts = np.array([row.start for row in prefills], np.int32)
    lengths = np.array([len(row.tokens) for row in prefills], np.int32)
    ends = np.concatenate([decodes.positions + 1, starts + lengths])
    seq_starts = np.concatenate([decodes.positions, starts])
    rows = np.array([snapshot.row for snapshot in snapshots], np.int32)
    return HostBatch(
        num_decodes=len(decodes),
        cu_seqlens=np.concatenate([[0], np.cumsum(ends - seq_starts)]).astype(np.int32),
        slots=np.concatenate([decodes.slots, np.array([row.slot for row in prefills], np.int32)]),
        seq_starts=seq_starts,
        seq_lens=ends,
        kv_write_from=np.concatenate(
            [decodes.kv_write_from, np.array([row.kv_write_from for row in prefills], np.int32)]
        ),
        snapshot_rows=rows,
        snapshot_offsets=np.array([snapshot.position for snapshot in snapshots], np.int32) - seq_starts[rows],
    )


def snapshot_order(plan: StepPlan) -> list[int]:
    """Numbers of the plan's snapshots, by row and position."""
    return sorted(
        range(len(plan.snapshots)), key=lambda number: (plan.snapshots[number].row, plan.snapshots[number].position)
    )


class BatchBuilder:
    """One plan's batch on its way to the device: made, then sent with the rest of the step, then `batch`.

    `snapshots`: the plan's, in the batch's order.
    """

    def __init__(
        self, plan: StepPlan, contents: Sequence[RowContent | None], kernels: Kernels, staging: Staging
    ) -> None:
        """`contents`: what stands for the tokens below 0 of each prefill row or decode row, in this order of rows, and
        where all of them stand; None for a row of text alone."""
        self.snapshots = [plan.snapshots[number] for number in snapshot_order(plan)]
        host = self.host = host_batch(plan, self.snapshots)
        tokens = np.concatenate([plan.decodes.tokens, *(row.tokens for row in plan.prefills)])
        sampled = np.flatnonzero(plan.decodes.tokens == SAMPLED)
        first = host.cu_seqlens[:-1]
        positions = np.empty((3, host.num_rows), np.int64)
        positions[:] = np.arange(host.num_rows) + np.repeat(host.seq_starts - first, np.diff(host.cu_seqlens))
        vectors = []
        for begin, content in zip(first.tolist(), contents, strict=True):
            if content is not None:
                positions[:, begin : begin + content.positions.shape[1]] = content.positions
                vectors.append((content.offsets + begin, content.vectors))
        self._vectors = [values for _, values in vectors]
        self._vector_rows = staging.add(np.concatenate([np.zeros(0, np.int64), *(rows for rows, _ in vectors)]))
        self._tokens, self._positions = staging.add(np.maximum(tokens, 0)), staging.add(positions)
        self._sampled_rows = staging.add(sampled)
        self._sampled_slots = staging.add(plan.decodes.slots[sampled].astype(np.int64))
        self._lengths: list[Staged] = [
            staging.add(array)
            for array in (host.cu_seqlens, host.slots, host.seq_starts, host.seq_lens, host.kv_write_from)
        ]
        self._metadata = kernels.prepare(host, staging)

    def batch(self, slot_arrays: SlotArrays) -> Batch:
        """After the staging was sent."""
        tokens, state_slots = self._tokens.tensor, self._lengths[1].tensor
        if len(self._sampled_rows.array):
            rows, of_rows = self._sampled_rows.tensor, self._sampled_slots.tensor
            tokens[rows] = slot_arrays.last_tokens[of_rows]
            state_slots = slot_arrays.state_slots(state_slots, rows, of_rows)
        vectors = None
        if len(self._vector_rows.array):
            vectors = Vectors(self._vector_rows.tensor, torch.cat(self._vectors))
        cu_seqlens, slots, seq_starts, seq_lens, kv_write_from = (staged.tensor for staged in self._lengths)
        return Batch(
            tokens=tokens,
            positions=self._positions.tensor,
            cu_seqlens=cu_seqlens,
            slots=slots,
            state_slots=state_slots,
            seq_starts=seq_starts,
            seq_lens=seq_lens,
            kv_write_from=kv_write_from,
            block_tables=slot_arrays.tables,
            host=self.host,
            metadata=self._metadata,
            vectors=vectors,
        )
