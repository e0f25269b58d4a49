"""Logits processors, and the counts of used tokens that penalties need, on the device.

A row that any of them changes is copied once: the masked row goes to `processed`, tile by tile, and one program a row
does what its lists of tokens say. Penalties are computed where the row is read next, in `sample._summarize_kernel`. NaN
is taken for minus infinity.

`counts` has one number for each slot and token: twice the times that the sequence's output has the token, and one more
if its prompt has it.
"""

import triton
import triton.language as tl

from cairn.kernels.cuda.device import kernel

COUNT_TILE = 1024
"""Tokens of histories, or counts to be cleared, that a program takes."""

LIST_TILE = 128
"""Tokens of a list that are looked at together."""


@triton.jit
def load_logits(base, columns, vocab):
    """Behind the vocabulary, and for NaN, minus infinity."""
    x = tl.load(base + columns, mask=columns < vocab, other=float("-inf"))
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def load_masked(base, columns, vocab, mask_words, has_mask):
    """As `load_logits`; minus infinity where the bit of a token is not set, if there is a mask."""
    x = load_logits(base, columns, vocab)
    words = tl.load(mask_words + columns // 32, mask=(columns < vocab) & has_mask, other=-1)
    return tl.where((words >> (columns % 32)) & 1 != 0, x, float("-inf"))


@kernel
def _clear_counts_kernel(counts, slots, vocab, TILE: tl.constexpr):
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    tl.store(counts + slot * vocab + columns, tl.zeros((TILE,), dtype=tl.int32), mask=columns < vocab)


@kernel
def _count_tokens_kernel(counts, slots, tokens, steps, num_rows, vocab, TILE: tl.constexpr):
    """`slots`, `tokens`, `steps` [num_rows]: what is added to which count; a token may come several times."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = rows < num_rows
    slot = tl.load(slots + rows, mask=there, other=0).to(tl.int64)
    token = tl.load(tokens + rows, mask=there, other=0)
    step = tl.load(steps + rows, mask=there, other=0)
    tl.atomic_add(counts + slot * vocab + token, step, mask=there, sem="relaxed")


@kernel
def _copy_kernel(
    logits, processed, rows, masks, mask_numbers, starts, live, vocab, stride, mask_stride,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """processed[edit] = the row under its mask; all of it minus infinity where only listed tokens may come, which
    `_edit_kernel` fills in. `live` [edits, TILES]: how many tokens the mask leaves."""
    edit, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    number = tl.load(mask_numbers + edit).to(tl.int64)
    base = logits + tl.load(rows + edit).to(tl.int64) * stride
    x = load_masked(base, columns, vocab, masks + number * mask_stride, number >= 0)
    tl.store(live + edit * TILES + tile, tl.sum((x > float("-inf")).to(tl.int32), axis=0))
    is_listed = tl.load(starts + edit + 1) > tl.load(starts + edit)
    tl.store(processed + edit * vocab + columns, tl.where(is_listed, float("-inf"), x), mask=columns < vocab)


@triton.jit
def _ban(row, tokens, start, end, num_live, LIST: tl.constexpr):
    """Minus infinity for the tokens of a list unless nothing would be left; returns how many are left."""
    banned = num_live * 0
    for first in range(start, end, LIST):
        places = first + tl.arange(0, LIST)
        token = tl.load(tokens + places, mask=places < end, other=0)
        x = tl.load(row + token, mask=places < end, other=float("-inf"))
        banned += tl.sum((x > float("-inf")).to(tl.int32), axis=0)
    if banned < num_live:
        for first in range(start, end, LIST):
            places = first + tl.arange(0, LIST)
            token = tl.load(tokens + places, mask=places < end, other=0)
            tl.store(row + token, tl.full((LIST,), float("-inf"), dtype=tl.float32), mask=places < end)
    tl.debug_barrier()
    return tl.where(banned < num_live, num_live - banned, num_live)


@kernel
def _edit_kernel(
    logits, processed, rows, masks, mask_numbers, starts, tokens, biases, live, num_edits, vocab, stride, mask_stride,
    TILE: tl.constexpr, TILES: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """The lists of one row, in vLLM's order: allowed tokens, two of banned ones, biases; `starts` [4, num_edits + 1]
    of each in `tokens`, a token once in a list. `biases`: beside `tokens`."""
    edit = tl.program_id(0).to(tl.int64)
    processed_row = processed + edit * vocab
    number = tl.load(mask_numbers + edit).to(tl.int64)
    base = logits + tl.load(rows + edit).to(tl.int64) * stride
    words = masks + number * mask_stride
    tiles = tl.arange(0, TILES)
    num_live = tl.sum(tl.load(live + edit * TILES + tiles, mask=tiles < tl.cdiv(vocab, TILE), other=0), axis=0)

    start, end = tl.load(starts + edit), tl.load(starts + edit + 1)
    if start < end:
        num_listed = num_live * 0
        for first in range(start, end, LIST):
            places = first + tl.arange(0, LIST)
            there = places < end
            token = tl.load(tokens + places, mask=there, other=0)
            x = load_masked(base, tl.where(there, token, vocab), vocab, words, number >= 0)
            tl.store(processed_row + token, x, mask=there)
            num_listed += tl.sum((x > float("-inf")).to(tl.int32), axis=0)
        tl.debug_barrier()
        if num_listed == 0:
            for first in range(0, vocab, TILE):
                columns = first + tl.arange(0, TILE)
                x = load_masked(base, columns, vocab, words, number >= 0)
                tl.store(processed_row + columns, x, mask=columns < vocab)
        num_live = tl.where(num_listed == 0, num_live, num_listed)
    tl.debug_barrier()
    table = starts + num_edits + 1 + edit
    num_live = _ban(processed_row, tokens, tl.load(table), tl.load(table + 1), num_live, LIST)
    table += num_edits + 1
    num_live = _ban(processed_row, tokens, tl.load(table), tl.load(table + 1), num_live, LIST)
    table += num_edits + 1
    end = tl.load(table + 1)
    for first in range(tl.load(table), end, LIST):
        places = first + tl.arange(0, LIST)
        token = tl.load(tokens + places, mask=places < end, other=0)
        x = tl.load(processed_row + token, mask=places < end, other=0.0)
        bias = tl.load(biases + places, mask=places < end, other=0.0)
        tl.store(processed_row + token, x + bias, mask=places < end)
