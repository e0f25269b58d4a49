"""Products with weights in codes: a few inputs at a time of 32 outputs become plain numbers, which all rows are
multiplied with while they are in the first cache.

The numbers are what dequantizing gives, rounded to the model's dtype once, and rows are multiplied with them as with
plain panels: a product has the bits of one with the dequantized weight wherever that is in panels, too.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.cpu.amx import begin_tiles, end_tiles
from cairn.kernels.cpu.compiled import (
    ELEMENTS,
    F32,
    I32,
    I64,
    INT,
    U8,
    exact_jit,
    jit,
    kernel,
    optional_arg,
    record,
    row_args,
)
from cairn.kernels.cpu.expanding import INTEGER_5, WORD_OF_FIFTHS, as_floats, as_halves, as_numbers, expand
from cairn.kernels.cpu.int8 import OUTPUTS
from cairn.kernels.cpu.packed_codes import ABSENT, BFLOAT16, FLOAT32, HAS_CODES, TABLE, CodedRows, PackedCodes, in_word
from cairn.kernels.cpu.panels import (
    NUMBERS_OF_SEGMENT,
    RowPartition,
    group_rows,
    has_instructions,
    locate,
    partition_rows,
    product_type,
    store_segment,
)
from cairn.kernels.cpu.scalars import advance, float_of, load
from cairn.kernels.cpu.tiles import GROUP, PANEL, VECTOR_GROUP, add_tile, numbers_of_word
from cairn.kernels.cpu.vectors import LANES, aligned
from cairn.kernels.quantized import QuantizedWeight

_CHUNK = 128
"""Inputs of a panel that are expanded at a time: 8 KiB in bfloat16, 16 in float32."""

_EXPAND_RATE, _MULTIPLY_RATE = 2, 50
"""Numbers that one thread expands in a nanosecond, and that it multiplies with a row."""


def multiply_codes(
    x: Tensor, weight: PackedCodes | CodedRows, bias: Tensor | None, expert: int, dtype: torch.dtype | None = None
) -> Tensor:
    """x [n, in] times the transpose of one of the matrices, [n, out] in x's dtype or another one."""
    out = x.new_empty(x.shape[0], weight.shape[-2], dtype=dtype or x.dtype)
    if isinstance(weight, CodedRows):
        _multiply_rows(x, weight.weight[expert] if len(weight.shape) == 3 else weight.weight, bias, out)
    elif x.shape[0]:
        parts = partition_rows(x.shape[0], weight.words, group_of(x.dtype))
        multiply_codes_panels(x, weight, bias, out, parts, expert=expert)
    return out


def group_of(dtype: torch.dtype) -> int:
    """Rows of a group at most, of activations of this dtype."""
    return GROUP if dtype == torch.bfloat16 and has_instructions(dtype) else VECTOR_GROUP


_ROWS_AT_A_TIME = 1 << 20
"""Numbers that are dequantized at a time, where there are no panels."""


