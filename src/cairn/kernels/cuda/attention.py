"""Attention straight on the pages, with an online softmax in float32.

Prefill is FlashAttention-2 (arXiv 2307.08691, section 3): a program has a tile of rows, which are pairs of a token and
a query head of one key head's group, so that keys and values are read once for all query heads that share them. Decode
is split over the keys as well (flash decoding, by the same authors): the parts' outputs and the logarithms of their
sums are put together by a second kernel. It is bound by memory; what it needs is enough loads under way. A token of a
verify is a decode of its own length, by the same code: `slots` and `seq_lens` are its row's then.

A prefill row's result does not depend on the rest of the batch: tiles lie on the absolute grid of chunks, and keys are
added block by block from position 0 on. A decode's depends on the split length, which is fixed where it must not.

In a CUDA graph nobody on the host knows the lengths. As many parts are launched there for every sequence as are enough
for the longest one, each sequence is cut into so many equal ones, of MIN_SPLIT keys at least, and those too many end at
once.
"""

from math import log2
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.kernels.batch import CHUNK, Batch
from cairn.kernels.cuda.device import kernel, limits, power_of_2
from cairn.kernels.cuda.metadata import CudaMetadata
from cairn.kernels.cuda_support import check_model

_TILE_ROWS = (64, 128)
"""Of a prefill tile in bfloat16, tokens times the group's query heads: with heads of at most 128, and with wider ones,
which leave room for a single program on a multiprocessor anyway."""

MIN_SPLIT, MAX_SPLIT, MAX_SPLITS = 128, 2048, 128
"""Keys of a decode's part: what starting a program is worth; what evens out sequences of different lengths. The last is
the number of parts where there would be more, unless they come to MAX_SPLIT then."""

MOST_CAPTURED = 16_384
"""Programs of a decode in a CUDA graph, unless fewer would leave multiprocessors without: of short sequences most have
nothing to do, and starting one takes time all the same. Not measured."""

FIXED_SPLIT = 1024
"""Keys of a part where a decode's result must not depend on the rest of the batch."""

PROGRAMS_PER_MULTIPROCESSOR = 3
"""What fits onto one at a time, about: more parts than that would only wait."""

_COMBINED = (16, 64)
"""Parts that are put together at a time: of few, and of more."""


