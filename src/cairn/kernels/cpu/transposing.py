"""Transposes of matrices of words, and of codes of four bits in their words, as checkpoints have some across."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.cpu.compiled import I32, I64, INT, kernel
from cairn.kernels.cpu.scalars import advance
from cairn.kernels.cpu.vectors import LANES, pointer_to, transpose_16, transpose_nibbles

_WORD_RATE = 1
"""Words that one thread transposes in a nanosecond."""

_CODES = 8
"""Of a word."""


def transpose_words(words: Tensor) -> Tensor:
    """int32 [n, m], rows contiguous -> [m, n]."""
    height, width = words.shape
    out = words.new_empty(width, height)
    items = -(-width // LANES)
    _transpose_words["words"](
        items, out.numel() // _WORD_RATE, words.data_ptr(), words.stride(0), height, width, out.data_ptr()
    )
    return out


def transpose_codes(words: Tensor, order: Sequence[int]) -> Tensor:
    """int32 [8 n, m], rows contiguous, of 8 m codes -> [8 m, n]. `order`: of the columns in a word, from its lowest
    bits on."""
    height, width = words.shape
    out = words.new_empty(_CODES * width, height // _CODES)
    columns, items = torch.tensor(order), -(-width // LANES)
    _transpose_codes["words"](
        items, out.numel() // _WORD_RATE, words.data_ptr(), words.stride(0), height // _CODES, width,
        columns.data_ptr(), out.data_ptr(),
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
