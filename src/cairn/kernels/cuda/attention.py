"""Attention straight on the pages, with an online softmax in float32.

Prefill is FlashAttention-2 (arXiv 2307.08691, section 3): a program has a tile of rows, which are pairs of a token and
a query head of one key head's group, so that keys and values are read once for all query heads that share them. Decode
is split over the keys as well (flash decoding, by the same authors): the parts' outputs and the logarithms of their
sums are put together by a second kernel. It is bound by memory; what it needs is enough loads under way. A token of a
verify is a decode of its own length, by the same code: `slots` and `seq_lens` are its row's then.

A prefill row's result does not depend on the rest of the batch: tiles lie on the absolute grid of chunks, and keys are
added block by block from position 0 on. A decode's depends on the split length, which is fixed where it must not.

Of a limited reach a prefill tile begins at the block of the first key that it sees, and what a decode sees is cut in
parts from such a block on: nothing before is read, and the cost is the reach's. Sinks are what the sums begin with.

In a CUDA graph nobody on the host knows the lengths. As many parts are launched there for every sequence as are enough
for the longest one, each sequence is cut into so many equal ones, of MIN_SPLIT keys at least, and those too many end at
once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.kernels.batch import CHUNK, Batch
from cairn.kernels.cuda.attention_tiles import MAX_BLOCK, MIN_SPLIT, decode_tile, prefill_tile, reach_constants
from cairn.kernels.cuda.device import kernel, limits
from cairn.kernels.cuda.metadata import CudaMetadata
from cairn.kernels.cuda.scalars import tanh
from cairn.kernels.cuda_support import check_model

MAX_SPLIT, MAX_SPLITS = 2048, 128
"""Keys of a decode's part: what evens out sequences of different lengths. The other is the number of parts where there
would be more, unless they come to MAX_SPLIT then."""

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
def _first_key(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """See `AttentionRule.first_key`; 0 for no window, and for no chunk. A position of -1 is that of a padding row."""
    if WINDOW > 0:
        first = tl.maximum(position - (WINDOW - 1), 0)
    elif CHUNK > 0:
        first = tl.maximum(position, 0) // CHUNK * CHUNK
    else:
        first = 0
    return first


@triton.jit
def _pages(table, lowest, first, end, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, LIMITED: tl.constexpr):
    """Pages of positions [first, first + BLOCK), first a multiple of BLOCK: one number where they lie in one page.
    Entries of the table for positions at and after `end` are not read, and if LIMITED those before `lowest`, which lies
    in the first block that is asked for."""
    if PAGE_SIZE % BLOCK == 0:
        pages = tl.load(table + first // PAGE_SIZE, mask=first < end, other=0)
    else:
        positions = first + tl.arange(0, BLOCK)
        there = positions < end
        if LIMITED:
            there = there & (positions >= lowest)
        pages = tl.load(table + positions // PAGE_SIZE, mask=there, other=0)
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
    total, largest, weight, pages, q, unseen, seen, lowest, first, end, table, keys, values,
    key_page, key_token, value_page, value_token,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr, LIMITED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the keys at positions [first, first + BLOCK) to the weighted values' total, the largest score and the sum of
    the weights of each row; `pages` are the block's, and the next one's are given back: loads of keys and values can
    then be sent for some blocks ahead without waiting for the table. If MASKED, a row's keys at and after `seen` do
    not count and those at and after `end` are not read. Every row must have seen a key after its first block, unless
    LIMITED: then a row's keys before `unseen` do not count, either, and those before `lowest` are not read."""
    positions = first + tl.arange(0, BLOCK)
    tokens = first % PAGE_SIZE + tl.arange(0, BLOCK) if PAGE_SIZE % BLOCK == 0 else positions % PAGE_SIZE
    wide = pages.to(tl.int64)
    there = positions < end
    if LIMITED:
        there = there & (positions >= lowest)
    k = _rows(keys, wide * key_page + tokens * key_token, there, DIM, DIM_BLOCK, MASKED)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    FACTOR: tl.constexpr = 1.0 if SOFTCAP > 0 else SCALE
    if SOFTCAP > 0:
        scores = SOFTCAP * tanh(scores * SCALE)
    if MASKED:
        scores = tl.where(positions[None, :] < seen[:, None], scores, float("-inf"))
        if LIMITED:
            scores = tl.where(positions[None, :] >= unseen[:, None], scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1) * FACTOR)
    beside = new_largest
    if LIMITED:
        # Of rows that have seen nothing yet.
        beside = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores * FACTOR - beside[:, None])
    shrink = tl.exp2(largest - beside)
    weight = weight * shrink + tl.sum(weights, axis=1)
    v = _rows(values, wide * value_page + tokens * value_token, there, DIM, DIM_BLOCK, MASKED)
    total = tl.dot(weights.to(v.dtype), v, total * shrink[:, None], input_precision="ieee")
    return total, new_largest, weight, _pages(table, lowest, first + BLOCK, end, PAGE_SIZE, BLOCK, LIMITED)