@triton.jit
def _pages(table, first, end, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Pages of positions [first, first + BLOCK), first a multiple of BLOCK: one number where they lie in one page.
    Entries of the table for positions at and after `end` are not read."""
    if PAGE_SIZE % BLOCK == 0:
        pages = tl.load(table + first // PAGE_SIZE, mask=first < end, other=0)
    else:
        positions = first + tl.arange(0, BLOCK)
        pages = tl.load(table + positions // PAGE_SIZE, mask=positions < end, other=0)
    return pages


@triton.jit
def _rows(x, offsets, mask, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Rows of DIM numbers at the offsets, zeros after them; zeros where masked."""
    dims = tl.arange(0, DIM_BLOCK)
    places = x + offsets[:, None] + dims[None, :]
    if MASKED and DIM != DIM_BLOCK:
        rows = tl.load(places, mask=mask[:, None] & (dims < DIM)[None, :], other=0.0)
    elif MASKED:
        rows = tl.load(places, mask=mask[:, None], other=0.0)
    elif DIM != DIM_BLOCK:
        rows = tl.load(places, mask=(dims < DIM)[None, :], other=0.0)
    else:
        rows = tl.load(places)
    return rows


@triton.jit
def _attend(
    total, largest, weight, pages, q, seen, first, end, table, keys, values,
    key_page, key_token, value_page, value_token,
    SCALE: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the keys at positions [first, first + BLOCK) to the weighted values' total, the largest score and the sum of
    the weights of each row; `pages` are the block's, and the next one's are given back: loads of keys and values can
    then be sent for some blocks ahead without waiting for the table. If MASKED, a row's keys at and after `seen` do
    not count and those at and after `end` are not read. Every row must have seen a key after its first block."""
    positions = first + tl.arange(0, BLOCK)
    tokens = first % PAGE_SIZE + tl.arange(0, BLOCK) if PAGE_SIZE % BLOCK == 0 else positions % PAGE_SIZE
    wide = pages.to(tl.int64)
    there = positions < end
    k = _rows(keys, wide * key_page + tokens * key_token, there, DIM, DIM_BLOCK, MASKED)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        scores = tl.where(positions[None, :] < seen[:, None], scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1) * SCALE)
    weights = tl.exp2(scores * SCALE - new_largest[:, None])
    shrink = tl.exp2(largest - new_largest)
    weight = weight * shrink + tl.sum(weights, axis=1)
    v = _rows(values, wide * value_page + tokens * value_token, there, DIM, DIM_BLOCK, MASKED)
    total = tl.dot(weights.to(v.dtype), v, total * shrink[:, None], input_precision="ieee")
    return total, new_largest, weight, _pages(table, first + BLOCK, end, PAGE_SIZE, BLOCK)


@kernel
def _prefill_kernel(
    q, keys, values, out, table, chunk_seqs, chunk_rows, cu_seqlens, seq_starts, slots,
    q_row, q_head, key_page, key_head, key_token, value_page, value_head, value_token, table_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr, SCALE: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The last chunks of a prompt see most keys: they begin first.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    head = program % KV_HEADS
    tile = program // KV_HEADS
    PARTS: tl.constexpr = CHUNK_TOKENS // TOKENS
    chunk = tile // PARTS
    seq = tl.load(chunk_seqs + chunk)
    first_row = tl.load(chunk_rows + chunk) + tile % PARTS * TOKENS
    begin_row = tl.load(cu_seqlens + seq)
    end_row = tl.load(cu_seqlens + seq + 1)
    if (first_row >= end_row) | (first_row + TOKENS <= begin_row):
        return
    first_position = tl.load(seq_starts + seq) + first_row - begin_row
    end = first_position + tl.minimum(TOKENS, end_row - first_row)

    pairs = tl.arange(0, TOKENS * GROUP_BLOCK)
    rows = first_row + pairs // GROUP_BLOCK
    members = pairs % GROUP_BLOCK
    seen = first_position + pairs // GROUP_BLOCK + 1
    there = (rows >= begin_row) & (rows < end_row) & (members < GROUP)
    heads = head * GROUP + members
    queries = _rows(q, rows.to(tl.int64) * q_row + heads * q_head, there, DIM, DIM_BLOCK, True)

    seq_table = table + tl.load(slots + seq).to(tl.int64) * table_row
    head_keys = keys + head.to(tl.int64) * key_head
    head_values = values + head.to(tl.int64) * value_head
    total = tl.zeros([TOKENS * GROUP_BLOCK, DIM_BLOCK], tl.float32)
    largest = tl.full([TOKENS * GROUP_BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([TOKENS * GROUP_BLOCK], tl.float32)
    pages = _pages(seq_table, 0, end, PAGE_SIZE, BLOCK)
    # Whole blocks that every row sees; then those with the rows' own positions.
    seen_by_all = (first_position + 1) // BLOCK * BLOCK
    for first in range(0, seen_by_all, BLOCK):
        total, largest, weight, pages = _attend(
            total, largest, weight, pages, queries, seen, first, end, seq_table, head_keys, head_values,
            key_page, key_token, value_page, value_token, SCALE, DIM, DIM_BLOCK, PAGE_SIZE, BLOCK, False,
        )  # fmt: skip
    for first in range(seen_by_all, end, BLOCK):
        total, largest, weight, pages = _attend(
            total, largest, weight, pages, queries, seen, first, end, seq_table, head_keys, head_values,
            key_page, key_token, value_page, value_token, SCALE, DIM, DIM_BLOCK, PAGE_SIZE, BLOCK, True,
        )  # fmt: skip

    dims = tl.arange(0, DIM_BLOCK)
    places = (rows.to(tl.int64) * (KV_HEADS * GROUP) + heads) * DIM
    mask = there[:, None] & (dims < DIM)[None, :]
    result = total / weight[:, None]
    tl.store(out + places[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _part_length(length, split_length, num_splits, LEAST: tl.constexpr):
    """Keys of a part: `split_length`, or if that is 0 what makes at most `num_splits` parts of the sequence, a multiple
    of LEAST."""
    even = tl.cdiv(tl.cdiv(length, num_splits), LEAST) * LEAST
    return tl.where(split_length > 0, split_length, tl.maximum(even, LEAST))


@kernel
def _decode_kernel(
    q, keys, values, out, parts, part_weights, table, slots, seq_lens,
    q_row, q_head, key_page, key_head, key_token, value_page, value_head, value_token, table_row,
    split_length,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, SCALE: tl.constexpr, DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    length = tl.load(seq_lens + seq)
    part_length = _part_length(length, split_length, tl.num_programs(0), LEAST)
    begin = split * part_length
    if begin >= length:
        return
    end = tl.minimum(begin + part_length, length)

    members = tl.arange(0, GROUP_BLOCK)
    heads = head * GROUP + members
    queries = _rows(q, seq.to(tl.int64) * q_row + heads * q_head, members < GROUP, DIM, DIM_BLOCK, True)
    seq_table = table + tl.load(slots + seq).to(tl.int64) * table_row
    head_keys = keys + head.to(tl.int64) * key_head
    head_values = values + head.to(tl.int64) * value_head
    total = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    largest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP_BLOCK], tl.float32)
    seen = tl.zeros([GROUP_BLOCK], tl.int32) + end
    pages = _pages(seq_table, begin, end, PAGE_SIZE, BLOCK)
    # One loop with masks: a tail of its own would have to wait for its loads.
    for first in range(begin, end, BLOCK):
        total, largest, weight, pages = _attend(
            total, largest, weight, pages, queries, seen, first, end, seq_table, head_keys, head_values,
            key_page, key_token, value_page, value_token, SCALE, DIM, DIM_BLOCK, PAGE_SIZE, BLOCK, True,
        )  # fmt: skip

    dims = tl.arange(0, DIM_BLOCK)
    mask = (members < GROUP)[:, None] & (dims < DIM)[None, :]
    result = total / weight[:, None]
    rows = seq.to(tl.int64) * (tl.num_programs(1) * GROUP) + heads
    if SPLIT:
        rows = rows * tl.num_programs(0) + split
        tl.store(part_weights + rows, largest + tl.log2(weight), mask=members < GROUP)
        tl.store(parts + rows[:, None] * DIM + dims[None, :], result, mask=mask)
    else:
        tl.store(out + rows[:, None] * DIM + dims[None, :], result.to(out.dtype.element_ty), mask=mask)


@kernel
def _combine_kernel(
    parts, part_weights, seq_lens, out, split_length, num_splits,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """The parts' outputs, weighted by their sums of weights, of which the logarithm to base 2 is known. Zeros for a
    sequence without keys, which is a padding row."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    length = tl.load(seq_lens + seq)
    count = tl.cdiv(length, _part_length(length, split_length, num_splits, LEAST))
    row = seq.to(tl.int64) * tl.num_programs(0) + head
    dims = tl.arange(0, DIM_BLOCK)
    total = tl.zeros([DIM_BLOCK], tl.float32)
    largest = tl.max(tl.full([BLOCK], float("-inf"), tl.float32), axis=0)
    weight = tl.sum(tl.zeros([BLOCK], tl.float32), axis=0)
    for first in range(0, count, BLOCK):
        splits = first + tl.arange(0, BLOCK)
        there = splits < count
        logs = tl.load(part_weights + row * num_splits + splits, mask=there, other=float("-inf"))
        part = _rows(parts, (row * num_splits + splits) * DIM, there, DIM, DIM_BLOCK, True)
        new_largest = tl.maximum(largest, tl.max(logs, axis=0))
        weights = tl.exp2(logs - new_largest)
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights[:, None] * part, axis=0)
        weight = weight * shrink + tl.sum(weights, axis=0)
        largest = new_largest
    result = tl.where(count > 0, total / weight, 0.0)
    tl.store(out + row * DIM + dims, result.to(out.dtype.element_ty), mask=dims < DIM)


Tile = tuple[dict[str, Any], dict[str, int]]
"""Constants and options of a kernel."""


def _shapes(heads: int, kv_heads: int, dim: int, page_size: int) -> dict[str, Any]:
    return {
        "GROUP": heads // kv_heads,
        "SCALE": dim**-0.5 * log2(2.718281828459045),
        "DIM": dim,
        "DIM_BLOCK": power_of_2(dim, 16),
        "PAGE_SIZE": page_size,
    }


def _prefill_tile(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, page_size: int) -> Tile:
    shapes = _shapes(heads, kv_heads, dim, page_size)
    group_block = power_of_2(shapes["GROUP"])
    if dtype == torch.bfloat16:
        rows, block, options = _tensor_core_tile(shapes["DIM_BLOCK"])
    else:
        # Exact products are made without tensor cores, their operands lie in registers: little fits, and least of all
        # where a block's keys lie in several pages.
        rows, block, options = 32 if dim <= 128 else 16, 16 if page_size % 32 else 32, {"num_warps": 8, "num_stages": 1}
    constants = {
        "KV_HEADS": kv_heads,
        "GROUP_BLOCK": group_block,
        "TOKENS": min(CHUNK, max(1, rows // group_block)),
        "CHUNK_TOKENS": CHUNK,
        "BLOCK": block,
        **shapes,
    }
    return constants, options


def _tensor_core_tile(width: int) -> tuple[int, int, dict[str, int]]:
    """Rows of a prefill tile, keys of a block, and how it is launched, for heads padded to `width` numbers: as much as
    shared memory has room for. A100s have 163 KiB of it, GPUs of capability 8.6, 8.9 and 12.0 have 99."""
    if width <= 128:
        return _TILE_ROWS[0], 64, {"num_warps": 4, "num_stages": 3}
    rows, room = _TILE_ROWS[1], limits().shared_memory
    if 2 * (2 * 64 * 2 + rows) * width + 4096 <= room:
        return rows, 64, {"num_warps": 8, "num_stages": 2}
    if 2 * (3 * 32 * 2 + rows) * width <= room:
        return rows, 32, {"num_warps": 8, "num_stages": 3}
    return rows // 2, 32, {"num_warps": 8, "num_stages": 2}


def _decode_tile(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, page_size: int, split: bool) -> Tile:
    shapes = _shapes(heads, kv_heads, dim, page_size)
    low = dtype == torch.bfloat16
    constants = {
        "GROUP_BLOCK": power_of_2(shapes["GROUP"], 16),
        "BLOCK": 64 if low and dim <= 128 else 32,
        "SPLIT": split,
        "LEAST": MIN_SPLIT,
        **shapes,
    }
    return constants, {"num_warps": 4, "num_stages": 3} if low else {"num_warps": 8, "num_stages": 2}


def split_length(num_decodes: int, kv_heads: int, longest: int, multiprocessors: int = 132, fixed: bool = False) -> int:
    """Keys of a decode's part, a multiple of 64: as long as the multiprocessors have enough to do."""
    if fixed:
        return FIXED_SPLIT
    splits = max(1, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // (num_decodes * kv_heads))
    num_keys = min(max(-(-longest // splits), MIN_SPLIT), MAX_SPLIT)
    return -(-max(num_keys, -(-longest // MAX_SPLITS)) // 64) * 64


def captured_splits(num_decodes: int, kv_heads: int, longest: int, multiprocessors: int = 132) -> int:
    """Parts of every sequence of a CUDA graph: so that one sequence keeps the multiprocessors busy, and that parts of
    the longest have at most MAX_SPLIT keys where that takes no more than MOST_CAPTURED programs."""
    programs = num_decodes * kv_heads
    busy = max(1, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // programs)
    splits = max(busy, min(-(-longest // MAX_SPLIT), MOST_CAPTURED // programs))
    return min(splits, MAX_SPLITS, -(-longest // MIN_SPLIT))


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: int,
    batch: Batch,
    rule: AttentionRule = FULL,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `Kernels.attention`. Raises ConfigError for a dtype or a head dim that the kernels do not take."""
    if rule != FULL or sinks is not None:
        raise NotImplementedError(f"attention by {rule} is not made by this backend yet: take exact")
    check_model(q.dtype, q.shape[2])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    metadata: CudaMetadata = batch.metadata  # type: ignore[assignment]
    if metadata.num_chunks:
        _prefill(q, keys, values, out, batch.block_tables[group], batch, metadata)
    if batch.host.num_decode_tokens:
        _decode(q, keys, values, out, batch.block_tables[group], batch, metadata)
    return out


def _prefill(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, table: Tensor, batch: Batch, metadata: CudaMetadata
) -> None:
    kv_heads, page_size = keys.shape[1:3]
    constants, options = _prefill_tile(q.dtype, q.shape[1], kv_heads, q.shape[2], page_size)
    _prefill_kernel[(metadata.num_chunks * (CHUNK // constants["TOKENS"]) * kv_heads,)](
        *(q, keys, values, out, table),
        *(metadata.chunk_seqs, metadata.chunk_rows, batch.cu_seqlens, batch.seq_starts, batch.slots),
        *(*q.stride()[:2], *keys.stride()[:3], *values.stride()[:3], table.stride(0)),
        **constants,
        **options,
    )


def _decode(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, table: Tensor, batch: Batch, metadata: CudaMetadata
) -> None:
    host, fixed = batch.host, metadata.exact
    num_decodes, (heads, dim), (kv_heads, page_size) = host.num_decode_tokens, q.shape[1:], keys.shape[1:3]
    slots, seq_lens = batch.slots, batch.seq_lens
    if metadata.has_verifies:
        slots, seq_lens = metadata.row_slots, metadata.row_lens
    captured = host.max_seq_len
    if captured is not None and not fixed:
        length, splits = 0, captured_splits(num_decodes, kv_heads, captured, limits().multiprocessors)
    else:
        longest = int(host.seq_lens[: host.first_prefill].max()) if captured is None else captured
        length = split_length(num_decodes, kv_heads, longest, limits().multiprocessors, fixed)
        splits = -(-longest // length)
    # Of a fixed length even one part goes the way of several, so that it is computed by the same code. So does one of a
    # graph: padding rows get their zeros where parts are put together.
    split = splits > 1 or fixed or captured is not None
    constants, options = _decode_tile(q.dtype, heads, kv_heads, dim, page_size, split)
    parts = part_weights = out
    if split:
        parts = torch.empty((num_decodes, heads, splits, dim), dtype=torch.float32, device=q.device)
        part_weights = torch.empty((num_decodes, heads, splits), dtype=torch.float32, device=q.device)
    _decode_kernel[(splits, kv_heads, num_decodes)](
        *(q, keys, values, out, parts, part_weights, table, slots, seq_lens),
        *(*q.stride()[:2], *keys.stride()[:3], *values.stride()[:3], table.stride(0), length),
        **constants,
        **options,
    )
    if split:
        _combine_kernel[(heads, num_decodes)](
            *(parts, part_weights, seq_lens, out, length, splits),
            DIM=dim,
            DIM_BLOCK=constants["DIM_BLOCK"],
            BLOCK=_COMBINED[splits > _COMBINED[0] and not fixed],
            LEAST=MIN_SPLIT,
            num_warps=4,
        )
