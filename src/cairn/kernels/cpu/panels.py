"""Products with weights laid out in panels, by what the processor has for them:

    bfloat16: AVX512-BF16's vdpbf16ps, two products a lane, added in float32
              AVX512 without it, or AVX2 and FMA: each half of a word is a float32 once the other half is cleared, and
              rows are widened to float32, so that a product is a multiply-add, too
    both: the tiles of a matrix unit, see `amx`
    int8: vpdpbusd of AVX512-VNNI or AVX-VNNI, four products a lane of an unsigned and a signed byte, added in int32
          AVX512's or AVX2's vpmaddwd, two products a lane in int16, to which both are widened: bytes would be added up
          in 16 bits, where they overflow

A word is 32 bits of an output or of a row: two inputs in bfloat16, four in int8. A panel has the weights of 32 outputs,
one word of each beside the others. Rows come in groups of at most 12, or 6 where there are half as many registers, in
which the words of the rows, or their two halves, lie side by side, too. A tile, one group times one panel, keeps its
sums in registers: panels and groups are the packed operands of Goto and van de Geijn, "Anatomy of High-Performance
Matrix Multiplication" (2008), section 4. A segment is at most 16 groups: a weight is read from memory once for it, and
few rows are multiplied as fast as the weights come. Rows of several experts, each with its matrix, are segments of one
product.

Each sum is taken in the order of its inputs: a row has the same bits whatever rows it is multiplied with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from cairn.kernels.cpu.amx import HAS_AMX, ROWS, RUN, SPARE_ROWS, begin_tiles, end_tiles
from cairn.kernels.cpu.compiled import (
    BF16,
    ELEMENTS,
    F32,
    I32,
    I64,
    INT,
    intrinsic,
    jit,
    kernel,
    optional_arg,
    record,
    row_args,
)
from cairn.kernels.cpu.features import cpu_features
from cairn.kernels.cpu.huge_pages import weight_memory
from cairn.kernels.cpu.packing import fill_panels
from cairn.kernels.cpu.recording import kept
from cairn.kernels.cpu.scalars import advance, load, store
from cairn.kernels.cpu.tiles import (
    GROUP,
    HAS_AVX512,
    PANEL,
    WIDENS_ONCE,
    add_tile,
    numbers_of_word,
    store_16,
    wide_words,
    widen_words,
)
from cairn.kernels.cpu.vectors import (
    LANES,
    ROWS_ACROSS,
    aligned,
    pointer_to,
    round_up,
    set_address,
    transpose_rows,
    transpose_widened,
)

GROUPS_OF_SEGMENT = 16

SEGMENT = GROUPS_OF_SEGMENT * GROUP
"""Rows of a segment at most."""

_SUMS_OF_SEGMENT = (SEGMENT + SPARE_ROWS) * PANEL

_SEGMENT_WORDS = (1 << 18) if HAS_AMX else SEGMENT * 1024
"""Words of a segment's rows at most, 1 MiB or 768 KiB, where all have one matrix."""

_STORES_16 = bool(cpu_features().get("avx512bf16"))

_CHUNK = 256 if HAS_AVX512 else 128
"""Words of a panel's outputs, 32 KiB or 16, that all groups are multiplied with before the next ones: they stay in the
first cache, beside rows that take twice as much where they are widened."""

_WIDENED_CHUNK = 96
"""The same of words that are widened once for all groups, 24 KiB."""

_AHEAD = 16 if HAS_AVX512 else 64
"""Words of a panel between those that a single group is multiplied with and those that are asked for: 2 or 8 KiB. See
docs/measurements/cpu-kernels.md."""

_INPUTS_OF_WORD = {torch.bfloat16: 2, torch.int8: 4}.__getitem__
_FEATURES: Mapping[torch.dtype, Sequence[str]] = MappingProxyType(
    {torch.bfloat16: ("avx512bf16",), torch.int8: ("avx512vnni", "avxvnni")}
)
"""A processor with a matrix unit has these as well."""


