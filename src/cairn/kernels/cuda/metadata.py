"""Metadata of the CUDA backend, once a step: integer tables that kernels read on the device.

Prefill sequences are cut at the chunks of their own absolute grid: chunk c of a sequence that starts at position s
holds positions [(s // 64 + c) * 64, ... + 64), of which the rows before s are masked in its first chunk and those
after the end in its last.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cairn.errors import ConfigError
from cairn.kernels.batch import CHUNK, HostBatch
from cairn.kernels.staging import StagedArray, Staging


@dataclass(frozen=True, slots=True)
class CudaMetadata:
    """`Batch.metadata` of this backend: `tables` of int32 on the device, and what holds for all of it.

    `exact`: a row's bits must not depend on the rest of the batch: see `cuda_exact`.
    `num_decode_snapshots`: how many of the snapshots are decodes', the first ones. `num_chunks`: of all prefill
    sequences.
    `row_seqs` [T]: the sequence of each row.
    `chunk_seqs` [num_chunks]: the prefill sequence (its index in the batch) of each chunk.
    `chunk_rows` [num_chunks]: the row of each chunk's first position, which lies before the sequence's own rows if the
    chunk begins before `seq_starts`.
    `seq_chunks` [B + 1]: the first chunk of each sequence; decode sequences have none.
    `seq_snapshots` [B + 1]: the first snapshot of each sequence.
    `snapshot_seqs`, `snapshot_offsets` [N]: `HostBatch.snapshot_seqs` and `snapshot_offsets`.
    """

    num_decode_snapshots: int
    num_chunks: int
    tables: tuple[StagedArray, ...]
    exact: bool = False

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


def build_metadata(host: HostBatch, staging: Staging) -> CudaMetadata:
    """See `Kernels.build_metadata`."""
    if host.num_verifies:
        raise ConfigError(
            "--speculative-config: the CUDA kernels do not verify drafts yet: leave it out, or set its method to none"
        )
    counts = np.diff(host.cu_seqlens)
    prefills = slice(host.num_decodes, None)
    num_chunks = np.zeros(host.num_seqs, np.int64)
    num_chunks[prefills] = (host.seq_lens[prefills] - 1) // CHUNK - host.seq_starts[prefills] // CHUNK + 1
    seq_chunks = np.concatenate([[0], np.cumsum(num_chunks)])
    chunk_seqs = np.repeat(np.arange(host.num_seqs), num_chunks)
    within = np.arange(len(chunk_seqs)) - seq_chunks[chunk_seqs]
    chunk_rows = host.cu_seqlens[chunk_seqs] - host.seq_starts[chunk_seqs] % CHUNK + within * CHUNK

    first_snapshots = np.searchsorted(host.snapshot_seqs, np.arange(host.num_seqs + 1))
    tables = (
        np.repeat(np.arange(host.num_seqs), counts),
        chunk_seqs,
        chunk_rows,
        seq_chunks,
        first_snapshots,
        host.snapshot_seqs,
        host.snapshot_offsets,
    )
    staged = tuple(staging.add(table.astype(np.int32)) for table in tables)
    return CudaMetadata(int(first_snapshots[host.num_decodes]), len(chunk_seqs), staged)
