"""Metadata of the CPU backend, once a step: a batch's work as integer tables, made by one compiled loop for others."""

import itertools
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from cairn.kernels.batch import HostBatch, Int32Array
from cairn.kernels.cpu.compiled import I32, I64, INT, jit, kernel
from cairn.kernels.cpu.scalars import advance
from cairn.kernels.cpu.threads import step_work
from cairn.kernels.staging import Staging

TILE_ROWS = 32
"""Rows of a prefill sequence that attention computes together: keys and values are widened once for all of them."""

SPLIT_TOKENS = 512
"""Keys and values of one row that one item of attention's work goes through. Not a matter of how many threads there
are, because on where sums are cut depends how they are rounded."""


class Table(NamedTuple):
    """int32 [num_rows, columns] for compiled loops, from `address` in memory on, a part of `memory`; as long as this
    lives."""

    memory: Int32Array
    address: int
    num_rows: int


_NO_WORK = Table(np.zeros(0, np.int32), 0, 0)
"""Of a batch that is to be recorded, whose lengths `CpuGraphs.set_lengths` has before it is computed, and of a fold,
which reads and writes no pages."""

_COUNTS_SIZE = 6 * 2
"""Six int64 in int32."""

WRITE_COLUMNS, TILE_COLUMNS, MERGE_COLUMNS = 3, 7, 3
"""Of the tables of `CpuMetadata`."""


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


@jit
def _put_tile(
    tiles: Any, index: int, first: int, rows: int, slot: int, position: int, key: int, end: int, partial: int
) -> None:
    tile = advance(tiles, TILE_COLUMNS * index)
    tile[0], tile[1], tile[2], tile[3], tile[4], tile[5], tile[6] = first, rows, slot, position, key, end, partial


@kernel({None: (I32, I32, I32, I32, INT, INT, INT, I32, I32, I32, I64)})
def _tabulate(
    begin: int, end: int, cu_seqlens: Any, slots: Any, starts: Any, write_from: Any, num_decodes: int,
    first_prefill: int, num_seqs: int, writes: Any, tiles: Any, merges: Any, counts: Any,
) -> None:  # fmt: skip
    """The tables of `CpuMetadata`, sequence after sequence, and the numbers: of each table's rows, and the other three.
    Each row of a verify has what a decode's has. One item."""
    num_writes = num_tiles = num_merges = num_partials = max_rows = num_pairs = 0
    for i in range(num_seqs):
        first, slot, start = int(cu_seqlens[i]), int(slots[i]), int(starts[i])
        num_rows = int(cu_seqlens[i + 1]) - first
        for row in range(max(0, int(write_from[i]) - start), num_rows):
            write = advance(writes, WRITE_COLUMNS * num_writes)
            write[0], write[1], write[2] = first + row, slot, start + row
            num_writes += 1
        alone = num_rows == 1 or num_decodes <= i < first_prefill
        most_rows = 1 if alone else TILE_ROWS
        # The last rows first: they see most keys, and who begins late with a long one ends last.
        for number in range(-(-num_rows // most_rows) - 1, -1, -1):
            row = number * most_rows
            rows = min(num_rows - row, most_rows)
            row_end = start + row + rows
            if alone and row_end > SPLIT_TOKENS:
                num_parts = -(-row_end // SPLIT_TOKENS)
                merge = advance(merges, MERGE_COLUMNS * num_merges)
                merge[0], merge[1], merge[2] = first + row, num_partials, num_parts
                num_merges += 1
                for part in range(num_parts):
                    key, most = part * SPLIT_TOKENS, min((part + 1) * SPLIT_TOKENS, row_end)
                    _put_tile(tiles, num_tiles, first + row, 1, slot, start + row, key, most, num_partials)
                    num_tiles += 1
                    num_partials += 1
                    num_pairs += most - key
            else:
                _put_tile(tiles, num_tiles, first + row, rows, slot, start + row, 0, row_end, -1)
                num_tiles += 1
                num_pairs += rows * row_end
            max_rows = max(max_rows, rows)
    counts[0], counts[1], counts[2] = num_writes, num_tiles, num_merges
    counts[3], counts[4], counts[5] = num_partials, max_rows, num_pairs


def build_metadata(host: HostBatch, staging: Staging) -> CpuMetadata:
    """See `Kernels.build_metadata`."""
    step_work().begin_step(host.num_tokens)
    if host.max_seq_len is not None or host.is_fold:
        return CpuMetadata(_NO_WORK, _NO_WORK, _NO_WORK, 0, 0, 0)
    num_seqs, num_tokens = host.num_seqs, host.num_tokens
    # There are at most as many: rows are cut by their number, and those alone by their keys.
    num_alone = host.num_decode_tokens + num_seqs
    most_keys = int(host.seq_lens.sum(dtype=np.int64))
    if host.num_verifies:
        verifies = slice(host.num_decodes, host.first_prefill)
        counts = np.diff(host.cu_seqlens)[verifies].astype(np.int64)
        most_keys += int(counts @ host.seq_lens[verifies])
    most_tiles = num_alone + num_seqs + num_tokens // TILE_ROWS + most_keys // SPLIT_TOKENS
    # All in one piece of memory, whose address it takes longer to ask for than to copy a column.
    columns = (host.cu_seqlens, host.slots, host.seq_starts, host.kv_write_from)
    sizes = (_COUNTS_SIZE, *map(len, columns), WRITE_COLUMNS * num_tokens, TILE_COLUMNS * most_tiles)
    begins = list(itertools.accumulate(sizes, initial=0))
    memory = np.empty(begins[-1] + MERGE_COLUMNS * num_alone, np.int32)
    np.concatenate(columns, out=memory[begins[1] : begins[5]])
    address = memory.ctypes.data
    _, *lengths, writes, tiles, merges = (address + memory.itemsize * begin for begin in begins)
    _tabulate[None](1, 0, *lengths, host.num_decodes, host.first_prefill, num_seqs, writes, tiles, merges, address)
    num_writes, num_tiles, num_merges, num_partials, max_rows, num_pairs = memory[:_COUNTS_SIZE].view(np.int64).tolist()
    tables = Table(memory, writes, num_writes), Table(memory, tiles, num_tiles), Table(memory, merges, num_merges)
    return CpuMetadata(*tables, num_partials, max_rows, num_pairs)
