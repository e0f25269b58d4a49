"""Metadata of the CPU backend, once a step: a batch's work as integer tables, made by one compiled loop for others."""

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from cairn.kernels.attention_rule import AttentionRule
from cairn.kernels.batch import HostBatch, Int32Array
from cairn.kernels.cpu.compiled import I32, I64, INT, jit, kernel
from cairn.kernels.cpu.scalars import advance
from cairn.kernels.cpu.threads import step_work
from cairn.kernels.staging import Staging

TILE_ROWS = 32
"""Rows of a prefill sequence, or of a verify, that attention computes together: keys and values are widened once for
all of them. A verify of 31 drafts is one tile."""

BLOCK = 32
"""Keys at a time: with the values they stay in the caches of the core."""

SPLIT_TOKENS = 512
"""Keys and values of a decode's or verify's rows that one item of attention's work goes through. Not a matter of how
many threads there are, because on where sums are cut depends how they are rounded."""


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

WRITE_COLUMNS, TILE_COLUMNS, MERGE_COLUMNS = 3, 8, 3
"""Of the tables of `CpuMetadata` and `AttentionWork`."""


class AttentionWork(msgspec.Struct, frozen=True, eq=False):
    """Attention's work over a batch, for layers of one reach.

    `tiles`: (first row, rows, slot, position of the first row, first key, end of the keys, partial, parts): without a
    partial result, -1, the tile has all keys that its rows see. Otherwise each row's keys are cut in so many parts, and
    the rows' partial results are as many apart. Keys begin at a multiple of BLOCK, where rows may not see the first.
    `merges`: (row, first partial, partials) of rows whose keys are cut in several parts. `num_partials`: all of them.
    `max_rows`: of a tile. `num_pairs`: of a row and a key that it is compared with.
    """

    tiles: Table
    merges: Table
    num_partials: int
    max_rows: int
    num_pairs: int


Reach = tuple[int, int]
"""The window and the chunk of an `AttentionRule`, 0 for none: what work depends on."""

ALL_KEYS: Reach = (0, 0)


def reach_of(rule: AttentionRule) -> Reach:
    """As compiled loops take it."""
    return rule.window or 0, rule.chunk or 0


@dataclass(slots=True)
class CpuMetadata:
    """`Batch.metadata` of this backend. `writes`: (row, slot, position) of the rows whose keys and values are written.
    `work`: of layers of each reach, as far as one has asked."""

    host: HostBatch
    writes: Table
    work: dict[Reach, AttentionWork] = field(default_factory=dict)

    def work_for(self, reach: Reach) -> AttentionWork:
        """Of layers of this reach."""
        work = self.work.get(reach)
        if work is None:
            work = self.work[reach] = _make_tables(self.host, reach)[1]
        return work

    def become(self, other: "CpuMetadata") -> None:
        """That of another batch, for those who have this one."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))


@jit
def first_key(position: Any, window: int, chunk: int) -> Any:
    """See `AttentionRule.first_key`; 0 for no window, and for no chunk."""
    if window:
        return max(np.int64(0), np.int64(position - window + 1))
    return np.int64(position // chunk * chunk) if chunk else np.int64(0)


@jit
def _put_tile(
    tiles: Any, index: int, first: int, rows: int, slot: int, position: int, key: int, end: int, partial: int,
    num_parts: int,
) -> None:  # fmt: skip
    tile = advance(tiles, TILE_COLUMNS * index)
    tile[0], tile[1], tile[2], tile[3], tile[4], tile[5] = first, rows, slot, position, key, end
    tile[6], tile[7] = partial, num_parts


@kernel({None: (I32, I32, I32, I32, INT, INT, INT, INT, INT, I32, I32, I32, I64)})
def _tabulate(
    begin: int, end: int, cu_seqlens: Any, slots: Any, starts: Any, write_from: Any, num_decodes: int,
    first_prefill: int, num_seqs: int, window: int, chunk: int, writes: Any, tiles: Any, merges: Any, counts: Any,
) -> None:  # fmt: skip
    """What `_make_tables` gives, sequence after sequence, and the numbers: of each table's rows, and the other three.
    Each row of a verify has the parts that a decode's has. One item."""
    num_writes = num_tiles = num_merges = num_partials = max_rows = num_pairs = 0
    for i in range(num_seqs):
        first, slot, start = int(cu_seqlens[i]), int(slots[i]), int(starts[i])
        num_rows = int(cu_seqlens[i + 1]) - first
        for row in range(max(0, int(write_from[i]) - start), num_rows):
            write = advance(writes, WRITE_COLUMNS * num_writes)
            write[0], write[1], write[2] = first + row, slot, start + row
            num_writes += 1
        in_parts = num_rows == 1 or num_decodes <= i < first_prefill
        # The last rows first: they see most keys, and who begins late with a long one ends last.
        end_row = num_rows
        while end_row > 0:
            row_end, first_part, num_parts = start + end_row, 0, 1
            if in_parts:
                first_part = first_key(row_end - 1, window, chunk) // SPLIT_TOKENS
                last_part = (row_end - 1) // SPLIT_TOKENS
                num_parts = last_part - first_part + 1
                # The first rows may end in a part before that of those after them, or begin in one.
                row = max(0, end_row - TILE_ROWS, last_part * SPLIT_TOKENS - start)
                while first_key(start + row, window, chunk) // SPLIT_TOKENS < first_part:
                    row += 1
            else:
                row = (end_row - 1) // TILE_ROWS * TILE_ROWS
            rows, lowest = end_row - row, first_key(start + row, window, chunk) // BLOCK * BLOCK
            if num_parts > 1:
                for each in range(rows):
                    merge = advance(merges, MERGE_COLUMNS * num_merges)
                    merge[0], merge[1], merge[2] = first + row + each, num_partials + each * num_parts, num_parts
                    num_merges += 1
            for part in range(num_parts):
                most = min((first_part + part + 1) * SPLIT_TOKENS, row_end) if num_parts > 1 else row_end
                key = max(lowest, (first_part + part) * SPLIT_TOKENS)
                partial = num_partials + part if num_parts > 1 else -1
                _put_tile(tiles, num_tiles, first + row, rows, slot, start + row, key, most, partial, num_parts)
                num_tiles += 1
                num_pairs += rows * (most - key)
            if num_parts > 1:
                num_partials += rows * num_parts
            max_rows = max(max_rows, rows)
            end_row = row
    counts[0], counts[1], counts[2] = num_writes, num_tiles, num_merges
    counts[3], counts[4], counts[5] = num_partials, max_rows, num_pairs


