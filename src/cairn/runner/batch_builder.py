"""Rows of a plan to one flattened batch (see `cairn.kernels.batch`), and the tensors of the slots that a batch refers
to. Numpy until the step's one copy to the device."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.kernels.batch import Batch, HostBatch, MultimodalEmbeddings
from cairn.kernels.contract import Kernels
from cairn.kernels.staging import StagedArray, Staging
from cairn.runner.input_batch import block_table_updates
from cairn.runner.vision import MultimodalInputs
from cairn.step import SAMPLED, Admit, Snapshot, StepPlan

_MIN_STOP_TOKENS = 8
"""Columns for the stop tokens of each slot at first."""

MOST_STOP_TOKENS = 128
"""Columns that do for a request's and the model's; then the tensor need not move."""

_ENTRIES = 16
"""Rows of a block table have room for a multiple of so many pages, 64 bytes: kernels are compiled for how operands are
aligned."""


_NOTHING = np.zeros(0, np.int32)


class SlotTensors:
    """Block tables, last tokens and stop tokens of all slots, on the device; the last row is no request's.

    `block_tables`: int32 [num_slots + 1, max_pages or a few more] per attention group. `last_tokens`: int64
    [num_slots + 1], the newest sampled token. Nothing is cleared: entries past the pages of a sequence may be an
    earlier request's.
    `stop_tokens`: int64 [num_slots + 1, columns], -1 after a slot's; another tensor after a request with more of them.
    """

    def __init__(self, num_groups: int, num_slots: int, max_pages: int, device: torch.device) -> None:
        max_pages = -(-max_pages // _ENTRIES) * _ENTRIES
        shape = (num_slots + 1, max_pages)
        self.block_tables = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(num_groups)]
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._max_pages = max_pages
        self.stop_tokens = torch.full((num_slots + 1, _MIN_STOP_TOKENS), -1, dtype=torch.int64, device=device)
        self._stopped = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)

    def advanced(self, slots: Tensor) -> Tensor:
        """Whether the rows of decodes in these slots, int [rows], have taken their sequences further: bool [rows]."""
        return ~self._stopped[slots]

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [*self.block_tables, self.last_tokens, self.stop_tokens, self._stopped]

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
        width = max(self.stop_tokens.shape[1], *(len(admit.stop_token_ids) for admit in admits))
        stop_tokens = np.full((len(admits), width), -1, np.int64)
        for row, admit in zip(stop_tokens, admits, strict=True):
            row[: len(admit.stop_token_ids)] = admit.stop_token_ids
        slots, tokens = staging.add(np.array([admit.slot for admit in admits])), staging.add(stop_tokens)

        def write() -> None:
            self.reserve_stop_tokens(width)
            self.stop_tokens[slots.tensor] = tokens.tensor
            self._stopped[slots.tensor] = False

        return write

    def reserve_stop_tokens(self, width: int) -> None:
        """Make `width` columns for the stop tokens, if there are fewer."""
        if width > self.stop_tokens.shape[1]:
            wider = self.stop_tokens.new_full((len(self._stopped), width), -1)
            wider[:, : self.stop_tokens.shape[1]] = self.stop_tokens
            self.stop_tokens = wider

    def continue_rows(self, tokens: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of decode rows, int64 [rows], and the slots whose states they read and write, int32 [rows].

        `tokens`: as in the plan; for SAMPLED the newest one of the row's slot stands in the result. `slots`: int32, of
        which the results are the same, but the last one, which is no request's, for a row that continues with a stop
        token. So the state of a sequence that has stopped stays as it was before its stop token.
        """
        last_tokens, is_sampled = self.last_tokens[slots], tokens == SAMPLED
        is_stop_token = is_sampled & (self.stop_tokens[slots] == last_tokens[:, None]).any(1)
        stopped = is_stop_token | self._stopped[slots]
        self._stopped[slots] = stopped
        state_slots = slots.masked_fill(is_sampled & stopped, len(self._stopped) - 1)
        return torch.where(is_sampled, last_tokens, tokens), state_slots


