"""Transposes of matrices of words, and of codes of four bits in their words, as checkpoints have some across; and codes
brought into another order."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.cpu.compiled import I32, I64, INT, kernel
from cairn.kernels.cpu.huge_pages import passing_memory
from cairn.kernels.cpu.scalars import advance
from cairn.kernels.cpu.vectors import LANES, pointer_to, transpose_16, transpose_nibbles

_WORD_RATE = 1
"""Words that one thread transposes in a nanosecond."""

_CODES = 8
"""Of a word."""

_ORDERED_AT_A_TIME = 64
"""Words of a row: of all rows these stay in the first cache."""


def transpose_words(words: Tensor) -> Tensor:
    """int32 [n, m], rows contiguous -> [m, n]."""
    height, width = words.shape
    out = passing_memory().empty((width, height), torch.int32)
    items = -(-width // LANES)
    _transpose_words["words"](
        items, out.numel() // _WORD_RATE, words.data_ptr(), words.stride(0), height, width, out.data_ptr()
    )
    return out


def transpose_codes(words: Tensor, order: Sequence[int]) -> Tensor:
    """int32 [8 n, m], rows contiguous, of 8 m codes -> [8 m, n]. `order`: of the columns in a word, from its lowest
    bits on."""
    height, width = words.shape
    out = passing_memory().empty((_CODES * width, height // _CODES), torch.int32)
    columns, items = torch.tensor(order), -(-width // LANES)
    _transpose_codes["words"](
        items, out.numel() // _WORD_RATE, words.data_ptr(), words.stride(0), height // _CODES, width,
        columns.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out


def order_codes(words: Tensor, order: Tensor, bits: int) -> Tensor:
    """int32 [n, m], rows contiguous, of whose columns each has 32 / bits n codes, from the lowest bits of the first row
    on -> codes `order` of each column, int64."""
    height, width = words.shape
    out, places = passing_memory().empty((height, width), torch.int32).zero_(), order.long()
    items = -(-width // _ORDERED_AT_A_TIME)
    _order_codes["words"](
        items, out.numel() // _WORD_RATE, words.data_ptr(), words.stride(0), height, width, places.data_ptr(), bits,
        out.data_ptr(),
    )  # fmt: skip
    return out


@kernel({"words": (I32, INT, INT, INT, I32)})
def _transpose_words(begin: int, end: int, source: Any, row: int, height: int, width: int, out: Any) -> None:
    """Items are 16 columns, of which the last one may have fewer."""
    for item in range(begin, end):
        first = item * LANES
        columns = min(LANES, width - first)
        tall = height // LANES * LANES if columns == LANES else 0
        for top in range(0, tall, LANES):
            transpose_16(advance(source, top * row + first), row, advance(out, first * height + top), height)
        for column in range(first, first + columns):
            for top in range(tall, height):
                out[column * height + top] = source[top * row + column]


@kernel({"words": (I32, INT, INT, INT, I64, I32)})
def _transpose_codes(
    begin: int, end: int, source: Any, row: int, blocks: int, width: int, order: Any, out: Any
) -> None:
    """Items are 16 columns of words, of which the last one may have fewer. Of 16 blocks of 8 rows all codes are
    transposed in their words, and then the words of each of eight columns."""
    buffer = np.empty(_CODES * LANES * LANES, np.int32)
    squares = pointer_to(buffer)
    for item in range(begin, end):
        first = item * LANES
        columns = min(LANES, width - first)
        tall = blocks // LANES * LANES if columns == LANES else 0
        for top in range(0, tall, LANES):
            for block in range(LANES):
                rows = advance(source, (top + block) * _CODES * row + first)
                transpose_nibbles(rows, row, advance(squares, block * LANES), LANES * LANES)
            for place in range(_CODES):
                target = advance(out, (_CODES * first + order[place]) * blocks + top)
                transpose_16(advance(squares, place * LANES * LANES), LANES, target, _CODES * blocks)
        for column in range(first, first + columns):
            for block in range(tall, blocks):
                for place in range(_CODES):
                    word = np.uint32(0)
                    for j in range(_CODES):
                        code = np.uint32(source[(block * _CODES + j) * row + column]) >> np.uint32(4 * place)
                        word |= (code & np.uint32(15)) << np.uint32(4 * j)
                    out[(_CODES * column + order[place]) * blocks + block] = np.int32(word)
    buffer[0] = 0


@kernel({"words": (I32, INT, INT, INT, I64, INT, I32)})
def _order_codes(
    begin: int, end: int, source: Any, row: int, height: int, width: int, order: Any, bits: int, out: Any
) -> None:
    """Items are 64 columns, of which the last one may have fewer. `out` is zero before."""
    in_word = 32 // bits
    kept = np.uint32((1 << bits) - 1)
    for item in range(begin, end):
        first = item * _ORDERED_AT_A_TIME
        columns = min(_ORDERED_AT_A_TIME, width - first)
        for line in range(height):
            target = advance(out, line * width + first)
            for place in range(in_word):
                number = np.uint64(order[line * in_word + place])
                words = advance(source, np.int64(number // np.uint64(in_word)) * row + first)
                down, up = np.uint32(bits * np.int64(number % np.uint64(in_word))), np.uint32(bits * place)
                for column in range(columns):
                    code = np.uint32(words[column]) >> down & kept
                    target[column] = np.int32(np.uint32(target[column]) | code << up)
