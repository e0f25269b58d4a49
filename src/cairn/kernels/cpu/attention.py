"""Attention straight on the pages: flash attention (arXiv 2205.14135) over blocks of keys, widened to float32 once for
all rows and query heads that want them.

An item of the work is a tile of rows of one sequence with one key head and its query heads, over all keys that the
rows see, or, for rows of decodes and verifies, over a part of them: what the parts came to is then put together by
their maxima. Only what lies below a sequence's end, and within the reach of the tile's rows, is ever read.

A verify's rows share a tile, and yet each has the bits of a decode: keys are cut into the same parts and blocks, of a
block a row takes the keys alone that it sees, and none of its sums depends on who else is in the tile.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.kernels.batch import Batch
from cairn.kernels.cpu.compiled import ELEMENTS, F32, FLOAT, I32, INT, jit, kernel, optional_arg, record, row_args
from cairn.kernels.cpu.metadata import (
    BLOCK,
    MERGE_COLUMNS,
    TILE_COLUMNS,
    WRITE_COLUMNS,
    CpuMetadata,
    first_key,
    reach_of,
)
from cairn.kernels.cpu.recording import call_again
from cairn.kernels.cpu.recurrence import copy
from cairn.kernels.cpu.scalars import ONE, advance, exp, load, store, tanh
from cairn.kernels.cpu.vectors import (
    LANES,
    TILE_LANES,
    TILE_ROWS,
    add_half_tile,
    add_row,
    add_tile,
    aligned,
    dot_16_rows,
    largest_of,
    prefetch,
    widen_16,
)

WIDTH = 2 * TILE_LANES
"""What the rows of the buffers are rounded up to."""

_LOWEST = np.float32(-np.inf)

_NEVER = np.int64(1 << 40)
"""No position."""


class _Pages(NamedTuple):
    """A layer's keys or values [page, head, token, dim], and how many numbers two pages, heads and tokens are apart."""

    address: Any
    page: int
    head: int
    token: int


class _Sizes(NamedTuple):
    """`width`: dim, rounded up to whole tiles of columns."""

    page_size: int
    heads: int
    kv_heads: int
    dim: int
    width: int


class _Rule(NamedTuple):
    """An `AttentionRule`, 0 for what it has not, and the sinks, float32 [heads]."""

    window: int
    chunk: int
    softcap: Any
    sinks: Any
    has_sinks: int


def _pages_type(x: Any) -> Any:
    return record(_Pages, x, INT, INT, INT)