def host_batch(plan: StepPlan, snapshots: Sequence[Snapshot]) -> HostBatch:
    """The lengths of a plan's rows, in their order. `snapshots`: the plan's, by row and position."""
    decodes = plan.decodes
    slots, starts, write_from = decodes.slots, decodes.positions, decodes.kv_write_from
    ends, num_decodes = starts + 1, len(decodes)
    cu_seqlens = np.arange(num_decodes + 1, dtype=np.int32)
    if plan.long_rows:
        rows = [(row.slot, row.start, row.kv_write_from, row.end) for row in plan.long_rows]
        columns = zip((slots, starts, write_from, ends), np.array(rows, np.int32).T, strict=True)
        slots, starts, write_from, ends = (np.concatenate(column) for column in columns)
        cu_seqlens = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(ends - starts, out=cu_seqlens[1:])
    snapshot_seqs = snapshot_offsets = _NOTHING
    if snapshots:
        points = [(snapshot.row, snapshot.position) for snapshot in snapshots]
        snapshot_seqs, positions = np.array(points, np.int32).T.copy()
        snapshot_offsets = positions - starts[snapshot_seqs]
    return HostBatch(
        num_decodes=num_decodes,
        cu_seqlens=cu_seqlens,
        slots=slots,
        seq_starts=starts,
        seq_lens=ends,
        kv_write_from=write_from,
        snapshot_seqs=snapshot_seqs,
        snapshot_offsets=snapshot_offsets,
        num_verifies=len(plan.verifies),
    )


class BatchBuilder:
    """Stages one plan's batch; `batch` returns it once the staging has been sent. `host`: the batch's lengths.
    `snapshots`: the plan's, by row and position, as the model writes them."""

    def __init__(
        self,
        plan: StepPlan,
        inputs: Sequence[MultimodalInputs | None],
        kernels: Kernels,
        staging: Staging,
        *,
        continues: bool,
    ) -> None:
        """`inputs`: of each row, in their order, None for a row of text alone; empty where all rows are. `continues`:
        the decodes'."""
        self.snapshots: Sequence[Snapshot] = plan.snapshots
        if self.snapshots:
            self.snapshots = sorted(plan.snapshots, key=lambda snapshot: (snapshot.row, snapshot.position))
        host = self.host = host_batch(plan, self.snapshots)
        tokens, others = plan.decodes.tokens, plan.long_rows
        if others:
            # Placeholders of images are below 0.
            tokens = np.concatenate([tokens, *(np.maximum(row.tokens, 0) for row in others)])
        self._continues = continues
        first = host.cu_seqlens[:-1]
        positions = np.empty((3, host.num_tokens), np.int64)
        if others:
            positions[:] = np.arange(host.num_tokens) + np.repeat(host.seq_starts - first, np.diff(host.cu_seqlens))
        else:
            positions[:] = host.seq_starts
        self._vectors: list[Tensor] = []
        vector_rows: list[NDArray[np.int64]] = []
        for begin, row in zip(first.tolist(), inputs, strict=True) if inputs else ():
            if row is not None:
                positions[:, begin : begin + row.positions.shape[1]] = row.positions
                if len(row.offsets):
                    self._vectors.append(row.vectors)
                    vector_rows.append(row.offsets + begin)
        self._vector_rows = staging.add(np.concatenate(vector_rows)) if vector_rows else None
        self._tokens, self._positions = staging.add(tokens), staging.add(positions)
        self._head_positions: StagedArray | None = None
        if inputs and any(row is not None and row.head_positions is not None for row in inputs):
            self._head_positions = staging.add(_head_positions(positions, first.tolist(), inputs))
        self._lengths: list[StagedArray] = [
            staging.add(array)
            for array in (host.cu_seqlens, host.slots, host.seq_starts, host.seq_lens, host.kv_write_from)
        ]
        self._metadata = kernels.build_metadata(host, staging)

    def batch(self, slot_tensors: SlotTensors) -> Batch:
        """The batch, after the staging was sent. Rows that continue with a sampled token take it from the device."""
        tokens, state_slots = self._tokens.tensor, self._lengths[1].tensor
        if self._continues:
            end = self.host.num_decodes
            decode_tokens, decode_slots = slot_tensors.continue_rows(tokens[:end], state_slots[:end])
            tokens, state_slots = torch.cat([decode_tokens, tokens[end:]]), torch.cat([decode_slots, state_slots[end:]])
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
            head_positions=None if self._head_positions is None else self._head_positions.tensor,
        )


def _head_positions(
    positions: NDArray[np.int64], firsts: Sequence[int], inputs: Sequence[MultimodalInputs | None]
) -> NDArray[np.int64]:
    """`positions` int64 [3, T], but where rows have others for a head's entries."""
    moved = positions.copy()
    for first, row in zip(firsts, inputs, strict=True):
        if row is not None and row.head_positions is not None:
            moved[:, first : first + row.head_positions.shape[1]] = row.head_positions
    return moved
