"""Products with weights laid out in panels, by what the processor has for them:

    bfloat16: AVX512-BF16's vdpbf16ps, two products a lane, added in float32
              AVX2 and FMA: each half of a word is a float32 once the other half is cleared, and rows are widened to
              float32, so that a product is a multiply-add, too
    int8: AVX512-VNNI's vpdpbusd, four products a lane of an unsigned and a signed byte, added in int32

A word is 32 bits of an output or of a row: two inputs in bfloat16, four in int8. A panel has the weights of 32 outputs,
one word of each beside the others. Rows come in groups of at most 12, or 6 where there are half as many registers, in
which the words of the rows, or their two halves, lie side by side, too. A tile, one group times one panel, keeps its
sums in registers: panels and groups are the packed operands of Goto and van de Geijn, "Anatomy of High-Performance
Matrix Multiplication" (2008), section 4. A segment is at most 16 groups: a weight is read from memory once for it, and
few rows are multiplied as fast as the weights come. Rows of several experts, each with its matrix, are segments of one
product.

Each sum is taken in the order of its inputs: a row has the same bits whatever rows it is multiplied with.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba.core import cgutils
from numba.core import types as numba_types
from torch import Tensor

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
from cairn.kernels.cpu.scalars import advance, load, store
from cairn.kernels.cpu.vectors import LANES, aligned, call_shared, prefetch_line

PANEL = 32
"""Outputs of a panel: two vectors."""

_HAS_AVX512 = bool(cpu_features().get("avx512f"))

GROUP = 12 if _HAS_AVX512 else 6
"""Rows of a group at most: 24 vectors of sums, or 12 of half the length, and eight or four are left for what is
multiplied."""

SEGMENT = 16 * GROUP
"""Rows of a segment at most."""

SUMS_OF_SEGMENT = SEGMENT * PANEL

_SEGMENT_WORDS = SEGMENT * 1024
"""Words of a segment's rows at most, 768 KiB, where all have one matrix."""

_CHUNK = 256 if _HAS_AVX512 else 128
"""Words of a panel's outputs, 32 KiB or 16, that all groups are multiplied with before the next ones: they stay in the
first cache, beside rows that take twice as much where they are widened."""

_READ_RATE, _MULTIPLY_RATE = (35, 440) if _HAS_AVX512 else (14, 55)
"""Bytes of weights that one thread reads in a nanosecond, and that it multiplies with a row."""