@cache
def has_instructions(dtype: torch.dtype) -> bool:
    """Whether this processor has dot instructions for weights of a dtype."""
    return any(cpu_features().get(name) for name in _FEATURES.get(dtype, ()))


@cache
def widens(dtype: torch.dtype) -> bool:
    """Whether products with weights of a dtype are made of wider numbers here, by AVX2 and FMA, or AVX512.

    bfloat16: with AVX512 and no instructions for it oneDNN has products, too, which take five times as long."""
    features = cpu_features()
    if not (features.get("avx2") and features.get("fma")):
        return False
    return dtype in _FEATURES and not any(features.get(name) for name in _FEATURES[dtype])


@cache
def has_panels(dtype: torch.dtype) -> bool:
    """Whether weights of a dtype are laid out in panels here."""
    return has_instructions(dtype) or widens(dtype)


_WIDENS = widens(torch.bfloat16)

NUMBERS_OF_SEGMENT = _SUMS_OF_SEGMENT + (2 * _WIDENED_CHUNK * PANEL if WIDENS_ONCE else 0)
"""What a thread has for a segment: its sums, and words that have been widened for all groups."""

_READ_RATE, _MULTIPLY_RATE = (35, 110 if _WIDENS else 440) if HAS_AVX512 else (14, 55)
"""Bytes of weights that one thread reads in a nanosecond, and that it multiplies with a row."""


