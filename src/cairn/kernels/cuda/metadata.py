"""Metadata of the CUDA backend, once a step: integer tables that kernels read on the device.

Prefill sequences are cut at the chunks of their own absolute grid: chunk c of a sequence that starts at position s
holds positions [(s // 64 + c) * 64, ... + 64), of which the rows before s are masked in its first chunk and those
after the end in its last.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cairn.kernels.batch import CHUNK, HostBatch
from cairn.kernels.staging import StagedArray, Staging


@dataclass(frozen=True, slots=True)
class CudaMetadata:
    """`Batch.metadata` of this backend: `tables` of int32 on the device, and what holds for all of it.

    `exact`: a row's bits must not depend on the rest of the batch: see `cuda_exact`.
    `has_verifies`: whether sequences in the one-token form are of several tokens.
    `num_decode_snapshots`: how many of the snapshots are of sequences in the one-token form, the first ones.
    `num_chunks`: of all prefill sequences.
    `row_seqs` [T]: the sequence of each row.
    `chunk_seqs` [num_chunks]: the prefill sequence (its index in the batch) of each chunk.
    `chunk_rows` [num_chunks]: the row of each chunk's first position, which lies before the sequence's own rows if the
    chunk begins before `seq_starts`.
    `seq_chunks` [B + 1]: the first chunk of each sequence; those in the one-token form have none.
    `seq_snapshots` [B + 1]: the first snapshot of each sequence.
    `snapshot_seqs`, `snapshot_offsets` [N]: `HostBatch.snapshot_seqs` and `snapshot_offsets`.
    `row_slots`, `row_lens`: of each row in the one-token form the slot of its sequence, and how many tokens the
    sequence has with it. Only where there are verifies: of decodes they are `Batch.slots` and `Batch.seq_lens`.
    """

    num_decode_snapshots: int
    num_chunks: int
    tables: tuple[StagedArray, ...]
    has_verifies: bool = False
    exact: bool = False

    @property
    def one_by_one(self) -> bool:
        """Whether scans take decodes, verifies and folds by the kernel that has a loop over a sequence's tokens. It
        need not round as the one for decodes alone does: which products and sums are fused is the compilers' choice.
        So `exact` has one machine code for all."""
        return self.has_verifies or self.exact

    @property
    def row_seqs(self) -> Tensor:
        return self.tables[0].tensor

    @property
    def chunk_seqs(self) -> Tensor:
        return self.tables[1].tensor

    @property
    def chunk_rows(self) -> Tensor:
        return self.tables[2].tensor

    @property
    def seq_chunks(self) -> Tensor:
        return self.tables[3].tensor

    @property
    def seq_snapshots(self) -> Tensor:
        return self.tables[4].tensor

    @property
    def snapshot_seqs(self) -> Tensor:
        return self.tables[5].tensor

    @property
    def snapshot_offsets(self) -> Tensor:
        return self.tables[6].tensor

    @property
    def row_slots(self) -> Tensor:
        return self.tables[7].tensor

    @property
    def row_lens(self) -> Tensor:
        return self.tables[8].tensor


def build_metadata(host: HostBatch, staging: Staging) -> CudaMetadata:
    """See `Kernels.build_metadata`."""
    counts = np.diff(host.cu_seqlens)
    row_seqs = np.repeat(np.arange(host.num_seqs), counts)
    prefills = slice(host.first_prefill, None)
    num_chunks = np.zeros(host.num_seqs, np.int64)
    num_chunks[prefills] = (host.seq_lens[prefills] - 1) // CHUNK - host.seq_starts[prefills] // CHUNK + 1
    seq_chunks = np.concatenate([[0], np.cumsum(num_chunks)])
    chunk_seqs = np.repeat(np.arange(host.num_seqs), num_chunks)
    within = np.arange(len(chunk_seqs)) - seq_chunks[chunk_seqs]
    chunk_rows = host.cu_seqlens[chunk_seqs] - host.seq_starts[chunk_seqs] % CHUNK + within * CHUNK

    first_snapshots = np.searchsorted(host.snapshot_seqs, np.arange(host.num_seqs + 1))
    tables = (
        row_seqs,
        chunk_seqs,
        chunk_rows,
        seq_chunks,
        first_snapshots,
        host.snapshot_seqs,
        host.snapshot_offsets,
        *_rows_of_verifies(host, row_seqs),
    )
    staged = tuple(staging.add(table.astype(np.int32)) for table in tables)
    return CudaMetadata(int(first_snapshots[host.first_prefill]), len(chunk_seqs), staged, host.num_verifies > 0)


def _rows_of_verifies(host: HostBatch, row_seqs: NDArray[np.int64]) -> tuple[NDArray[np.int32], ...]:
    """`row_slots` and `row_lens`."""
    if not host.num_verifies:
        return ()
    assert host.max_seq_len is None, "no graph of a GPU has verifies"
    seqs = row_seqs[: host.num_decode_tokens]
    offsets = np.arange(len(seqs), dtype=np.int32) - host.cu_seqlens[seqs]
    return host.slots[seqs], host.seq_starts[seqs] + offsets + 1
