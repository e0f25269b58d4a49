"""Rows of a plan -> one flattened batch (see `cairn.kernels.batch`). Numpy until the step's one copy to the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.kernels.batch import Batch, HostBatch, MultimodalEmbeddings
from cairn.kernels.contract import Kernels
from cairn.kernels.staging import StagedArray, Staging
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
    decodes = plan.decodes
    slots, starts, write_from = decodes.slots, decodes.positions, decodes.kv_write_from
    ends, num_decodes = starts + 1, len(decodes)
    if plan.prefills:
        rows = [(row.slot, row.start, row.kv_write_from, row.end) for row in plan.prefills]
        columns = zip((slots, starts, write_from, ends), np.array(rows, np.int32).T, strict=True)
        slots, starts, write_from, ends = (np.concatenate(column) for column in columns)
    cu_seqlens = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(ends - starts, out=cu_seqlens[1:])
    places = [(snapshot.row, snapshot.position) for snapshot in snapshots]
    snapshot_rows, ends_at = np.array(places, np.int32).reshape(-1, 2).T.copy()
    return HostBatch(
        num_decodes=num_decodes,
        cu_seqlens=cu_seqlens,
        slots=slots,
        seq_starts=starts,
        seq_lens=ends,
        kv_write_from=write_from,
        snapshot_rows=snapshot_rows,
        snapshot_offsets=ends_at - starts[snapshot_rows],
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
        tokens = plan.decodes.tokens
        if plan.prefills:
            tokens = np.concatenate([tokens, *(row.tokens for row in plan.prefills)])
        sampled = np.flatnonzero(plan.decodes.tokens == SAMPLED)
        first = host.cu_seqlens[:-1]
        positions = np.empty((3, host.num_rows), np.int64)
        if plan.prefills:
            positions[:] = np.arange(host.num_rows) + np.repeat(host.seq_starts - first, np.diff(host.cu_seqlens))
        else:
            positions[:] = host.seq_starts
        self._vectors, vector_rows = list[Tensor](), list[Ints]()
        for begin, content in zip(first.tolist() if any(contents) else (), contents, strict=False):
            if content is not None:
                positions[:, begin : begin + content.positions.shape[1]] = content.positions
                if len(content.offsets):
                    self._vectors.append(content.vectors)
                    vector_rows.append(content.offsets + begin)
        self._vector_rows = staging.add(np.concatenate(vector_rows)) if vector_rows else None
        self._tokens, self._positions = staging.add(np.maximum(tokens, 0)), staging.add(positions)
        self._sampled = None
        if len(sampled):
            self._sampled = staging.add(sampled), staging.add(plan.decodes.slots[sampled].astype(np.int64))
        self._lengths: list[StagedArray] = [
            staging.add(array)
            for array in (host.cu_seqlens, host.slots, host.seq_starts, host.seq_lens, host.kv_write_from)
        ]
        self._metadata = kernels.build_metadata(host, staging)

    def batch(self, slot_arrays: SlotArrays) -> Batch:
        """After the staging was sent."""
        tokens, state_slots = self._tokens.tensor, self._lengths[1].tensor
        if self._sampled is not None:
            rows, of_rows = (staged.tensor for staged in self._sampled)
            tokens[rows] = slot_arrays.last_tokens[of_rows]
            state_slots = slot_arrays.state_slots(state_slots, rows, of_rows)
        embeddings = None
        if self._vector_rows is not None:
            embeddings = MultimodalEmbeddings(self._vector_rows.tensor, torch.cat(self._vectors))
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
            multimodal_embeddings=embeddings,
        )