def pack_panels(matrices: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Matrices [out, in] of one shape, bfloat16 or int8, each given as its rows in parts -> for each the same dtype
    [panels, words, 32, inputs of a word], 0 where there are no more inputs or outputs, one after the other in memory.
    Words: a multiple of `RUN`."""
    dtype, inputs = matrices[0][0].dtype, matrices[0][0].shape[1]
    outputs, size = sum(part.shape[0] for part in matrices[0]), _INPUTS_OF_WORD(dtype)
    panels, words = -(-outputs // PANEL), -(-inputs // (size * RUN)) * RUN
    stack = weight_memory().empty((len(matrices), panels, words, PANEL, size), dtype)
    for packed, parts in zip(stack, matrices, strict=True):
        fill_panels(parts, packed)
    return stack.unbind()


@dataclass(frozen=True, slots=True)
class RowPartition:
    """How the rows of a product are cut, those for the first matrix first. `groups`: int32 [G, 2], each group's first
    row and how many it has. `segments`: int32 [S, 4], each segment's matrix, first row, rows, and rows of its groups,
    of which the last one may have fewer. A segment, times one panel, is the item that a thread takes. `num_rows`: of
    all of them. `group`: rows of a group at most."""

    groups: Tensor
    segments: Tensor
    num_rows: int
    group: int

    def cost(self, panels: Tensor) -> int:
        """Nanoseconds on one thread of a product with a stack of such panels, roughly."""
        size = panels.nbytes
        return self.segments.shape[0] * size // _READ_RATE + self.num_rows * size // _MULTIPLY_RATE


def partition_rows(rows: int, words: int, group: int = GROUP) -> RowPartition:
    """Of rows of so many words for one matrix. A segment fits the second cache, in which all panels come by."""
    fitting = _SEGMENT_WORDS // words // group * group
    segment = max(2 * group, min(GROUPS_OF_SEGMENT * group, fitting))
    return kept(lambda: _partition_rows(rows, segment, group))


@lru_cache(maxsize=4096)
def _partition_rows(rows: int, segment: int, group: int) -> RowPartition:
    return partition_expert_rows(torch.tensor([rows]), rows, group, segment)


def partition_expert_rows(ends: Tensor, rows: int, group: int = GROUP, segment: int | None = None) -> RowPartition:
    """Of `rows` rows in all for several matrices. `ends`: int64 [matrices], where each one's rows end. `group`,
    `segment`: rows of one at most; None: of 16 groups."""
    segment = segment or GROUPS_OF_SEGMENT * group
    most_segments = ends.shape[0] + rows // segment
    segments = torch.empty(most_segments, 4, dtype=torch.int32)
    groups = torch.empty(most_segments + rows // group, 2, dtype=torch.int32)
    sizes = torch.empty(2, dtype=torch.int64)
    multiple = ROWS if HAS_AMX and group == GROUP else 1
    _partition_expert_rows["any"](
        1, 0, ends.data_ptr(), ends.shape[0], segment, group, multiple, segments.data_ptr(), groups.data_ptr(),
        sizes.data_ptr(),
    )  # fmt: skip
    num_segments, num_groups = sizes.tolist()
    return RowPartition(groups[:num_groups], segments[:num_segments], rows, group)


@kernel({"any": (I64, INT, INT, INT, INT, I32, I32, I64)})
def _partition_expert_rows(
    begin: int, end: int, ends: Any, matrices: int, most: int, most_of_group: int, multiple: int, segments: Any,
    groups: Any, sizes: Any,
) -> None:  # fmt: skip
    """One item does all of it. Segments of a matrix are of nearly the same size, and so are groups of a segment, each
    but the last one of a multiple of so many rows."""
    num_segments = num_groups = first = 0
    for matrix in range(matrices):
        stop = ends[matrix]
        parts = (stop - first + most - 1) // most
        while first < stop:
            rows = (stop - first + parts - 1) // parts
            num_parts = (rows + most_of_group - 1) // most_of_group
            group = round_up((rows + num_parts - 1) // num_parts, multiple)
            segment = advance(segments, 4 * num_segments)
            segment[0], segment[1] = np.int32(matrix), np.int32(first)
            segment[2], segment[3] = np.int32(rows), np.int32(group)
            for row in range(0, rows, group):
                groups[2 * num_groups], groups[2 * num_groups + 1] = (
                    np.int32(first + row),
                    np.int32(min(group, rows - row)),
                )
                num_groups += 1
            first += rows
            parts -= 1
            num_segments += 1
    sizes[0], sizes[1] = num_segments, num_groups


def multiply_panels(
    x: Tensor, panels: Tensor, bias: Tensor | None, out: Tensor, parts: RowPartition, order: Tensor | None = None
) -> None:
    """x bfloat16 [rows, in], or of those the ones that `order`, int64 [n], names, times the transposes of the matrices
    that bfloat16 `panels` were made of, one after the other from here on, plus the bias of each, into out [n, out],
    bfloat16 or float32."""
    words = panels.shape[1]
    grouped = group_rows(x, parts, order, words, out.shape[0])
    items, cost = parts.segments.shape[0] * panels.shape[0], parts.cost(panels)
    operands = parts.segments.data_ptr(), panels.shape[0], grouped.data_ptr(), panels.data_ptr(), words, 1
    results = *optional_arg(bias), out.data_ptr(), out.shape[1]
    _multiply[x.dtype, out.dtype](items, cost, *operands, *results)


def group_rows(x: Tensor, parts: RowPartition, order: Tensor | None, words: int, num_rows: int) -> Tensor:
    """Rows of x, bfloat16, as products with panels take them, of so many words each."""
    inputs = x.shape[1]
    if num_rows == 1 and inputs % 2 == 0 and order is None and not _WIDENS and not HAS_AMX:
        return x
    grouped = x.new_empty(num_rows + SPARE_ROWS, 2 * words, dtype=torch.float32 if _WIDENS else x.dtype)
    arrange = _widen_rows if _WIDENS else _group_rows
    arrange[x.dtype](
        parts.groups.shape[0], grouped.numel(), parts.groups.data_ptr(), *optional_arg(order), *row_args(x),
        grouped.data_ptr(), inputs,
    )  # fmt: skip
    return grouped


@jit
def place_of(word: int, i: int, count: Any) -> Any:
    """Of a word of row i among those of a group of `count` rows."""
    return (word - word % RUN) * count + i * RUN + word % RUN


@kernel({torch.bfloat16: (I32, I64, INT, BF16, INT, BF16, INT)})
def _group_rows(
    begin: int, end: int, groups: Any, order: Any, has_order: int, x: Any, row: int, out: Any, inputs: int
) -> None:
    full = inputs // 2
    words = round_up(full + inputs % 2, RUN)
    table = np.empty(ROWS_ACROSS, np.int64)
    rows = pointer_to(table)
    for item in range(begin, end):
        first, count = np.int64(groups[2 * item]), np.int64(groups[2 * item + 1])
        target = as_words(advance(out, first * words * 2))
        done = 0
        if RUN == 1 and goes_across(count):
            done = whole_blocks(full)
            _list_rows(x, row, order, has_order, first, count, rows)
            for word in range(0, done, ROWS_ACROSS):
                transpose_rows(rows, word, advance(target, word * count), count)
        for i in range(count):
            source = advance(x, (order[first + i] if has_order else first + i) * row)
            pairs = as_words(source)
            for word in range(done, full // RUN * RUN, RUN):
                for j in range(RUN):
                    target[place_of(word, i, count) + j] = pairs[word + j]
            for word in range(full // RUN * RUN, full):
                target[place_of(word, i, count)] = pairs[word]
            for word in range(full, words):
                target[place_of(word, i, count)] = np.int32(0)
            if inputs % 2:
                target[place_of(full, i, count)] = np.int32(source[inputs - 1])
    table[0] = 0


@jit
def goes_across(count: Any) -> Any:
    """Whether so many rows are worth `transpose_rows`."""
    return 4 * count >= ROWS_ACROSS and count <= ROWS_ACROSS


@jit
def whole_blocks(words: int) -> Any:
    """Of so many words of each row, those that `transpose_rows` may take, and leaves room behind the last line."""
    return max(0, words - ROWS_ACROSS) // ROWS_ACROSS * ROWS_ACROSS


@jit
def _list_rows(x: Any, row: int, order: Any, has_order: int, first: Any, count: Any, rows: Any) -> None:
    """The addresses of a group's rows; of those that it has not, of its last one."""
    for i in range(ROWS_ACROSS):
        number = first + min(i, count - 1)
        set_address(rows, i, advance(x, (order[number] if has_order else number) * row))


@kernel({torch.bfloat16: (I32, I64, INT, BF16, INT, F32, INT)}, needs=_WIDENS)
def _widen_rows(
    begin: int, end: int, groups: Any, order: Any, has_order: int, x: Any, row: int, out: Any, inputs: int
) -> None:
    """As `_group_rows`, in float32: of each word the first inputs of all rows, and then the second ones."""
    words = (inputs + 1) // 2
    table = np.empty(ROWS_ACROSS, np.int64)
    rows = pointer_to(table)
    for item in range(begin, end):
        first, count = np.int64(groups[2 * item]), np.int64(groups[2 * item + 1])
        target = advance(out, first * words * 2)
        done = 0
        if goes_across(count):
            done = whole_blocks(inputs)
            _list_rows(x, row, order, has_order, first, count, rows)
            for j in range(0, done, ROWS_ACROSS):
                transpose_widened(rows, j, advance(target, j * count), count)
        for i in range(count):
            source = advance(x, (order[first + i] if has_order else first + i) * row)
            for j in range(done, inputs):
                target[j * count + i] = load(source, j)
            if inputs % 2:
                target[inputs * count + i] = np.float32(0)
    table[0] = 0


@intrinsic
def as_words(typingctx: Any, pointer: Any) -> Any:
    """The pointer, to words."""
    return I32(pointer), lambda context, builder, _, args: builder.bitcast(args[0], ir.IntType(32).as_pointer())


class Product(NamedTuple):
    """Segments of rows times the panels of their matrices, plus a bias [outputs] of each. `words`: of a row. `block`:
    words that are not to be parted, as a group's with its factors."""

    segments: Any
    num_panels: int
    x: Any
    panels: Any
    words: int
    block: int
    bias: Any
    has_bias: int
    out: Any
    outputs: int


def product_type(x: Any, panels: Any, bias: Any, out: Any) -> Any:
    return record(Product, I32, INT, x, panels, INT, INT, bias, INT, out, INT)


@jit
def locate(p: Any, item: int) -> Any:
    """An item of a product, which is a segment times a panel: the segment, and the panel's number, first column and
    number of columns."""
    panel = item % p.num_panels
    return advance(p.segments, item // p.num_panels * 4), panel, panel * PANEL, min(PANEL, p.outputs - panel * PANEL)


@kernel(
    {
        (torch.bfloat16, dtype): (product_type(F32 if _WIDENS else I32, I32, BF16, out),)
        for dtype, out in ELEMENTS.items()
    },
    needs=has_panels(torch.bfloat16),
)
def _multiply(begin: int, end: int, p: Any) -> None:
    multiply_items(begin, end, p)


@jit
def multiply_items(begin: int, end: int, p: Any) -> None:
    """Items of a product whose sums are float32."""
    buffer = np.empty(NUMBERS_OF_SEGMENT + LANES, np.float32)
    sums = aligned(buffer)
    begin_tiles(p.x, sums)
    for item in range(begin, end):
        segment, panel, column, columns = locate(p, item)
        add_segment(p, sums, segment, panel)
        store_segment(p, sums, segment, column, columns)
    end_tiles(p.x, sums)
    buffer[0] = 0


@jit
def store_segment(p: Any, sums: Any, segment: Any, column: int, columns: int) -> None:
    """A segment's sums, float32 [rows, 32], plus the bias, to where the product has so many columns."""
    first, bias = np.int64(segment[1]), advance(p.bias, np.int64(segment[0]) * p.outputs + column)
    for i in range(np.int64(segment[2])):
        source, target = advance(sums, i * PANEL), advance(p.out, (first + i) * p.outputs + column)
        if p.has_bias:
            for j in range(columns):
                store(target, j, source[j] + load(bias, j))
        elif columns == PANEL and _STORES_16:
            for j in range(0, PANEL, LANES):
                store_16(advance(source, j), advance(target, j))
        else:
            for j in range(columns):
                store(target, j, source[j])


@intrinsic
def words_of_chunk(typingctx: Any, wide: Any) -> Any:
    """By the type that `wide_words` gives."""
    words = _CHUNK if wide == I32 else _WIDENED_CHUNK
    return INT(wide), lambda context, builder, _, args: ir.Constant(ir.IntType(64), words)


@jit
def add_segment(p: Any, sums: Any, segment: Any, panel: int) -> None:
    """sums [rows, 32], float32 or int32: a segment's rows, in groups, times one of the panels of its matrix."""
    matrix, first = np.int64(segment[0]), np.int64(segment[1])
    rows, group = np.int64(segment[2]), np.int64(segment[3])
    words, numbers = p.words, numbers_of_word(p.x)
    x = advance(p.x, first * words * numbers)
    weights = advance(p.panels, (matrix * p.num_panels + panel) * words * PANEL)
    wide = wide_words(p.x, advance(sums, _SUMS_OF_SEGMENT))
    chunk = words_of_chunk(wide) // p.block * p.block
    for word in range(0, words, chunk):
        count = min(chunk, words - word)
        is_wide = rows > 2 * group and widen_words(advance(weights, word * PANEL), count, wide)
        for row in range(0, rows, group):
            num_rows = min(group, rows - row)
            groups_left = (rows - row + group - 1) // group
            if rows <= group:
                next_words, step = advance(weights, (word + _AHEAD) * PANEL), PANEL
            else:
                # The last two groups have the first cache filled with the next words, a half each.
                next_words = advance(weights, (word + (0 if groups_left > 2 else chunk)) * PANEL)
                next_words = advance(next_words, count * LANES if groups_left == 1 else 0)
                step = 0 if groups_left > 2 else LANES
            rows_of_group = advance(x, (row * words + word * num_rows) * numbers)
            target, fresh = advance(sums, row * PANEL), np.int64(word == 0)
            if is_wide:
                add_tile(num_rows, rows_of_group, wide, 2 * count, target, fresh, next_words, step // 2, p.block)
            else:
                panel_words = advance(weights, word * PANEL)
                add_tile(num_rows, rows_of_group, panel_words, count, target, fresh, next_words, step, p.block)