def build_metadata(host: HostBatch, staging: Staging) -> CpuMetadata:
    """See `Kernels.build_metadata`."""
    step_work().begin_step(host.num_tokens)
    writes, work = _make_tables(host, ALL_KEYS)
    return CpuMetadata(host, writes, {ALL_KEYS: work})


def _make_tables(host: HostBatch, reach: Reach) -> tuple[Table, AttentionWork]:
    """Of rows that are written, and attention's."""
    if host.max_seq_len is not None or host.is_fold:
        return _NO_WORK, AttentionWork(_NO_WORK, _NO_WORK, 0, 0, 0)
    num_seqs, num_tokens = host.num_seqs, host.num_tokens
    # There are at most as many: rows are cut by their number, and those alone by their keys.
    num_alone = host.num_decode_tokens + num_seqs
    most_keys = int(np.add.reduce(host.seq_lens, dtype=np.int64))
    if host.num_verifies:
        verifies = slice(host.num_decodes, host.first_prefill)
        counts = np.diff(host.cu_seqlens)[verifies].astype(np.int64)
        most_keys += int(counts @ host.seq_lens[verifies])
    most_tiles = num_alone + num_seqs + num_tokens // TILE_ROWS + most_keys // SPLIT_TOKENS
    # All in one piece of memory, whose address it takes longer to ask for than to copy a column.
    columns = (host.cu_seqlens, host.slots, host.seq_starts, host.kv_write_from)
    first_write = _COUNTS_SIZE + 4 * num_seqs + 1
    first_tile = first_write + WRITE_COLUMNS * num_tokens
    first_merge = first_tile + TILE_COLUMNS * most_tiles
    memory = np.empty(first_merge + MERGE_COLUMNS * num_alone, np.int32)
    address = torch.from_numpy(memory).data_ptr()
    np.concatenate(columns, out=memory[_COUNTS_SIZE:first_write])
    edges = address + 4 * _COUNTS_SIZE
    slots = edges + 4 * (num_seqs + 1)
    starts, write_from = slots + 4 * num_seqs, slots + 8 * num_seqs
    writes, tiles, merges = address + 4 * first_write, address + 4 * first_tile, address + 4 * first_merge
    kinds = host.num_decodes, host.first_prefill, num_seqs
    lengths = edges, slots, starts, write_from
    _tabulate[None](1, 0, *lengths, *kinds, *reach, writes, tiles, merges, address)
    num_writes, num_tiles, num_merges, *numbers = memory[:_COUNTS_SIZE].view(np.int64).tolist()
    tables = Table(memory, tiles, num_tiles), Table(memory, merges, num_merges)
    return Table(memory, writes, num_writes), AttentionWork(*tables, *numbers)