_INPUTS_OF_WORD = {torch.bfloat16: 2, torch.int8: 4}.__getitem__
_FEATURES = {torch.bfloat16: ("avx512bf16", "amx-bf16"), torch.int8: ("avx512vnni", "amx-int8")}.get
_HALF_LANES = LANES // 2
_SHORT_FLOATS, _SHORT_WORDS = (ir.VectorType(kind, _HALF_LANES) for kind in (ir.FloatType(), ir.IntType(32)))
_FLOAT, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_WORDS, _FLOATS = ir.VectorType(_I32, LANES), ir.VectorType(_FLOAT, LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


@cache
def has_instructions(dtype: torch.dtype) -> bool:
    """Whether this processor has these dot instructions for weights of a dtype, and no matrix unit, which oneDNN
    uses."""
    found, (instruction, matrix_unit) = cpu_features(), _FEATURES(dtype, ("", ""))
    return bool(found.get(instruction)) and not found.get(matrix_unit)


@cache
def widens() -> bool:
    """Whether products with bfloat16 are made of float32 multiply-adds here: AVX2 and FMA are all there is. With AVX512
    oneDNN has some."""
    found = cpu_features()
    return bool(found.get("avx2") and found.get("fma")) and not _HAS_AVX512


def pack_panels(matrices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Matrices [out, in] of one shape, bfloat16 or int8 -> for each the same dtype [panels, words, 32, inputs of a
    word], 0 where there are no more inputs or outputs, one behind the other in memory."""
    (outputs, inputs), size = matrices[0].shape, _INPUTS_OF_WORD(matrices[0].dtype)
    panels, words = -(-outputs // PANEL), -(-inputs // size)
    stack = matrices[0].new_empty(len(matrices), panels, words, PANEL, size)
    for packed, matrix in zip(stack, matrices, strict=True):
        if (panels * PANEL, words * size) != (outputs, inputs):
            matrix = F.pad(matrix, (0, words * size - inputs, 0, panels * PANEL - outputs))
        packed.copy_(matrix.reshape(panels, PANEL, words, size).transpose(1, 2))
    return stack.unbind()


@dataclass(frozen=True, slots=True)
class RowPartition:
    """How the rows of a product are cut, those for the first matrix first. `groups`: int32 [G, 2], each group's first
    row and how many it has. `segments`: int32 [S, 4], each segment's matrix, first row, rows, and rows of its groups,
    of which the last one may have fewer. A segment, times one panel, is the item that a thread takes."""

    groups: Tensor
    segments: Tensor

    def cost(self, panels: Tensor) -> int:
        """Nanoseconds on one thread of a product with a stack of such panels, roughly."""
        size = panels.nbytes
        rows = GROUP * self.groups.shape[0]
        return self.segments.shape[0] * size // _READ_RATE + rows * size // _MULTIPLY_RATE


def partition_rows(rows: int, words: int) -> RowPartition:
    """Of rows of so many words for one matrix. A segment fits the second cache, in which all panels come by."""
    return _partition_rows(rows, max(2 * GROUP, min(SEGMENT, _SEGMENT_WORDS // words // GROUP * GROUP)))


@lru_cache(maxsize=4096)
def _partition_rows(rows: int, segment: int) -> RowPartition:
    return partition_expert_rows(torch.tensor([rows]), rows, segment)


def partition_expert_rows(ends: Tensor, rows: int, segment: int = SEGMENT) -> RowPartition:
    """Of `rows` rows in all for several matrices. `ends`: int64 [matrices], where each one's rows end. `segment`: rows
    of one at most."""
    most_segments = ends.shape[0] + rows // segment
    segments = torch.empty(most_segments, 4, dtype=torch.int32)
    groups = torch.empty(most_segments + rows // GROUP, 2, dtype=torch.int32)
    sizes = torch.empty(2, dtype=torch.int64)
    _partition_expert_rows["any"](
        1, 0, ends.data_ptr(), ends.shape[0], segment, segments.data_ptr(), groups.data_ptr(), sizes.data_ptr()
    )
    num_segments, num_groups = sizes.tolist()
    return RowPartition(groups[:num_groups], segments[:num_segments])


@kernel({"any": (I64, INT, INT, I32, I32, I64)})
def _partition_expert_rows(
    begin: int, end: int, ends: Any, matrices: int, most: int, segments: Any, groups: Any, sizes: Any
) -> None:
    """One item does all of it. Segments of a matrix are of nearly the same size, and so are groups of a segment."""
    num_segments = num_groups = first = 0
    for matrix in range(matrices):
        stop = ends[matrix]
        parts = (stop - first + most - 1) // most
        while first < stop:
            rows = (stop - first + parts - 1) // parts
            group = (rows + (rows + GROUP - 1) // GROUP - 1) // ((rows + GROUP - 1) // GROUP)
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
    that bfloat16 `panels` were made of, one behind the other from here on, plus the bias, into out [n, out], bfloat16
    or float32."""
    rows, inputs, words = out.shape[0], x.shape[1], panels.shape[1]
    grouped = x
    if rows > 1 or inputs % 2 or order is not None or widens():
        grouped = x.new_empty(rows, 2 * words, dtype=torch.float32 if widens() else x.dtype)
        group_rows = _widen_rows if widens() else _group_rows
        group_rows[x.dtype](
            parts.groups.shape[0], grouped.numel(), parts.groups.data_ptr(), *optional_arg(order), *row_args(x),
            grouped.data_ptr(), inputs,
        )  # fmt: skip
    items, cost = parts.segments.shape[0] * panels.shape[0], parts.cost(panels)
    operands = parts.segments.data_ptr(), panels.shape[0], grouped.data_ptr(), panels.data_ptr(), words
    results = *optional_arg(bias), out.data_ptr(), out.shape[1]
    _multiply[x.dtype, out.dtype](items, cost, *operands, *results)


@kernel({torch.bfloat16: (I32, I64, INT, BF16, INT, BF16, INT)})
def _group_rows(
    begin: int, end: int, groups: Any, order: Any, has_order: int, x: Any, row: int, out: Any, inputs: int
) -> None:
    words = (inputs + 1) // 2
    for item in range(begin, end):
        first, count = np.int64(groups[2 * item]), np.int64(groups[2 * item + 1])
        target = as_words(advance(out, first * words * 2))
        for i in range(count):
            source = advance(x, (order[first + i] if has_order else first + i) * row)
            pairs = as_words(source)
            for word in range(inputs // 2):
                target[word * count + i] = pairs[word]
            if inputs % 2:
                target[(words - 1) * count + i] = np.int32(source[inputs - 1])


@kernel({torch.bfloat16: (I32, I64, INT, BF16, INT, F32, INT)}, needs=widens())
def _widen_rows(
    begin: int, end: int, groups: Any, order: Any, has_order: int, x: Any, row: int, out: Any, inputs: int
) -> None:
    """As `_group_rows`, in float32: of each word the first inputs of all rows, and then the second ones."""
    words = (inputs + 1) // 2
    for item in range(begin, end):
        first, count = np.int64(groups[2 * item]), np.int64(groups[2 * item + 1])
        target = advance(out, first * words * 2)
        for i in range(count):
            source = advance(x, (order[first + i] if has_order else first + i) * row)
            for j in range(inputs):
                target[j * count + i] = load(source, j)
            if inputs % 2:
                target[inputs * count + i] = np.float32(0)


@intrinsic
def as_words(typingctx: Any, pointer: Any) -> Any:
    """The pointer, to words."""
    return I32(pointer), lambda context, builder, _, args: builder.bitcast(args[0], _I32.as_pointer())


class Product(NamedTuple):
    """Segments of rows times the panels of their matrices, plus a bias [outputs]. `words`: of a row."""

    segments: Any
    num_panels: int
    x: Any
    panels: Any
    words: int
    bias: Any
    has_bias: int
    out: Any
    outputs: int


def product_type(x: Any, panels: Any, bias: Any, out: Any) -> Any:
    return record(Product, I32, INT, x, panels, INT, bias, INT, out, INT)


@jit
def locate(p: Any, item: int) -> Any:
    """An item of a product, which is a segment times a panel: the segment, and the panel's number, first column and
    number of columns."""
    panel = item % p.num_panels
    return advance(p.segments, item // p.num_panels * 4), panel, panel * PANEL, min(PANEL, p.outputs - panel * PANEL)


@kernel(
    {
        (torch.bfloat16, dtype): (product_type(F32 if widens() else I32, I32, BF16, out),)
        for dtype, out in ELEMENTS.items()
    },
    needs=has_instructions(torch.bfloat16) or widens(),
)
def _multiply(begin: int, end: int, p: Any) -> None:
    buffer = np.empty(SUMS_OF_SEGMENT + LANES, np.float32)
    sums = aligned(buffer)
    for item in range(begin, end):
        segment, panel, column, columns = locate(p, item)
        add_segment(p, sums, segment, panel)
        first, bias = np.int64(segment[1]), advance(p.bias, column)
        for i in range(np.int64(segment[2])):
            source, target = advance(sums, i * PANEL), advance(p.out, (first + i) * p.outputs + column)
            if p.has_bias:
                for j in range(columns):
                    store(target, j, source[j] + load(bias, j))
            elif columns == PANEL and _HAS_AVX512:
                for j in range(0, PANEL, LANES):
                    store_16(advance(source, j), advance(target, j))
            else:
                for j in range(columns):
                    store(target, j, source[j])
    buffer[0] = 0


@intrinsic
def store_16(typingctx: Any, source: Any, target: Any) -> Any:
    """16 float32 become numbers of the dtype behind a pointer, by one instruction."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        source, target = args
        numbers = builder.load(builder.bitcast(source, _FLOATS.as_pointer()), align=4)
        if signature.args[1] == BF16:
            instruction = "llvm.x86.avx512bf16.cvtneps2bf16.512"
            kind = ir.FunctionType(_HALVES, [_FLOATS])
            numbers = builder.call(cgutils.get_or_insert_function(builder.module, kind, instruction), [numbers])
        builder.store(numbers, builder.bitcast(target, numbers.type.as_pointer()), align=2)
        return context.get_dummy_value()

    signature = numba_types.void(source, target)
    return (signature, code) if target in (F32, BF16) else None


@jit
def add_segment(p: Any, sums: Any, segment: Any, panel: int) -> None:
    """sums [rows, 32], float32 or int32: a segment's rows, in groups, times one of the panels of its matrix."""
    matrix, first = np.int64(segment[0]), np.int64(segment[1])
    rows, group = np.int64(segment[2]), np.int64(segment[3])
    words, numbers = p.words, numbers_of_word(p.x)
    x = advance(p.x, first * words * numbers)
    weights = advance(p.panels, (matrix * p.num_panels + panel) * words * PANEL)
    for word in range(0, words, _CHUNK):
        count = min(_CHUNK, words - word)
        for row in range(0, rows, group):
            num_rows = min(group, rows - row)
            # The last two groups have the first cache filled with the next words, a half each.
            groups_left = (rows - row + group - 1) // group
            next_words = advance(weights, (word + (0 if groups_left > 2 else _CHUNK)) * PANEL)
            if groups_left == 1 and row > 0:
                next_words = advance(next_words, count * LANES)
            add_tile(
                num_rows,
                advance(x, (row * words + word * num_rows) * numbers),
                advance(weights, word * PANEL),
                count,
                advance(sums, row * PANEL),
                np.int64(word == 0),
                next_words,
                PANEL if rows <= group else LANES,
            )


@intrinsic
def add_tile(
    typingctx: Any, rows: Any, x: Any, panel: Any, words: Any, sums: Any, fresh: Any, ahead: Any, step: Any
) -> Any:
    """sums [rows, 32] += one group of rows times so many words of a panel, or = if `fresh`. In int8 if sums are int32,
    in bfloat16 if they are float32, with rows that are widened if these are float32. `ahead`: what will be read next,
    of which a word's work asks for 32 numbers, `step` numbers behind those of the word before."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        rows, *others = args
        done = builder.append_basic_block("done")
        chosen = builder.switch(rows, done)
        for count in range(1, GROUP + 1):
            block = builder.append_basic_block(f"rows_{count}")
            chosen.add_case(ir.Constant(_I64, count), block)
            with builder.goto_block(block):
                if x == F32:
                    _call_widened_tiles(builder, count, *others)
                else:
                    name = f"cairn.tile.{count}.{'bfloat16' if sums == F32 else 'int8'}"
                    call_shared(builder, name, others, partial(_write_tile, count, sums == F32))
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    i64 = numba_types.int64
    if (x, sums) not in ((I32, F32), (I32, I32), (F32, F32)):
        return None
    return numba_types.void(i64, x, I32, i64, sums, i64, I32, i64), code


@intrinsic
def numbers_of_word(typingctx: Any, x: Any) -> Any:
    """Of a row behind a pointer: two where it is widened, else the word itself."""
    numbers = 2 if x == F32 else 1
    return numba_types.int64(x), lambda context, builder, _, args: ir.Constant(_I64, numbers)


def _call_widened_tiles(
    builder: Any, rows: int, x: Any, panel: Any, words: Any, sums: Any, fresh: Any, ahead: Any, step: Any
) -> None:
    """A tile of all 32 outputs for up to three rows, whose sums are 12 registers of 16, or two of half of them."""
    outputs = PANEL if rows <= GROUP // 2 else PANEL // 2
    for column in range(0, PANEL, outputs):
        offset = ir.Constant(_I64, column)
        at_column = [builder.gep(pointer, [offset]) for pointer in (panel, sums, ahead)]
        args = [x, at_column[0], words, at_column[1], fresh, at_column[2], step]
        call_shared(builder, f"cairn.tile.{rows}.widened", args, partial(_write_widened_tile, rows, outputs))


@contextmanager
def _tile_sums(
    builder: Any, total: Any, fresh: Any, rows: int, columns: Sequence[int], vector: Any
) -> Iterator[Mapping[tuple[int, int], Any]]:
    """A tile's sums by row and first column, in registers inside: loaded before, 0 if `fresh`, and stored behind."""

    def place(row: int, column: int) -> Any:
        return _vector_at(builder, total, ir.Constant(_I64, row * PANEL + column), vector)

    cells = [(row, column) for row in range(rows) for column in columns]
    sums = {cell: cgutils.alloca_once(builder, vector) for cell in cells}
    places = {cell: place(*cell) for cell in cells}
    is_fresh = builder.icmp_signed("!=", fresh, ir.Constant(_I64, 0))
    for cell in cells:
        before = builder.load(places[cell], align=4)
        builder.store(builder.select(is_fresh, ir.Constant(vector, [0] * vector.count), before), sums[cell])
    yield sums
    for cell in cells:
        builder.store(builder.load(sums[cell]), places[cell], align=4)


def _vector_at(builder: Any, pointer: Any, index: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())


def _everywhere(builder: Any, number: Any, vector: Any) -> Any:
    """A vector that has the number in each lane."""
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.Constant(_I32, 0))
    lanes = ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(one, one, lanes)


def _write_widened_tile(rows: int, outputs: int, builder: Any, function: Any) -> None:
    """The body of a tile of so many rows, float32, and outputs of a panel in bfloat16."""
    x, panel, words, total, fresh, ahead, step = function.args

    def both(bits: int) -> Any:
        return ir.Constant(_SHORT_WORDS, [bits] * _HALF_LANES)

    def half_of(pair: Any, half: int) -> Any:
        bits = builder.and_(pair, both(-65536)) if half else builder.shl(pair, both(16))
        return builder.bitcast(bits, _SHORT_FLOATS)

    columns = range(0, outputs, _HALF_LANES)
    with (
        _tile_sums(builder, total, fresh, rows, columns, _SHORT_FLOATS) as sums,
        cgutils.for_range(builder, words, intp=_I64) as loop,
    ):
        first, next_word = builder.mul(loop.index, ir.Constant(_I64, PANEL)), builder.mul(loop.index, step)
        for line in range(0, outputs, LANES):
            wanted = builder.add(next_word, ir.Constant(_I64, line))
            prefetch_line(builder, _vector_at(builder, ahead, wanted, ir.IntType(8)))
        pairs = {}
        for column in columns:
            index = builder.add(first, ir.Constant(_I64, column))
            pairs[column] = builder.load(_vector_at(builder, panel, index, _SHORT_WORDS), align=4)
        row = builder.mul(loop.index, ir.Constant(_I64, 2 * rows))
        for half in range(2):
            parts = {column: half_of(pair, half) for column, pair in pairs.items()}
            for i in range(rows):
                place = builder.add(row, ir.Constant(_I64, half * rows + i))
                number = _everywhere(builder, builder.load(builder.gep(x, [place])), _SHORT_FLOATS)
                for column in columns:
                    product = builder.fmul(number, parts[column], flags=("contract",))
                    total_so_far = builder.load(sums[i, column])
                    builder.store(builder.fadd(product, total_so_far, flags=("contract",)), sums[i, column])


def _write_tile(rows: int, floats: bool, builder: Any, function: Any) -> None:
    """The body of `add_tile` for a group of so many rows."""
    x, panel, words, total, fresh, ahead, step = function.args
    vector = ir.VectorType(_FLOAT if floats else _I32, LANES)
    instruction = "llvm.x86.avx512bf16.dpbf16ps.512" if floats else "llvm.x86.avx512.vpdpbusd.512"
    add = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector, _WORDS, _WORDS]), instruction)
    columns = range(0, PANEL, LANES)
    with (
        _tile_sums(builder, total, fresh, rows, columns, vector) as sums,
        cgutils.for_range(builder, words, intp=_I64) as loop,
    ):
        first = builder.mul(loop.index, ir.Constant(_I64, PANEL))
        parts = {}
        for column in columns:
            index = builder.add(first, ir.Constant(_I64, column))
            wanted = builder.add(builder.mul(loop.index, step), ir.Constant(_I64, column))
            prefetch_line(builder, _vector_at(builder, ahead, wanted, ir.IntType(8)))
            parts[column] = builder.load(_vector_at(builder, panel, index, _WORDS), align=4)
        row = builder.mul(loop.index, ir.Constant(_I64, rows))
        for i in range(rows):
            word = builder.load(builder.gep(x, [builder.add(row, ir.Constant(_I64, i))]))
            everywhere = _everywhere(builder, word, _WORDS)
            for column in columns:
                operands = (parts[column], everywhere) if floats else (everywhere, parts[column])
                builder.store(builder.call(add, [builder.load(sums[i, column]), *operands]), sums[i, column])