@jit
def _token_address(pages: Any, table: Any, page_size: int, position: int) -> Any:
    """Where a position of a sequence has the numbers of the first head."""
    page = np.int64(table[position // page_size])
    return advance(pages.address, page * pages.page + position % page_size * pages.token)


@kernel({(dtype, dtype): (x, INT, INT, _pages_type(x), I32, INT, I32, INT, INT, INT) for dtype, x in ELEMENTS.items()})
def _write(
    begin: int, end: int, x: Any, x_row: int, x_head: int, pages: Any, table: Any, table_row: int, writes: Any,
    page_size: int, heads: int, dim: int,
) -> None:  # fmt: skip
    for i in range(begin, end):
        entry = advance(writes, i * WRITE_COLUMNS)
        row, slot, position = entry[0], entry[1], entry[2]
        token = _token_address(pages, advance(table, slot * table_row), page_size, position)
        for head in range(heads):
            copy(advance(x, row * x_row + head * x_head), advance(token, head * pages.head), dim)


def write_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, group: int, batch: Batch) -> None:
    """See `Kernels.write_kv`."""
    metadata: CpuMetadata = batch.metadata  # type: ignore[assignment]
    table = row_args(batch.block_tables[group])
    _, heads, page_size, dim = keys.shape
    write, cost = _write[k.dtype, keys.dtype], k.numel() // 16
    places = [
        (*row_args(x), x.stride(1), cache.data_ptr(), *cache.stride()[:3], *table)
        for x, cache in ((k, keys), (v, values))
    ]

    def run() -> None:
        for place in places:
            write(metadata.writes.num_rows, cost, *place, metadata.writes.address, page_size, heads, dim)

    call_again(run)


@jit
def _widen_block(pages: Any, head: int, table: Any, s: Any, first: Any, skipped: Any, end: Any, out: Any) -> None:
    """The tokens of a block from position `first` on of one head, as float32 rows of `out`; the first `skipped` rows
    and those at and after position `end` are what they were. The next block's are prefetched: a page of a head is too
    short for the CPU to see what comes."""
    cache, count, whole = advance(pages.address, head * pages.head), min(BLOCK, end - first), s.dim // LANES * LANES
    page, offset = (first + BLOCK) // s.page_size, (first + BLOCK) % s.page_size
    for _ in range(min(BLOCK, end - first - BLOCK)):
        source = advance(cache, np.int64(table[page]) * pages.page + offset * pages.token)
        for j in range(0, s.dim, 32):
            prefetch(advance(source, j))
        offset += 1
        if offset == s.page_size:
            page += 1
            offset = 0
    page, offset = (first + skipped) // s.page_size, (first + skipped) % s.page_size
    for t in range(skipped, count):
        source = advance(cache, np.int64(table[page]) * pages.page + offset * pages.token)
        target = advance(out, t * s.width)
        for j in range(0, whole, LANES):
            widen_16(advance(source, j), advance(target, j))
        for j in range(whole, s.dim):
            target[j] = load(source, j)
        offset += 1
        if offset == s.page_size:
            page += 1
            offset = 0


@jit
def _attend_block(q: Any, count: Any, keys: Any, width: int, scores: Any) -> None:
    """scores[i, t] = q[i] keys[t] for `count` rows of q and all keys of the block."""
    for i in range(count):
        for t in range(0, BLOCK, LANES):
            target = advance(scores, i * BLOCK + t)
            dot_16_rows(advance(q, i * width), advance(keys, t * width), width, width, target)


@jit
def _softmax_block(scores: Any, count: Any, weighted: Any, width: int, maxima: Any, sums: Any) -> None:
    """Scores of each of `count` rows become weights beside the largest score so far; what was summed up beside an
    earlier, lower one is brought down."""
    for i in range(count):
        row, before = advance(scores, i * BLOCK), maxima[i]
        largest = max(before, largest_of(row, BLOCK))
        total = np.float32(0)
        for t in range(BLOCK):
            weight = exp(row[t] - largest)
            row[t] = weight
            total += weight
        if largest > before:
            factor = exp(before - largest)
            target = advance(weighted, i * width)
            for j in range(width):
                target[j] = target[j] * factor
            sums[i] = sums[i] * factor
            maxima[i] = largest
        sums[i] = sums[i] + total


@jit
def _add_weighted_values(scores: Any, count: Any, values: Any, weighted: Any, width: int) -> None:
    """weighted[i] += sum over t of scores[i, t] values[t], for `count` rows and all keys of the block."""
    i = 0
    while i < count:
        source, target, left = advance(scores, i * BLOCK), advance(weighted, i * width), count - i
        if left >= TILE_ROWS // 2:
            for j in range(0, width, TILE_LANES):
                if left >= TILE_ROWS:
                    add_tile(source, BLOCK, 1, advance(values, j), width, advance(target, j), width, BLOCK, ONE)
                else:
                    add_half_tile(source, BLOCK, 1, advance(values, j), width, advance(target, j), width, BLOCK, ONE)
            i += TILE_ROWS if left >= TILE_ROWS else TILE_ROWS // 2
        else:
            _add_weighted_row(source, values, target, width, BLOCK)
            i += 1


@jit
def _add_weighted_row(scores: Any, values: Any, weighted: Any, width: int, depth: int) -> None:
    """weighted += sum over t of scores[t] values[t], for the first `depth` keys of the block."""
    for j in range(0, width, 2 * TILE_LANES):
        add_row(scores, BLOCK, 1, advance(values, j), width, advance(weighted, j), width, depth, ONE)


@jit
def _end_of_sight(key: Any, rule: Any) -> Any:
    """The first position behind a key that does not see it."""
    if rule.window:
        return key + rule.window
    return (key // rule.chunk + 1) * rule.chunk if rule.chunk else _NEVER


@jit
def _hide_keys(scores: Any, position: Any, key: Any, rule: Any) -> None:
    """scores[t] of the keys of the block at `key` that a row at `position` does not see."""
    for t in range(position + 1 - key, BLOCK):
        scores[t] = _LOWEST
    for t in range(first_key(position, rule.window, rule.chunk) - key):
        scores[t] = _LOWEST


@jit
def _add_seen_values(scores: Any, position: Any, key: Any, rule: Any, values: Any, weighted: Any, width: int) -> None:
    """weighted += sum over t of scores[t] values[t], for the keys of the block at `key` that a row at `position`
    sees."""
    begin = max(np.int64(0), first_key(position, rule.window, rule.chunk) - key)
    depth = min(np.int64(BLOCK), position + 1 - key) - begin
    _add_weighted_row(advance(scores, begin), advance(values, begin * width), weighted, width, depth)


@kernel(
    {
        (dtype, dtype): (
            *(x, INT, INT, _pages_type(x), _pages_type(x), I32, INT, I32, INT),
            *(record(_Sizes, INT, INT, INT, INT, INT), record(_Rule, INT, INT, FLOAT, F32, INT), FLOAT, F32, x),
        )
        for dtype, x in ELEMENTS.items()
    }
)
def _attend(
    begin: int, end: int, q: Any, q_row: int, q_head: int, keys: Any, values: Any, table: Any, table_row: int,
    tiles: Any, max_rows: int, s: Any, rule: Any, scale: Any, partials: Any, out: Any,
) -> None:  # fmt: skip
    """Items: tiles times key heads."""
    heads, kv_heads, dim, width = s.heads, s.kv_heads, s.dim, s.width
    per_kv = heads // kv_heads
    most = max_rows * per_kv
    # The rows after `dim` stay zeros.
    buffer = np.zeros(2 * (most + BLOCK) * width + (BLOCK + 2) * most + 16, np.float32)
    queries = aligned(buffer)
    weighted = advance(queries, most * width)
    key_block = advance(weighted, most * width)
    value_block = advance(key_block, BLOCK * width)
    scores = advance(value_block, BLOCK * width)
    maxima = advance(scores, most * BLOCK)
    sums = advance(maxima, most)
    for item in range(begin, end):
        tile, kv_head = advance(tiles, item // kv_heads * TILE_COLUMNS), item % kv_heads
        first_row, rows, slot, position = np.int64(tile[0]), np.int64(tile[1]), np.int64(tile[2]), np.int64(tile[3])
        begin_key, end_key = np.int64(tile[4]), np.int64(tile[5])
        partial, num_parts = np.int64(tile[6]), np.int64(tile[7])
        count, lowest = rows * per_kv, first_key(position, rule.window, rule.chunk)
        for i in range(count):
            source = advance(q, (first_row + i // per_kv) * q_row + (kv_head * per_kv + i % per_kv) * q_head)
            target = advance(queries, i * width)
            for j in range(dim):
                target[j] = load(source, j) * scale
            maxima[i] = _LOWEST
            sums[i] = np.float32(0)
            if rule.has_sinks and partial < 0:
                maxima[i] = rule.sinks[kv_head * per_kv + i % per_kv]
                sums[i] = ONE
        for j in range(count * width):
            weighted[j] = np.float32(0)
        pages = advance(table, slot * table_row)
        for key in range(begin_key, end_key, BLOCK):
            skipped = max(np.int64(0), lowest - key)
            _widen_block(keys, kv_head, pages, s, key, skipped, end_key, key_block)
            _widen_block(values, kv_head, pages, s, key, skipped, end_key, value_block)
            # Rows see the block from `first` up to `last`, and all its keys from `whole` up to `partly`.
            first = max(np.int64(0), key - position) * per_kv
            whole = min(count, max(np.int64(0), key + BLOCK - 1 - position) * per_kv)
            partly = min(count, max(np.int64(0), _end_of_sight(key, rule) - position) * per_kv)
            last = min(count, (_end_of_sight(key + BLOCK - 1, rule) - position) * per_kv)
            seeing, block_scores = last - first, advance(scores, first * BLOCK)
            block_weighted = advance(weighted, first * width)
            _attend_block(advance(queries, first * width), seeing, key_block, width, block_scores)
            if rule.softcap > 0:
                for t in range(seeing * BLOCK):
                    block_scores[t] = rule.softcap * tanh(block_scores[t] / rule.softcap)
            left = max(whole, partly)
            for i in range(first, min(whole, last)):
                _hide_keys(advance(scores, i * BLOCK), position + i // per_kv, key, rule)
            for i in range(left, last):
                _hide_keys(advance(scores, i * BLOCK), position + i // per_kv, key, rule)
            _softmax_block(block_scores, seeing, block_weighted, width, advance(maxima, first), advance(sums, first))
            for i in range(first, min(whole, last)):
                row_weighted, row_scores = advance(weighted, i * width), advance(scores, i * BLOCK)
                _add_seen_values(row_scores, position + i // per_kv, key, rule, value_block, row_weighted, width)
            for i in range(left, last):
                row_weighted, row_scores = advance(weighted, i * width), advance(scores, i * BLOCK)
                _add_seen_values(row_scores, position + i // per_kv, key, rule, value_block, row_weighted, width)
            whole_weighted = advance(weighted, whole * width)
            _add_weighted_values(advance(scores, whole * BLOCK), partly - whole, value_block, whole_weighted, width)
        for i in range(count):
            head, source = kv_head * per_kv + i % per_kv, advance(weighted, i * width)
            if partial < 0:
                target_row = advance(out, ((first_row + i // per_kv) * heads + head) * dim)
                factor = ONE / sums[i]
                for j in range(dim):
                    store(target_row, j, source[j] * factor)
            else:
                row_partial = partial + i // per_kv * num_parts
                partial_row = advance(partials, (row_partial * heads + head) * (dim + 2))
                partial_row[0], partial_row[1] = maxima[i], sums[i]
                copy(source, advance(partial_row, 2), dim)
    buffer[0] = np.float32(0)


@kernel({dtype: (F32, I32, INT, INT, F32, INT, x) for dtype, x in ELEMENTS.items()})
def _merge(
    begin: int, end: int, partials: Any, merges: Any, heads: int, dim: int, sinks: Any, has_sinks: int, out: Any
) -> None:
    """Items: rows whose keys were cut in parts, times heads."""
    weighted = np.empty(dim, np.float32)
    for item in range(begin, end):
        merge, head = advance(merges, item // heads * MERGE_COLUMNS), item % heads
        first, count = np.int64(merge[1]), np.int64(merge[2])
        largest = sinks[head] if has_sinks else _LOWEST
        for part in range(first, first + count):
            largest = max(largest, partials[(part * heads + head) * (dim + 2)])
        total = exp(sinks[head] - largest) if has_sinks else np.float32(0)
        weighted[:] = np.float32(0)
        for part in range(first, first + count):
            partial = advance(partials, (part * heads + head) * (dim + 2))
            factor = exp(partial[0] - largest)
            total += factor * partial[1]
            for j in range(dim):
                weighted[j] += factor * partial[2 + j]
        target = advance(out, (np.int64(merge[0]) * heads + head) * dim)
        for j in range(dim):
            store(target, j, weighted[j] / total)


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: int,
    batch: Batch,
    rule: AttentionRule = FULL,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `Kernels.attention`."""
    metadata: CpuMetadata = batch.metadata  # type: ignore[assignment]
    _, heads, dim = q.shape
    _, kv_heads, page_size, _ = keys.shape
    make_out = torch.zeros_like if batch.host.has_nobodys_tokens else torch.empty_like
    out = make_out(q, memory_format=torch.contiguous_format)
    attend, merge, target = _attend[q.dtype, keys.dtype], _merge[q.dtype], out.data_ptr()
    pages = keys.data_ptr(), *keys.stride()[:3], values.data_ptr(), *values.stride()[:3]
    operands = *row_args(q), q.stride(1), *pages, *row_args(batch.block_tables[group])
    sizes = page_size, heads, kv_heads, dim, -(-dim // WIDTH) * WIDTH
    logits = None if sinks is None else sinks.float().contiguous()
    reach, of_sinks = reach_of(rule), optional_arg(logits)
    limits = *reach, rule.softcap or 0.0, *of_sinks, rule.scale or dim**-0.5

    def run() -> None:
        work = metadata.work_for(reach)
        tiles, merges, count = work.tiles, work.merges, work.num_partials
        partials = torch.empty(count * heads * (dim + 2))
        cost, address = work.num_pairs * heads * dim // 6, partials.data_ptr()
        items = tiles.num_rows * kv_heads
        attend(items, cost, *operands, tiles.address, work.max_rows, *sizes, *limits, address, target)
        if count:
            rows = merges.num_rows * heads
            merge(rows, partials.numel(), address, merges.address, heads, dim, *of_sinks, target)

    call_again(run)
    return out
