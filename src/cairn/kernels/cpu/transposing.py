"""Matrices of words of codes, as checkpoints have some across, transposed, joined along rows and brought into another
order."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.cpu.compiled import I32, I64, INT, U8, Kernel, kernel
from cairn.kernels.cpu.huge_pages import passing_memory
from cairn.kernels.cpu.packing import PackedLoop, packing
from cairn.kernels.cpu.scalars import advance
from cairn.kernels.cpu.tiles import PANEL
from cairn.kernels.cpu.vectors import (
    LANES,
    gather_codes_4,
    gather_codes_8,
    pointer_to,
    transpose_16,
    transpose_nibbles,
    weave_lines,
)

_WORD_RATE = 1
"""Words that one thread transposes in a nanosecond."""

_CODES = 8
"""Of a word."""

SORTED, MOVED, ABSENT, UNEVEN = range(4)
"""See `sort_by_group`."""

_ORDERED_AT_A_TIME = 64
"""Words of a row: of all rows these stay in the first cache."""

_PANELS_ORDERED = _ORDERED_AT_A_TIME // PANEL


def transpose_words(words: Tensor) -> Tensor:
    """int32 [n, m], rows contiguous -> [m, n]."""
    height, width = words.shape
    out = passing_memory().empty((width, height), torch.int32)
    places = words.data_ptr(), words.stride(0), height, width, out.data_ptr()
    return _made(_transpose_words, -(-width // LANES), places, out, words, num_bytes=out.nbytes)


def join_codes(words: Tensor, order: Sequence[int]) -> Tensor:
    """int32 [8 n, m], rows contiguous, of the codes of 8 m columns -> [n, 8 m], of eight rows'. `order`: of the columns
    in a word, from its lowest bits on."""
    height, width = words.shape
    blocks = height // _CODES
    out = passing_memory().empty((blocks, _CODES * width), torch.int32)
    columns, places = _columns_of(tuple(order))
    taken = words.data_ptr(), words.stride(0), width, columns.data_ptr(), places.data_ptr(), *_across(out)
    return _made(_join_codes, blocks, taken, out, words, moves=True)


def unpack_codes(words: Tensor, order: Sequence[int], added: int) -> Tensor:
    """int32 [n, m], rows contiguous -> codes of four bits plus `added`, modulo 16, uint8 [n, 8 m]. `order`: of the
    columns in a word, from its lowest bits on."""
    height, width = words.shape
    out, (columns, _) = torch.empty((height, _CODES * width), dtype=torch.uint8), _columns_of(tuple(order))
    places = words.data_ptr(), words.stride(0), width, columns.data_ptr(), added, out.data_ptr()
    return _made(_unpack_codes, height, places, out, words)


@cache
def _columns_of(order: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """int64, and its inverse."""
    columns = torch.tensor(order)
    return columns, columns.argsort()


def order_codes(words: Tensor, order: Tensor, bits: int) -> Tensor:
    """int32 [n, m], rows contiguous, of whose columns each has 32 / bits n codes, from the lowest bits of the first row
    on -> codes `order` of each column, int64."""
    height, width = words.shape
    out, places = passing_memory().empty((height, width), torch.int32), order.long()
    taken = words.data_ptr(), words.stride(0), height, width, places.data_ptr(), bits, *_across(out)
    return _made(_order_codes, -(-width // _ORDERED_AT_A_TIME), taken, out, words, places, moves=True)


def sort_by_group(groups: Tensor, num_groups: int, size: int) -> tuple[Tensor, int]:
    """int32 [n], the group of each -> int32 [n], those of the first group and then of the next ones, each in their
    order, and one of `SORTED`, `MOVED`, `ABSENT` where a group is -1, and `UNEVEN` where one has not `size` of them."""
    order, kind = torch.empty_like(groups), torch.empty(1, dtype=torch.int64)
    ends = torch.empty(num_groups, dtype=torch.int64)
    places = groups.data_ptr(), len(groups), num_groups, size, ends.data_ptr(), order.data_ptr(), kind.data_ptr()
    _sort_by_group["words"](1, 0, *places)
    return order, int(kind)


def _across(out: Tensor) -> tuple[int, int, int]:
    """Three arguments of a loop: the address, and how many words its lines, and 32 words of a line, are apart."""
    return out.data_ptr(), out.shape[1], PANEL


def _made(
    loop: Kernel, items: int, places: tuple[int, ...], out: Tensor, *taken: Tensor, moves: bool = False,
    num_bytes: int = 0,
) -> Tensor:  # fmt: skip
    """`moves`: see `PackedLoop.target`. `num_bytes`: of what waits for another loop than that which lays it out."""
    cost = out.nbytes // out.element_size() // _WORD_RATE
    target = out if moves else None
    packing().get_ready(PackedLoop(loop["words"], items, cost, num_bytes, places, (out, *taken), target))
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


@kernel({"words": (I32, INT, INT, I64, I64, I32, INT, INT)})
def _join_codes(
    begin: int, end: int, source: Any, row: int, width: int, order: Any, places: Any, out: Any, line: int, panel: int
) -> None:
    """Items are blocks of eight rows. Of 16 columns of words all codes are transposed in their words, and then the
    words of each column put side by side. `places`: the inverse of `order`. `line`, `panel`: see `_across`."""
    buffer = np.empty(_CODES * LANES, np.int32)
    squares = pointer_to(buffer)
    wide = width // LANES * LANES
    for item in range(begin, end):
        rows, target = advance(source, item * _CODES * row), advance(out, item * line)
        for first in range(0, wide, LANES):
            transpose_nibbles(advance(rows, first), row, squares, LANES)
            weave_lines(squares, places, advance(target, first * _CODES // PANEL * panel), panel)
        for column in range(wide, width):
            for place in range(_CODES):
                word = np.uint32(0)
                for j in range(_CODES):
                    code = np.uint32(rows[j * row + column]) >> np.uint32(4 * place)
                    word |= (code & np.uint32(15)) << np.uint32(4 * j)
                number = column * _CODES + order[place]
                target[number // PANEL * panel + number % PANEL] = np.int32(word)
    buffer[0] = 0


@kernel({"words": (I32, INT, INT, I64, INT, U8)})
def _unpack_codes(begin: int, end: int, source: Any, row: int, width: int, order: Any, added: int, out: Any) -> None:
    """Items are rows."""
    for item in range(begin, end):
        for column in range(width):
            word = np.uint32(source[item * row + column])
            target = advance(out, (item * width + column) * _CODES)
            for place in range(_CODES):
                target[order[place]] = np.uint8(((word >> np.uint32(4 * place)) + np.uint32(added)) & np.uint32(15))


@kernel({"words": (I32, INT, INT, INT, I64, I32, I64)})
def _sort_by_group(
    begin: int, end: int, groups: Any, count: int, num_groups: int, size: int, ends: Any, order: Any, kind: Any
) -> None:
    """A single item. `ends`: of each group, so far."""
    for _ in range(begin, end):
        kind[0] = SORTED if count == num_groups * size else UNEVEN
        for j in range(num_groups):
            ends[j] = j * size
        for i in range(count):
            group = np.int64(groups[i])
            if group == -1:
                kind[0] = ABSENT
                break
            if group < 0 or group >= num_groups or ends[group] >= (group + 1) * size:
                kind[0] = UNEVEN
            elif kind[0] != UNEVEN:
                if ends[group] != i:
                    kind[0] = MOVED
                order[ends[group]] = np.int32(i)
                ends[group] += 1


@kernel({"words": (I32, INT, INT, INT, I64, INT, I32, INT, INT)})
def _order_codes(
    begin: int, end: int, source: Any, row: int, height: int, width: int, order: Any, bits: int, out: Any, step: int,
    panel: int,
) -> None:  # fmt: skip
    """Items are 64 columns, of which the last one may have fewer. `step`, `panel`: see `_across`."""
    in_word = 32 // bits
    kept = np.uint32((1 << bits) - 1)
    for item in range(begin, end):
        begin_columns = item * _ORDERED_AT_A_TIME
        end_columns = min(begin_columns + _ORDERED_AT_A_TIME, width)
        for line_panel in range(height * _PANELS_ORDERED):
            line, first = line_panel // _PANELS_ORDERED, begin_columns + line_panel % _PANELS_ORDERED * PANEL
            columns = max(0, min(PANEL, end_columns - first))
            wide = columns // LANES * LANES
            target, numbers = advance(out, line * step + first // PANEL * panel), advance(order, line * in_word)
            words = advance(source, first)
            if wide > 0 and bits == 4:
                gather_codes_4(words, row, numbers, target, wide)
            elif wide > 0:
                gather_codes_8(words, row, numbers, target, wide)
            for column in range(wide, columns):
                word = np.uint32(0)
                for place in range(in_word):
                    number = np.uint64(numbers[place])
                    at = np.int64(number // np.uint64(in_word)) * row + column
                    down = np.uint32(bits * np.int64(number % np.uint64(in_word)))
                    word |= (np.uint32(words[at]) >> down & kept) << np.uint32(bits * place)
                target[column] = np.int32(word)
