"""Rows of a plan to one flattened batch (see `cairn.kernels.batch`), and the tensors of the slots that a batch refers
to. Numpy until the step's one copy to the device."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.batch import Batch, HostBatch, MultimodalEmbeddings
from cairn.kernels.contract import Kernels
from cairn.kernels.staging import StagedArray, Staging
from cairn.runner.input_batch import block_table_updates
from cairn.runner.vision import MultimodalInputs
from cairn.step import SAMPLED, Admit, Snapshot, StepPlan

_MIN_STOP_TOKENS = 8
"""Columns for the stop tokens of each slot at first."""


class SlotTensors:
    """Block tables, last tokens and stop tokens of all slots, on the device; the last row is no request's.

    `block_tables`: int32 [num_slots + 1, max_pages] per attention group. `last_tokens`: int64 [num_slots + 1], the
    newest sampled token. Nothing is cleared: entries behind the pages of a sequence may be an earlier request's.
    """

    def __init__(self, num_groups: int, num_slots: int, max_pages: int, device: torch.device) -> None:
        shape = (num_slots + 1, max_pages)
        self.block_tables = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(num_groups)]
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._max_pages = max_pages
        self._stop_tokens = torch.full((num_slots + 1, _MIN_STOP_TOKENS), -1, dtype=torch.int64, device=device)
        self._stopped = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)

    def stage_updates(self, plan: StepPlan, staging: Staging) -> Callable[[], None]:
        """Stage the plan's admits and table updates. Returns what writes them, to be called after `staging.send`."""
        if not plan.admits and not plan.table_updates:
            return lambda: None
        updates = block_table_updates(plan, len(self.block_tables), self._max_pages)
        entries = [
            (table.view(-1), staging.add(indices), staging.add(pages))
            for table, (indices, pages) in zip(self.block_tables, updates, strict=True)
        ]
        write_stop_tokens = self._stage_stop_tokens(plan.admits, staging) if plan.admits else None

        def write() -> None:
            for table, indices, pages in entries:
                table.index_copy_(0, indices.tensor, pages.tensor)
            if write_stop_tokens is not None:
                write_stop_tokens()

        return write

    def _stage_stop_tokens(self, admits: Sequence[Admit], staging: Staging) -> Callable[[], None]:
        width = max(self._stop_tokens.shape[1], *(len(admit.stop_token_ids) for admit in admits))
        stop_tokens = np.full((len(admits), width), -1, np.int64)
        for row, admit in zip(stop_tokens, admits, strict=True):
            row[: len(admit.stop_token_ids)] = admit.stop_token_ids
        slots, tokens = staging.add(np.array([admit.slot for admit in admits])), staging.add(stop_tokens)

        def write() -> None:
            if width > self._stop_tokens.shape[1]:
                wider = self._stop_tokens.new_full((len(self._stopped), width), -1)
                wider[:, : self._stop_tokens.shape[1]] = self._stop_tokens
                self._stop_tokens = wider
            self._stop_tokens[slots.tensor] = tokens.tensor
            self._stopped[slots.tensor] = False

        return write

    def state_slots(self, slots: Tensor, rows: Tensor, sampled_slots: Tensor) -> Tensor:
        """The slots whose states the rows of a batch read and write, int32 [B] like `slots`: `slots` itself, but the
        last one, which is no request's, for a row that continues with a stop token. So the state of a sequence that has
        stopped stays as it was before its stop token. `rows`: those that continue with the newest sampled token of
        their slots `sampled_slots`."""
        is_stop_token = (self._stop_tokens[sampled_slots] == self.last_tokens[sampled_slots, None]).any(1)
        stopped = is_stop_token | self._stopped[sampled_slots]
        self._stopped[sampled_slots] = stopped
        found = slots.clone()
        found[rows] = torch.where(stopped, len(self._stopped) - 1, sampled_slots).int()
        return found


def host_batch(plan: StepPlan, snapshots: Sequence[Snapshot]) -> HostBatch:
    """The lengths of a plan's rows, decode rows first. `snapshots`: the plan's, by row and position."""
    decodes = plan.decodes
    slots, starts, write_from = decodes.slots, decodes.positions, decodes.kv_write_from
    ends, num_decodes = starts + 1, len(decodes)
    if plan.prefills:
        rows = [(row.slot, row.start, row.kv_write_from, row.end) for row in plan.prefills]
        columns = zip((slots, starts, write_from, ends), np.array(rows, np.int32).T, strict=True)
        slots, starts, write_from, ends = (np.concatenate(column) for column in columns)
    cu_seqlens = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(ends - starts, out=cu_seqlens[1:])
    snapshot_points = [(snapshot.row, snapshot.position) for snapshot in snapshots]
    snapshot_rows, positions = np.array(snapshot_points, np.int32).reshape(-1, 2).T.copy()
    return HostBatch(
        num_decodes=num_decodes,
        cu_seqlens=cu_seqlens,
        slots=slots,
        seq_starts=starts,
        seq_lens=ends,
        kv_write_from=write_from,
        snapshot_rows=snapshot_rows,
        snapshot_offsets=positions - starts[snapshot_rows],
    )


class BatchBuilder:
    """Stages one plan's batch; `batch` returns it once the staging has been sent. `host`: the batch's lengths.
    `snapshots`: the plan's, by row and position, as the model writes them."""

    def __init__(
        self, plan: StepPlan, inputs: Sequence[MultimodalInputs | None], kernels: Kernels, staging: Staging
    ) -> None:
        """`inputs`: of each row, decode rows first; None for a row of text alone."""
        self.snapshots = sorted(plan.snapshots, key=lambda snapshot: (snapshot.row, snapshot.position))
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
        self._vectors, vector_rows = list[Tensor](), []
        for begin, row in zip(first.tolist() if any(inputs) else (), inputs, strict=False):
            if row is not None:
                positions[:, begin : begin + row.positions.shape[1]] = row.positions
                if len(row.offsets):
                    self._vectors.append(row.vectors)
                    vector_rows.append(row.offsets + begin)
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

    def batch(self, slot_tensors: SlotTensors) -> Batch:
        """The batch, after the staging was sent. Rows that continue with a sampled token take it from the device."""
        tokens, state_slots = self._tokens.tensor, self._lengths[1].tensor
        if self._sampled is not None:
            rows, sampled_slots = (staged.tensor for staged in self._sampled)
            tokens[rows] = slot_tensors.last_tokens[sampled_slots]
            state_slots = slot_tensors.state_slots(state_slots, rows, sampled_slots)
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
            block_tables=slot_tensors.block_tables,
            host=self.host,
            metadata=self._metadata,
            multimodal_embeddings=embeddings,
        )
