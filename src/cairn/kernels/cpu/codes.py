"""Products with weights in codes: a few inputs at a time of 32 outputs become plain numbers, which all rows are
multiplied with while they are in the first cache.

The numbers are what dequantizing gives, rounded to the model's dtype once, and rows are multiplied with them as with
plain panels: a product has the bits of one with the dequantized weight wherever that is in panels, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.cpu.amx import HAS_AMX, begin_tiles, end_tiles
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
from cairn.kernels.cpu.expanding import (
    E2M1_4,
    E4M3_8,
    INTEGER_4,
    INTEGER_5,
    INTEGER_8,
    WORD_OF_FIFTHS,
    as_floats,
    as_halves,
    as_numbers,
    expand,
)
from cairn.kernels.cpu.huge_pages import weight_memory
from cairn.kernels.cpu.int8 import OUTPUTS
from cairn.kernels.cpu.panels import (
    NUMBERS_OF_SEGMENT,
    RowPartition,
    group_rows,
    has_instructions,
    has_panels,
    locate,
    partition_rows,
    product_type,
    store_segment,
)
from cairn.kernels.cpu.scalars import advance, float_of, load
from cairn.kernels.cpu.threads import step_work
from cairn.kernels.cpu.tiles import GROUP, PANEL, VECTOR_GROUP, add_tile, numbers_of_word
from cairn.kernels.cpu.vectors import LANES, aligned
from cairn.kernels.fp8 import BLOCK, Fp8Weight
from cairn.kernels.quantized import QuantizedWeight

_CHUNK = 128
"""Inputs of a panel that are expanded at a time: 8 KiB in bfloat16, 16 in float32."""

_EXPAND_RATE, _MULTIPLY_RATE = 2, 50
"""Numbers that one thread expands in a nanosecond, and that it multiplies with a row."""

_ABSENT, _FLOAT32, _FLOAT16, _BFLOAT16, _TABLE = range(5)
"""What scales are stored in; `_TABLE`: bytes, whose numbers a table has."""

_KINDS: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.float32: _FLOAT32, torch.float16: _FLOAT16, torch.bfloat16: _BFLOAT16}
)

HAS_CODES = has_panels(torch.bfloat16)
"""Whether codes are expanded for panels here."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Scales or minimums of a stack: bytes [E, panels, groups, 32] in their dtype. `table`: float32 [256], of those of
    a byte. `outer`: float32 [E, panels, n, 32], what they are multiplied with, or divided by."""

    values: Tensor
    kind: int
    table: Tensor | None
    outer: Tensor | None

    @property
    def arguments(self) -> tuple[int, ...]:
        """For a kernel: see `CodeFactors`."""
        table = 0 if self.table is None else self.table.data_ptr()
        outer, num_outer = (0, 0) if self.outer is None else (self.outer.data_ptr(), self.outer.shape[2])
        return self.values.data_ptr(), self.kind, table, outer, num_outer


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A weight, or a stack of experts' ones, in codes.

    `shape`, `dtype`: those of the tensor that it stands for. `matrices`: int32 [panels, words, 32] of each expert, one
    after the other in memory. `form`: see `expanding`. `fifths`: int32 [E, panels, in / 32, 32] where it has them.
    """

    shape: torch.Size
    dtype: torch.dtype
    matrices: tuple[Tensor, ...]
    form: int
    group: int
    scales: Factors
    divides: bool
    zero: int
    zeros: Tensor | None
    minimums: Factors | None
    order: Tensor | None
    fifths: Tensor | None
    layout: Literal["panels"] = "panels"

    @property
    def words(self) -> int:
        """Of two inputs each, of a row."""
        return self.matrices[0].shape[1] * in_word(self.form) // 2


@dataclass(frozen=True, slots=True)
class CodedRows:
    """A weight, or a stack of experts' ones, that is dequantized in blocks of rows whenever it is multiplied with."""

    weight: QuantizedWeight
    layout: Literal["rows"] = "rows"

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype


def pack_codes(weight: QuantizedWeight) -> PackedCodes | CodedRows:
    """See `Kernels.pack_stored`."""
    form = _form_of(weight)
    # Groups begin with a word, of fifth bits as well.
    whole = WORD_OF_FIFTHS if form == INTEGER_5 else in_word(form)
    fits = weight.shape[-1] % whole == 0 and (weight.group % whole == 0 or weight.scales.shape[-1] == 1)
    if not HAS_CODES or not fits or weight.dtype not in ELEMENTS:
        step_work().add_weight(weight.nbytes, "rows")
        return CodedRows(weight)
    stacked = weight if weight.codes.dim() == 3 else weight.changed(lambda part: part[None])
    count, outputs, inputs = stacked.shape
    panels, unit = -(-outputs // PANEL), 32 if HAS_AMX else whole
    words = -(-inputs // unit) * unit // in_word(form)
    stack = weight_memory().empty((count, panels, words, PANEL), torch.int32)
    for packed, codes in zip(stack, stacked.codes, strict=True):
        lines = _in_panels(codes.contiguous().view(torch.int32), panels)
        packed[:, : lines.shape[1]] = lines
        packed[:, lines.shape[1] :] = 0
    step_work().add_weight(weight.nbytes, "codes panels")
    minimums = None
    if stacked.minimums is not None:
        minimums = _pack_factors(stacked.minimums, stacked.minimum_factors, panels)
    return PackedCodes(
        shape=weight.shape,
        dtype=weight.dtype,
        matrices=stack.unbind(),
        form=form,
        group=stacked.group,
        scales=_pack_factors(stacked.scales, stacked.factors, panels),
        divides=weight.divides,
        zero=weight.zero,
        zeros=None if stacked.zeros is None else _stack_panels(stacked.zeros, panels),
        minimums=minimums,
        order=weight.order,
        fifths=None if stacked.fifths is None else _stack_panels(stacked.fifths.contiguous().view(torch.int32), panels),
    )


def in_word(form: int) -> int:
    """Inputs of a word of codes."""
    return 8 if form <= INTEGER_5 else 4


def _form_of(weight: QuantizedWeight) -> int:
    if weight.numbers == "integer":
        return {4: INTEGER_4, 5: INTEGER_5, 8: INTEGER_8}[weight.bits]
    return E2M1_4 if weight.numbers == "e2m1" else E4M3_8


def as_codes(weight: Fp8Weight) -> QuantizedWeight | None:
    """A weight in FP8 as one in codes; None where blocks do not divide its inputs, or where a number is none, which
    nothing here expands."""
    fits = not weight.is_blocked or weight.shape[-1] % BLOCK == 0
    if not fits or bool((weight.numbers & 127 == 127).any()):
        return None
    return QuantizedWeight(weight.numbers, weight.scales, weight.dtype, bits=8, numbers="e4m3")


def _pack_factors(values: Tensor, outer: Tensor | None, panels: int) -> Factors:
    table = _table_of(values.dtype) if values.element_size() == 1 else None
    packed = _stack_panels(values.view(torch.uint8) if table is not None else values, panels)
    outer = None if outer is None else _stack_panels(outer, panels)
    return Factors(packed, _KINDS.get(values.dtype, _TABLE), table, outer)


@cache
def _table_of(dtype: torch.dtype) -> Tensor:
    """The numbers of all bytes."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def _stack_panels(values: Tensor, panels: int) -> Tensor:
    """[E, out, n] -> [E, panels, n, 32]."""
    return torch.stack([_in_panels(each, panels) for each in values])


def _in_panels(values: Tensor, panels: int) -> Tensor:
    """[out, n] -> [panels, n, 32], zeros where there are no more outputs."""
    missing = panels * PANEL - values.shape[0]
    padded = F.pad(values, (0, 0, 0, missing)) if missing else values
    return padded.reshape(panels, PANEL, -1).transpose(1, 2).contiguous()


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
    least = (0, _ABSENT, 0, 0, 0) if weight.minimums is None else weight.minimums.arguments
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
    has_least = np.int64(least.kind != _ABSENT)
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
    if f.kind == _TABLE:
        for j in range(PANEL):
            out[j] = f.table[f.values[at + j]]
    elif f.kind == _FLOAT32:
        floats = advance(as_floats(f.values), at)
        for j in range(PANEL):
            out[j] = floats[j]
    elif f.kind == _BFLOAT16:
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