def _multiply_rows(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor) -> None:
    outputs, inputs = weight.shape
    for begin in range(0, outputs, step := max(1, _ROWS_AT_A_TIME // inputs)):
        part = slice(begin, begin + step)
        part_bias = None if bias is None else bias[part]
        out[:, part] = F.linear(x, weight[part].dequantize().to(x.dtype), part_bias)


def multiply_codes_panels(
    x: Tensor,
    weight: PackedCodes,
    bias: Tensor | None,
    out: Tensor,
    parts: RowPartition,
    order: Tensor | None = None,
    expert: int = 0,
) -> None:
    """As `multiply_panels`, with the weight's matrices from `expert` on, x and the bias in bfloat16 or float32."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    panels, inputs, words = weight.matrices[expert], x.shape[1], weight.words
    if x.dtype == torch.bfloat16 and has_instructions(x.dtype):
        rows = group_rows(x, parts, order, words, out.shape[0])
    else:
        rows = torch.empty(out.shape[0], 2 * words)
        _lay_out_rows[x.dtype](
            parts.groups.shape[0], rows.numel(), parts.groups.data_ptr(), *optional_arg(order), *row_args(x),
            rows.data_ptr(), inputs, 2 * words,
        )  # fmt: skip
    items = parts.segments.shape[0] * panels.shape[0]
    numbers = panels.numel() * in_word(weight.form)
    cost = parts.segments.shape[0] * numbers // _EXPAND_RATE + out.shape[0] * numbers // _MULTIPLY_RATE
    operands = parts.segments.data_ptr(), panels.shape[0], rows.data_ptr(), weight.matrices[0].data_ptr(), words, 1
    results = *optional_arg(bias), out.data_ptr(), out.shape[1]
    least = (0, ABSENT, 0, 0, 0) if weight.minimums is None else weight.minimums.arguments
    zeros = *optional_arg(weight.zeros), weight.zero
    groups = weight.scales.values.shape[2]
    codes = expert, weight.form, weight.group, groups, weight.divides, *zeros, x.dtype == torch.bfloat16
    fifths = 0 if weight.fifths is None else weight.fifths.data_ptr()
    factors = *weight.scales.arguments, *least
    _multiply_codes[x.dtype, out.dtype](items, cost, *operands, *results, *codes, fifths, *factors)


class Codes(NamedTuple):
    """What codes of a stack stand for. `expert`: the matrix of the first segment's number 0. `groups`: of a row.
    `rounds`: to bfloat16, where words are float32."""

    expert: int
    form: int
    group: int
    groups: int
    divides: int
    zeros: Any
    has_zeros: int
    zero: int
    rounds: int
    fifths: Any


class CodeFactors(NamedTuple):
    """`Factors` as a kernel has them."""

    values: Any
    kind: int
    table: Any
    outer: Any
    num_outer: int


_CODES = record(Codes, INT, INT, INT, INT, INT, U8, INT, INT, INT, I32)
_FACTORS = record(CodeFactors, U8, INT, F32, F32, INT)


@kernel({dtype: (I32, I64, INT, x, INT, F32, INT, INT) for dtype, x in ELEMENTS.items()}, needs=HAS_CODES)
def _lay_out_rows(
    begin: int, end: int, groups: Any, order: Any, has_order: int, x: Any, row: int, out: Any, inputs: int, width: int
) -> None:
    """In groups of rows, an input of all rows side by side, zeros behind the last one."""
    for item in range(begin, end):
        first, count = np.int64(groups[2 * item]), np.int64(groups[2 * item + 1])
        target = advance(out, first * width)
        for i in range(count):
            source = advance(x, (order[first + i] if has_order else first + i) * row)
            for j in range(inputs):
                target[j * count + i] = load(source, j)
            for j in range(inputs, width):
                target[j * count + i] = np.float32(0)


def _rows_type(dtype: torch.dtype) -> Any:
    return I32 if dtype == torch.bfloat16 and has_instructions(dtype) else F32


@kernel(
    {
        (dtype, out): (product_type(_rows_type(dtype), I32, ELEMENTS[dtype], ELEMENTS[out]), _CODES, _FACTORS, _FACTORS)
        for dtype, out in OUTPUTS
    },
    needs=HAS_CODES,
)
def _multiply_codes(begin: int, end: int, p: Any, c: Any, scales: Any, least: Any) -> None:
    buffer = np.empty(NUMBERS_OF_SEGMENT + (_CHUNK + 3) * PANEL + LANES, np.float32)
    sums = aligned(buffer)
    factors = advance(sums, NUMBERS_OF_SEGMENT)
    numbers = as_numbers(p.x, advance(factors, 3 * PANEL))
    begin_tiles(p.x, sums)
    for item in range(begin, end):
        segment, panel, column, columns = locate(p, item)
        _add_segment(p, c, scales, least, sums, factors, numbers, segment, panel)
        store_segment(p, sums, segment, column, columns)
    end_tiles(p.x, sums)
    buffer[0] = 0


@jit
def _add_segment(
    p: Any, c: Any, scales: Any, least: Any, sums: Any, factors: Any, numbers: Any, segment: Any, panel: int
) -> None:
    """As `panels.add_segment`."""
    matrix, first = np.int64(segment[0]) + c.expert, np.int64(segment[1])
    rows, group = np.int64(segment[2]), np.int64(segment[3])
    in_pair = numbers_of_word(p.x)
    x = advance(p.x, first * p.words * in_pair)
    place, inputs = matrix * p.num_panels + panel, 2 * p.words
    in_word = 8 if c.form <= INTEGER_5 else 4
    codes = advance(p.panels, place * (inputs // in_word) * PANEL)
    for begin in range(0, inputs, _CHUNK):
        count = min(_CHUNK, inputs - begin)
        _expand_chunk(c, scales, least, codes, place, inputs, begin, begin + count, in_word, factors, numbers)
        ahead = advance(codes, (begin + count) // in_word * PANEL)
        for row in range(0, rows, group):
            num_rows = min(group, rows - row)
            rows_of_group = advance(x, (row * p.words + begin // 2 * num_rows) * in_pair)
            target, fresh = advance(sums, row * PANEL), np.int64(begin == 0)
            # The next chunk's codes, spread over this one's words.
            add_tile(num_rows, rows_of_group, numbers, count // 2 * in_pair, target, fresh, ahead, 8 // in_pair, 1)


@jit
def _expand_chunk(
    c: Any, scales: Any, least: Any, codes: Any, place: int, inputs: int, begin: int, end: int, in_word: int,
    factors: Any, numbers: Any,
) -> None:  # fmt: skip
    """Inputs [begin, end) of a panel of `inputs`, at its `place` among those of all matrices. What is behind
    the last group, where rows have zeros, is as in that one."""
    zeros, lowest = advance(factors, PANEL), advance(factors, 2 * PANEL)
    has_least = np.int64(least.kind != ABSENT)
    at = begin
    while at < end:
        group = min(at // c.group, c.groups - 1)
        stop = end if group == c.groups - 1 else min(end, (group + 1) * c.group)
        _read_factors(scales, c.divides, place, group, c.groups, factors)
        base = advance(c.zeros, (place * c.groups + group) * PANEL)
        for j in range(PANEL):
            zeros[j] = np.float32(base[j]) if c.has_zeros else np.float32(c.zero)
        if has_least:
            _read_factors(least, 0, place, group, c.groups, lowest)
        target = advance(numbers, (at - begin) // 2 * numbers_of_word(numbers) * PANEL)
        words = advance(codes, at // in_word * PANEL)
        fifths = advance(c.fifths, (place * (inputs // WORD_OF_FIFTHS) + at // WORD_OF_FIFTHS) * PANEL)
        expand(words, (stop - at) // in_word, c.form, has_least, c.rounds, factors, zeros, lowest, fifths, target)
        at = stop


@exact_jit
def _read_factors(f: Any, divides: int, place: int, group: int, groups: int, out: Any) -> None:
    """Of the 32 outputs of a panel, for a group."""
    at = (place * groups + group) * PANEL
    if f.kind == TABLE:
        for j in range(PANEL):
            out[j] = f.table[f.values[at + j]]
    elif f.kind == FLOAT32:
        floats = advance(as_floats(f.values), at)
        for j in range(PANEL):
            out[j] = floats[j]
    elif f.kind == BFLOAT16:
        halves = advance(as_halves(f.values), at)
        for j in range(PANEL):
            out[j] = load(halves, j)
    else:
        halves = advance(as_halves(f.values), at)
        for j in range(PANEL):
            out[j] = _widen_float16(halves[j])
    if f.num_outer:
        factors = advance(f.outer, (place * f.num_outer + group * f.num_outer // groups) * PANEL)
        if divides:
            for j in range(PANEL):
                out[j] = out[j] / factors[j]
        else:
            for j in range(PANEL):
                out[j] = out[j] * factors[j]


@exact_jit
def _widen_float16(bits: Any) -> Any:
    """float32 of a float16 that is finite: its exponent has three bits less and begins 112 higher."""
    size = float_of((np.uint32(bits) & np.uint32(0x7FFF)) << np.uint32(13)) * np.float32(2.0**112)
    return -size if bits & 0x8000 else size