@triton.jit
def _begin_sums(sinks, heads, there, ROWS: tl.constexpr, SINKS: tl.constexpr):
    """Largest score and sum of weights of each row before it has seen a key: of its head's sink, or nothing."""
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    if SINKS:
        logits = tl.load(sinks + heads, mask=there, other=float("-inf")).to(tl.float32)
        largest = logits * 1.4426950408889634
        weight = tl.where(there, 1.0, 0.0)
    return largest, weight


@kernel
def _prefill_kernel(
    q, keys, values, sinks, out, table, chunk_seqs, chunk_rows, cu_seqlens, seq_starts, slots,
    q_row, q_head, key_page, key_head, key_token, value_page, value_head, value_token, table_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SINKS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
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
    start = tl.load(seq_starts + seq)
    first_position = start + first_row - begin_row
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
    largest, weight = _begin_sums(sinks, heads, there, TOKENS * GROUP_BLOCK, SINKS)
    LIMITED: tl.constexpr = WINDOW + CHUNK > 0
    lowest = _first_key(tl.maximum(first_position, start), WINDOW, CHUNK)
    unseen = _first_key(seen - 1, WINDOW, CHUNK)
    begin = lowest // BLOCK * BLOCK
    pages = _pages(seq_table, lowest, begin, end, PAGE_SIZE, BLOCK, LIMITED)
    # Whole blocks that every row sees, between those with the rows' own positions and those where some no longer see.
    seen_by_all = (first_position + 1) // BLOCK * BLOCK
    if LIMITED:
        last_unseen = tl.cdiv(_first_key(end - 1, WINDOW, CHUNK), BLOCK) * BLOCK
        for first in range(begin, last_unseen, BLOCK):
            total, largest, weight, pages = _attend(
                total, largest, weight, pages, queries, unseen, seen, lowest, first, end, seq_table, head_keys,
                head_values, key_page, key_token, value_page, value_token, SCALE, SOFTCAP, DIM, DIM_BLOCK, PAGE_SIZE,
                BLOCK, True, True,
            )  # fmt: skip
        begin = last_unseen
        seen_by_all = tl.maximum(seen_by_all, begin)
    for first in range(begin, seen_by_all, BLOCK):
        total, largest, weight, pages = _attend(
            total, largest, weight, pages, queries, unseen, seen, lowest, first, end, seq_table, head_keys,
            head_values, key_page, key_token, value_page, value_token, SCALE, SOFTCAP, DIM, DIM_BLOCK, PAGE_SIZE,
            BLOCK, False, False,
        )  # fmt: skip
    for first in range(seen_by_all, end, BLOCK):
        total, largest, weight, pages = _attend(
            total, largest, weight, pages, queries, unseen, seen, lowest, first, end, seq_table, head_keys,
            head_values, key_page, key_token, value_page, value_token, SCALE, SOFTCAP, DIM, DIM_BLOCK, PAGE_SIZE,
            BLOCK, LIMITED, True,
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
    q, keys, values, sinks, out, parts, part_weights, table, slots, seq_lens,
    q_row, q_head, key_page, key_head, key_token, value_page, value_head, value_token, table_row,
    split_length,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, SINKS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    length = tl.load(seq_lens + seq)
    lowest = _first_key(length - 1, WINDOW, CHUNK)
    first_block = lowest // BLOCK * BLOCK
    part_length = _part_length(length - first_block, split_length, tl.num_programs(0), LEAST)
    begin = first_block + split * part_length
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
    # A sink is in the first part.
    largest, weight = _begin_sums(sinks, heads, (members < GROUP) & (split == 0), GROUP_BLOCK, SINKS)
    LIMITED: tl.constexpr = WINDOW + CHUNK > 0
    seen = tl.zeros([GROUP_BLOCK], tl.int32) + end
    unseen = tl.zeros([GROUP_BLOCK], tl.int32) + lowest
    pages = _pages(seq_table, lowest, begin, end, PAGE_SIZE, BLOCK, LIMITED)
    # One loop with masks: a tail of its own would have to wait for its loads.
    for first in range(begin, end, BLOCK):
        total, largest, weight, pages = _attend(
            total, largest, weight, pages, queries, unseen, seen, lowest, first, end, seq_table, head_keys,
            head_values, key_page, key_token, value_page, value_token, SCALE, SOFTCAP, DIM, DIM_BLOCK, PAGE_SIZE,
            BLOCK, LIMITED, True,
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
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, KEY_BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """The parts' outputs, weighted by their sums of weights, of which the logarithm to base 2 is known. Zeros for a
    sequence without keys, which is a padding row. KEY_BLOCK: the decode's BLOCK."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    length = tl.load(seq_lens + seq)
    length -= _first_key(length - 1, WINDOW, CHUNK) // KEY_BLOCK * KEY_BLOCK
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


def _most_keys(longest: int, rule: AttentionRule) -> int:
    """That a decode of a sequence of at most so many tokens goes through: from a block's beginning on."""
    return longest if rule.reach is None else min(longest, rule.reach + MAX_BLOCK)


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
    check_model(q.dtype, q.shape[2])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    metadata: CudaMetadata = batch.metadata  # type: ignore[assignment]
    if metadata.num_chunks:
        _prefill(q, keys, values, out, batch.block_tables[group], batch, metadata, rule, sinks)
    if batch.host.num_decode_tokens:
        _decode(q, keys, values, out, batch.block_tables[group], batch, metadata, rule, sinks)
    return out


def _prefill(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, table: Tensor, batch: Batch, metadata: CudaMetadata,
    rule: AttentionRule, sinks: Tensor | None,
) -> None:  # fmt: skip
    kv_heads, page_size = keys.shape[1:3]
    constants, options = prefill_tile(q.dtype, q.shape[1], kv_heads, q.shape[2], page_size, rule, sinks is not None)
    _prefill_kernel[(metadata.num_chunks * (CHUNK // constants["TOKENS"]) * kv_heads,)](
        *(q, keys, values, out if sinks is None else sinks, out, table),
        *(metadata.chunk_seqs, metadata.chunk_rows, batch.cu_seqlens, batch.seq_starts, batch.slots),
        *(*q.stride()[:2], *keys.stride()[:3], *values.stride()[:3], table.stride(0)),
        **constants,
        **options,
    )


def _decode(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, table: Tensor, batch: Batch, metadata: CudaMetadata,
    rule: AttentionRule, sinks: Tensor | None,
) -> None:  # fmt: skip
    host, fixed = batch.host, metadata.exact
    num_decodes, (heads, dim), (kv_heads, page_size) = host.num_decode_tokens, q.shape[1:], keys.shape[1:3]
    slots, seq_lens = batch.slots, batch.seq_lens
    if metadata.has_verifies:
        slots, seq_lens = metadata.row_slots, metadata.row_lens
    captured = host.max_seq_len
    if captured is not None and not fixed:
        most = _most_keys(captured, rule)
        length, splits = 0, captured_splits(num_decodes, kv_heads, most, limits().multiprocessors)
    else:
        longest = int(host.seq_lens[: host.first_prefill].max()) if captured is None else captured
        longest = _most_keys(longest, rule)
        length = split_length(num_decodes, kv_heads, longest, limits().multiprocessors, fixed)
        splits = -(-longest // length)
    # Of a fixed length even one part goes the way of several, so that it is computed by the same code. So does one of a
    # graph: padding rows get their zeros where parts are put together.
    split = splits > 1 or fixed or captured is not None
    constants, options = decode_tile(q.dtype, heads, kv_heads, dim, page_size, split, rule, sinks is not None)
    parts = part_weights = out
    if split:
        parts = torch.empty((num_decodes, heads, splits, dim), dtype=torch.float32, device=q.device)
        part_weights = torch.empty((num_decodes, heads, splits), dtype=torch.float32, device=q.device)
    _decode_kernel[(splits, kv_heads, num_decodes)](
        *(q, keys, values, out if sinks is None else sinks, out, parts, part_weights, table, slots, seq_lens),
        *(*q.stride()[:2], *keys.stride()[:3], *values.stride()[:3], table.stride(0), length),
        **constants,
        **options,
    )
    if split:
        _combine_kernel[(heads, num_decodes)](
            *(parts, part_weights, seq_lens, out, length, splits),
            **reach_constants(rule),
            KEY_BLOCK=constants["BLOCK"],
            DIM=dim,
            DIM_BLOCK=constants["DIM_BLOCK"],
            BLOCK=_COMBINED[splits > _COMBINED[0] and not fixed],
            LEAST=MIN_SPLIT,
            num_warps=4,
        )
