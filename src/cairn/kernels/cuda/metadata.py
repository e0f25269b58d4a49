"""What the CUDA backend works out about a batch, once a step: integers that kernels read on the device.

Prefill sequences are cut at the chunks of their own absolute grid: chunk c of a sequence that starts at position s
holds positions [(s // 64 + c) * 64, ... + 64), of which the rows before s are masked in its first chunk and those
behind the end in its last.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.kernels.batch import CHUNK, HostBatch
from cairn.kernels.cuda.device import device


@dataclass(frozen=True, slots=True)
class Metadata:
    """`Batch.metadata` of this backend: int32 on the device, and one number.

    `num_decode_snapshots`: how many of the snapshots are decodes', the first ones.
    `row_seqs` [T]: the sequence of each row.
    `chunk_seqs` [num_chunks]: the prefill sequence (its index in the batch) of each chunk.
    `chunk_rows` [num_chunks]: the row of each chunk's first position, which lies before the sequence's own rows if the
    chunk begins before `seq_starts`.
    `seq_chunks` [B + 1]: the first chunk of each sequence; decode sequences have none.
    `seq_snapshots` [B + 1]: the first snapshot of each sequence.
    `snapshot_seqs`, `snapshot_offsets` [N]: `HostBatch.snapshot_rows` and `snapshot_offsets`.
    """

    num_decode_snapshots: int
    row_seqs: Tensor
    chunk_seqs: Tensor
    chunk_rows: Tensor
    seq_chunks: Tensor
    seq_snapshots: Tensor
    snapshot_seqs: Tensor
    snapshot_offsets: Tensor

    @property
    def num_chunks(self) -> int:
        """Of all prefill sequences."""
        return len(self.chunk_seqs)


def prepare(host: HostBatch) -> Metadata:
    """See `Kernels.prepare`."""
    counts = np.diff(host.cu_seqlens)
    first_chunks, last_chunks = host.seq_starts // CHUNK, (host.seq_lens - 1) // CHUNK
    num_chunks = np.where(np.arange(host.num_seqs) < host.num_decodes, 0, last_chunks - first_chunks + 1)
    seq_chunks = np.concatenate([[0], np.cumsum(num_chunks)])
    chunk_seqs = np.repeat(np.arange(host.num_seqs), num_chunks)
    within = np.arange(len(chunk_seqs)) - seq_chunks[chunk_seqs]
    chunk_rows = host.cu_seqlens[chunk_seqs] - host.seq_starts[chunk_seqs] % CHUNK + within * CHUNK

    first_snapshots = np.searchsorted(host.snapshot_rows, np.arange(host.num_seqs + 1))
    tables = _to_device(
        np.repeat(np.arange(host.num_seqs), counts),
        chunk_seqs,
        chunk_rows,
        seq_chunks,
        first_snapshots,
        host.snapshot_rows,
        host.snapshot_offsets,
    )
    return Metadata(int(first_snapshots[host.num_decodes]), *tables)


def _to_device(*arrays: NDArray[Any]) -> list[Tensor]:
    """All of them in one copy. Each begins at a multiple of 64 bytes: kernels are compiled for how operands are
    aligned, and would be again when that changes."""
    lengths = [-(-len(array) // 16) * 16 for array in arrays]
    buffer = np.zeros(sum(lengths), np.int32)
    for array, end, length in zip(arrays, np.cumsum(lengths), lengths, strict=True):
        buffer[end - length : end - length + len(array)] = array
    whole = torch.from_numpy(buffer)
    if device().type == "cuda":
        whole = whole.pin_memory().to(device(), non_blocking=True)
    return [part[: len(array)] for part, array in zip(whole.split(lengths), arrays, strict=True)]
