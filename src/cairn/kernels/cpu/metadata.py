"""What the CPU backend works out about a batch, once a step: rows as tables that compiled loops read."""

from dataclasses import dataclass

import numpy as np

from cairn.kernels.batch import HostBatch, Ints
from cairn.kernels.cpu.threads import step_work
from cairn.kernels.staging import Staging

TILE_ROWS = 32
"""Rows of a prefill sequence that attention computes together: keys and values are widened once for all of them."""

SPLIT_TOKENS = 512
"""Keys and values of one row that one item of attention's work goes through. Not a matter of how many threads there
are, because on where sums are cut depends how they are rounded."""


class Table:
    """int32 [count, columns] for compiled loops. `address`: where it begins in memory, as long as this object lives."""

    __slots__ = ("address", "array", "count")

    def __init__(self, array: Ints) -> None:
        self.array = np.ascontiguousarray(array, dtype=np.int32)
        self.address = self.array.ctypes.data
        self.count = len(self.array)


@dataclass(frozen=True, slots=True)
class Metadata:
    """`Batch.metadata` of this backend.

    `writes`: (row, slot, position) of the rows whose keys and values are written.
    `tiles`: attention's work, (first row, rows, slot, position of the first row, first key, end of the keys, partial):
    without a partial result, -1, the tile has all keys that its rows see.
    `merges`: (row, first partial, partials) of rows whose keys are cut in several parts. `num_partials`: all of them.
    `most_rows`: of a tile. `num_pairs`: of a row and a key that it is compared with.
    """

    writes: Table
    tiles: Table
    merges: Table
    num_partials: int
    most_rows: int
    num_pairs: int


def prepare(host: HostBatch, staging: Staging) -> Metadata:
    """See `Kernels.prepare`."""
    step_work().begin_step(host.num_rows)
    tiles: list[tuple[int, ...]] = []
    merges: list[tuple[int, int, int]] = []
    num_partials = 0
    rows, slots = host.cu_seqlens.tolist(), host.slots.tolist()
    starts, ends = host.seq_starts.tolist(), host.seq_lens.tolist()
    for index, slot in enumerate(slots):
        first, count, start = rows[index], rows[index + 1] - rows[index], starts[index]
        if count == 1 and ends[index] > SPLIT_TOKENS:
            parts = range(0, ends[index], SPLIT_TOKENS)
            merges.append((first, num_partials, len(parts)))
            for key in parts:
                tiles.append((first, 1, slot, start, key, min(key + SPLIT_TOKENS, ends[index]), num_partials))
                num_partials += 1
            continue
        # The last ones first: they see most keys, and who begins late with a long one ends last.
        for begin in reversed(range(0, count, TILE_ROWS)):
            some = min(TILE_ROWS, count - begin)
            tiles.append((first + begin, some, slot, start + begin, 0, start + begin + some, -1))
    most_rows = max((tile[1] for tile in tiles), default=0)
    return Metadata(
        Table(_writes(host)),
        Table(np.array(tiles, dtype=np.int32)),
        Table(np.array(merges, dtype=np.int32)),
        num_partials,
        most_rows,
        sum(tile[1] * (tile[5] - tile[4]) for tile in tiles),
    )


def _writes(host: HostBatch) -> Ints:
    counts = np.diff(host.cu_seqlens)
    rows = np.arange(host.num_rows, dtype=np.int32)
    positions = rows + np.repeat(host.seq_starts - host.cu_seqlens[:-1], counts)
    table = np.stack([rows, np.repeat(host.slots, counts), positions], axis=1)
    return table[positions >= np.repeat(host.kv_write_from, counts)]
