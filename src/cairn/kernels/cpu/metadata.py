"""Metadata of the CPU backend, once a step: a batch's work as integer tables that compiled loops read."""

from dataclasses import dataclass, fields

import numpy as np

from cairn.kernels.batch import HostBatch, Int32Array
from cairn.kernels.cpu.threads import step_work
from cairn.kernels.staging import Staging

TILE_ROWS = 32
"""Rows of a prefill sequence that attention computes together: keys and values are widened once for all of them."""

SPLIT_TOKENS = 512
"""Keys and values of one row that one item of attention's work goes through. Not a matter of how many threads there
are, because on where sums are cut depends how they are rounded."""


_NO_WORK = np.zeros((0, 0), np.int32)
"""Of a batch that is to be recorded: `CpuGraphs.set_lengths` has its lengths before it is computed."""


class Table:
    """int32 [count, columns] for compiled loops. `address`: where it begins in memory, as long as this object lives."""

    __slots__ = ("address", "array", "count")

    def __init__(self, array: Int32Array) -> None:
        self.array = np.ascontiguousarray(array, dtype=np.int32)
        self.address = self.array.ctypes.data
        self.count = len(self.array)


@dataclass(slots=True)
class CpuMetadata:
    """`Batch.metadata` of this backend.

    `writes`: (row, slot, position) of the rows whose keys and values are written.
    `tiles`: attention's work, (first row, rows, slot, position of the first row, first key, end of the keys, partial):
    without a partial result, -1, the tile has all keys that its rows see.
    `merges`: (row, first partial, partials) of rows whose keys are cut in several parts. `num_partials`: all of them.
    `max_rows`: of a tile. `num_pairs`: of a row and a key that it is compared with.
    """

    writes: Table
    tiles: Table
    merges: Table
    num_partials: int
    max_rows: int
    num_pairs: int

    def become(self, other: "CpuMetadata") -> None:
        """That of another batch, for those who have this one."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))


def build_metadata(host: HostBatch, staging: Staging) -> CpuMetadata:
    """See `Kernels.build_metadata`."""
    step_work().begin_step(host.num_tokens)
    if host.max_seq_len is not None:
        return CpuMetadata(Table(_NO_WORK), Table(_NO_WORK), Table(_NO_WORK), 0, 0, 0)
    tiles, merges = _tiles(host)
    rows, partials = tiles[:, 1], tiles[:, 6]
    return CpuMetadata(
        Table(_writes(host)),
        Table(tiles),
        Table(merges),
        int(partials.max(initial=-1)) + 1,
        int(rows.max(initial=0)),
        int(rows @ (tiles[:, 5] - tiles[:, 4]).astype(np.int64)),
    )


def _tiles(host: HostBatch) -> tuple[Int32Array, Int32Array]:
    """See `CpuMetadata`, sequence after sequence."""
    firsts, starts, ends = host.cu_seqlens[:-1], host.seq_starts, host.seq_lens
    counts = ends - starts
    # What all tiles of a sequence share, and what a single one has.
    tiles = np.stack(
        (firsts, counts, host.slots, starts, np.zeros_like(firsts), ends, np.full_like(firsts, -1)), axis=1
    )
    is_split = (counts == 1) & (ends > SPLIT_TOKENS)
    if host.num_tokens == host.num_seqs and not is_split.any():
        return tiles, np.zeros((0, 3), np.int32)
    num_tiles = np.where(is_split, -(-ends // SPLIT_TOKENS), -(-counts // TILE_ROWS))
    before = np.cumsum(num_tiles, dtype=np.int32) - num_tiles
    tiles = np.repeat(tiles, num_tiles, axis=0)
    number = np.arange(len(tiles), dtype=np.int32) - np.repeat(before, num_tiles)
    split, whole = (np.repeat(mask, num_tiles).nonzero()[0] for mask in (is_split, ~is_split))
    keys = number[split] * np.int32(SPLIT_TOKENS)
    tiles[split, 4], tiles[split, 5] = keys, np.minimum(keys + np.int32(SPLIT_TOKENS), tiles[split, 5])
    tiles[split, 6] = np.arange(len(split))
    if len(whole):
        # The last rows first: they see most keys, and who begins late with a long one ends last.
        begins = (np.repeat(num_tiles, num_tiles)[whole] - 1 - number[whole]) * TILE_ROWS
        tiles[whole, 0] += begins
        tiles[whole, 1] = np.minimum(tiles[whole, 1] - begins, TILE_ROWS)
        tiles[whole, 3] += begins
        tiles[whole, 5] = tiles[whole, 3] + tiles[whole, 1]
    merged = is_split.nonzero()[0]
    first_partials = np.cumsum(num_tiles[merged]) - num_tiles[merged]
    return tiles, np.stack((firsts[merged], first_partials, num_tiles[merged]), axis=1).astype(np.int32)


def _writes(host: HostBatch) -> Int32Array:
    counts = np.diff(host.cu_seqlens)
    rows = np.arange(host.num_tokens, dtype=np.int32)
    positions = rows + np.repeat(host.seq_starts - host.cu_seqlens[:-1], counts)
    table = np.stack([rows, np.repeat(host.slots, counts), positions], axis=1)
    return table[positions >= np.repeat(host.kv_write_from, counts)]
