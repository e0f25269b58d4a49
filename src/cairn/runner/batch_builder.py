"""Rows of a plan -> one flattened batch (see `cairn.kernels.batch`). Numpy until the one copy to the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.kernels.batch import Batch, HostBatch, Vectors
from cairn.kernels.contract import Kernels
from cairn.step import FromStep, Keep, Row

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowContent:
    """What a plan row has besides text: `positions` int64 [3, tokens] of all its tokens, and at `offsets` int64 [k]
    from its first one `vectors` [k, hidden] instead of embeddings."""

    positions: Ints
    offsets: Ints
    vectors: Tensor


class BatchPlaces:
    """Where the rows of a plan lie in the flattened batch: decode rows first, then the prefill rows, in plan order.

    `order`: indices of plan rows, as the batch has them. `first[i]`: the flattened row of plan row i's first token.
    `snapshots`: indices of the plan's snapshots, in the batch's order.
    """

    def __init__(self, rows: Sequence[Row], keeps: Sequence[Keep]) -> None:
        self.rows = rows
        decodes = [index for index, row in enumerate(rows) if row.decode]
        self.num_decodes = len(decodes)
        self.order = decodes + [index for index, row in enumerate(rows) if not row.decode]
        self.first = [0] * len(rows)
        ends = [0]
        for index in self.order:
            self.first[index] = ends[-1]
            ends.append(ends[-1] + rows[index].end - rows[index].start)
        self.cu_seqlens = np.array(ends, np.int32)
        self.snapshots = sorted(range(len(keeps)), key=lambda n: (self.first[keeps[n].row], keeps[n].position))
        self._keeps = keeps

    def host(self) -> HostBatch:
        """The batch's lengths."""
        rows = [self.rows[index] for index in self.order]
        sequence = {index: place for place, index in enumerate(self.order)}
        keeps = [self._keeps[number] for number in self.snapshots]
        return HostBatch(
            num_decodes=self.num_decodes,
            cu_seqlens=self.cu_seqlens,
            slots=np.array([row.slot for row in rows], np.int32),
            seq_starts=np.array([row.start for row in rows], np.int32),
            seq_lens=np.array([row.end for row in rows], np.int32),
            kv_write_from=np.array([row.kv_write_from for row in rows], np.int32),
            snapshot_rows=np.array([sequence[keep.row] for keep in keeps], np.int32),
            snapshot_offsets=np.array([keep.position - self.rows[keep.row].start for keep in keeps], np.int32),
        )

    def row_of(self, index: int, position: int) -> int:
        """The flattened row of plan row `index`'s token at absolute position `position`."""
        return self.first[index] + position - self.rows[index].start


def build_batch(
    places: BatchPlaces,
    contents: Sequence[RowContent | None],
    block_tables: Sequence[Tensor],
    last_tokens: Tensor,
    kernels: Kernels,
) -> Batch:
    """`contents`: what stands for the tokens below 0 of each plan row, and where all of them stand; None for a row of
    text alone. `last_tokens` int64 [slots]: what was drawn last, on the device, as are `block_tables`."""
    host, rows = places.host(), places.rows
    num_rows = host.num_rows
    tokens = np.zeros(num_rows, np.int64)
    positions = np.empty((3, num_rows), np.int64)
    positions[:] = np.arange(num_rows) - np.repeat(host.cu_seqlens[:-1] - host.seq_starts, np.diff(host.cu_seqlens))
    drawn: list[tuple[int, int]] = []
    for row, first, content in zip(rows, places.first, contents, strict=True):
        if isinstance(row.tokens, FromStep):
            drawn.append((first, row.slot))
        else:
            np.maximum(row.tokens, 0, out=tokens[first : first + len(row.tokens)])
        if content is not None:
            positions[:, first : first + row.end - row.start] = content.positions
    drawn_rows, drawn_slots = np.array(drawn, np.int64).reshape(-1, 2).T
    lengths = (host.cu_seqlens, host.slots, host.seq_starts, host.seq_lens, host.kv_write_from)
    wide, narrow = _to_device(last_tokens.device, (tokens, positions, drawn_rows, drawn_slots), lengths)
    if drawn:
        wide[0][wide[2]] = last_tokens[wide[3]]
    return Batch(
        tokens=wide[0],
        positions=wide[1],
        cu_seqlens=narrow[0],
        slots=narrow[1],
        seq_starts=narrow[2],
        seq_lens=narrow[3],
        kv_write_from=narrow[4],
        block_tables=block_tables,
        host=host,
        metadata=kernels.prepare(host),
        vectors=_vectors(places, contents),
    )


def _to_device(
    device: torch.device, wide: Sequence[Ints], narrow: Sequence[NDArray[np.int32]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Arrays of int64 and of int32 as tensors on the device, in one copy."""
    arrays: list[NDArray[np.int64] | NDArray[np.int32]] = [*wide, *narrow]
    sizes = [array.nbytes for array in arrays]
    staging, ends = np.empty(sum(sizes), np.uint8), np.cumsum(sizes).tolist()
    for array, size, end in zip(arrays, sizes, ends, strict=True):
        staging[end - size : end] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    moved = torch.from_numpy(staging).to(device)
    parts = [moved[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return (
        [part.view(torch.int64).view(array.shape) for part, array in zip(parts, wide, strict=False)],
        [part.view(torch.int32).view(array.shape) for part, array in zip(parts[len(wide) :], narrow, strict=True)],
    )


def _vectors(places: BatchPlaces, contents: Sequence[RowContent | None]) -> Vectors | None:
    found = [
        (content.offsets + first, content.vectors)
        for first, content in zip(places.first, contents, strict=True)
        if content is not None and len(content.offsets)
    ]
    if not found:
        return None
    vectors = torch.cat([values for _, values in found])
    return Vectors(torch.from_numpy(np.concatenate([rows for rows, _ in found])).to(vectors.device), vectors)
