"""Products by the processor's dot instructions, with weights laid out in panels.

    bfloat16: AVX512-BF16's vdpbf16ps, two products a lane, added in float32
    int8: AVX512-VNNI's vpdpbusd, four products a lane of an unsigned and a signed byte, added in int32

A word is 32 bits of an output or of a row: two inputs in bfloat16, four in int8. A panel has the weights of 32 outputs,
one word of each beside the others. Rows come in groups of at most 12, in which the words of the rows lie side by side,
too. A tile, one group times one panel, keeps its sums in registers: panels and groups are the packed operands of Goto
and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008), section 4. A weight is read from memory
once for 192 rows, and few rows are multiplied as fast as the weights come.

Each sum is taken in the order of its inputs: a row has the same bits whatever rows it is multiplied with.
"""

from functools import cache
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.core import types as numba_types
from torch import Tensor

from cairn.kernels.cpu.compiled import BF16, ELEMENTS, F32, I32, INT, intrinsic, jit, kernel
from cairn.kernels.cpu.scalars import advance, load, store
from cairn.kernels.cpu.vectors import LANES, aligned, prefetch_line

PANEL = 32
"""Outputs of a panel: two vectors."""

GROUP = 12
"""Rows of a group at most: 24 vectors of sums, and eight are left for what is multiplied."""

GROUPS_OF_ITEM = 16
"""Groups that one item of a product multiplies a panel with."""

SUMS_OF_ITEM = GROUPS_OF_ITEM * GROUP * PANEL

_CHUNK = 256
"""Words of a panel's outputs, 32 KiB, that all groups are multiplied with before the next ones: they stay in the first
cache."""

_INPUTS_OF_WORD = {torch.bfloat16: 2, torch.int8: 4}.__getitem__
_FEATURES = {torch.bfloat16: ("avx512bf16", "amx-bf16"), torch.int8: ("avx512vnni", "amx-int8")}.get
_FLOAT, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_WORDS, _FLOATS = ir.VectorType(_I32, LANES), ir.VectorType(_FLOAT, LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


@cache
def has_instructions(dtype: torch.dtype) -> bool:
    """Whether this processor has these instructions for weights of a dtype, and no matrix unit, which oneDNN uses."""
    found, (instruction, matrix_unit) = llvmlite.binding.get_host_cpu_features(), _FEATURES(dtype, ("", ""))
    return bool(found.get(instruction)) and not found.get(matrix_unit)


def to_panels(matrix: Tensor) -> Tensor:
    """[out, in] bfloat16 or int8 -> the same dtype [panels, words, 32, inputs of a word], 0 where there are no more
    inputs or outputs."""
    (outputs, inputs), size = matrix.shape, _INPUTS_OF_WORD(matrix.dtype)
    panels, words = -(-outputs // PANEL), -(-inputs // size)
    if (panels * PANEL, words * size) != (outputs, inputs):
        whole = matrix.new_zeros(panels * PANEL, words * size)
        whole[:outputs, :inputs] = matrix
        matrix = whole
    return matrix.reshape(panels, PANEL, words, size).transpose(1, 2).contiguous()


def rows_of_group(rows: int) -> int:
    """Of each group but the last one, when so many rows are cut into as few groups as there can be."""
    return -(-rows // -(-rows // GROUP))


def items_of(rows: int, panels: Tensor) -> tuple[int, int]:
    """Items of a kernel that calls `add_item`, and their cost."""
    parts = -(-rows // (GROUPS_OF_ITEM * rows_of_group(rows)))
    # A thread reads some 35 bytes a nanosecond, and multiplies some 110 bytes of weights with a row.
    return parts * panels.shape[0], panels.nbytes // 35 + rows * panels.nbytes // 440


def product_of_panels(x: Tensor, panels: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x bfloat16 [n, in] times the transpose of the matrix that bfloat16 `panels` were made of, plus the bias, into out
    [n, out], bfloat16 or float32."""
    (rows, inputs), words = x.shape, panels.shape[1]
    group, grouped = rows_of_group(rows), x
    if rows > 1 or inputs % 2:
        grouped = x.new_empty(rows, 2 * words)
        _group_rows[x.dtype](
            -(-rows // group), x.numel(), x.data_ptr(), x.stride(0), grouped.data_ptr(), rows, group, inputs
        )
    _multiply[out.dtype](
        *items_of(rows, panels),
        grouped.data_ptr(),
        panels.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        bias is not None,
        out.data_ptr(),
        rows,
        group,
        words,
        out.shape[1],
    )


@kernel({torch.bfloat16: (BF16, INT, BF16, INT, INT, INT)})
def _group_rows(begin: int, end: int, x: Any, row: int, out: Any, rows: int, group: int, inputs: int) -> None:
    words = (inputs + 1) // 2
    for item in range(begin, end):
        first = item * group
        count = min(group, rows - first)
        target = words_at(advance(out, first * words * 2))
        for i in range(count):
            source = advance(x, (first + i) * row)
            pairs = words_at(source)
            for word in range(inputs // 2):
                target[word * count + i] = pairs[word]
            if inputs % 2:
                target[(words - 1) * count + i] = np.int32(source[inputs - 1])


@intrinsic
def words_at(typingctx: Any, pointer: Any) -> Any:
    """The pointer, to words."""
    return I32(pointer), lambda context, builder, _, args: builder.bitcast(args[0], _I32.as_pointer())


@kernel({dtype: (I32, I32, BF16, INT, out, INT, INT, INT, INT) for dtype, out in ELEMENTS.items()})
def _multiply(
    begin: int,
    end: int,
    x: Any,
    panels: Any,
    bias: Any,
    has_bias: int,
    out: Any,
    rows: int,
    group: int,
    words: int,
    outputs: int,
) -> None:
    buffer = np.empty(SUMS_OF_ITEM + LANES, np.float32)
    sums = aligned(buffer)
    for item in range(begin, end):
        first, count, panel, columns = place_of_item(item, rows, group, outputs)
        add_item(advance(x, first * words), advance(panels, panel * words), sums, count, group, words)
        added = advance(bias, panel)
        for i in range(count):
            source, target = advance(sums, i * PANEL), advance(out, (first + i) * outputs + panel)
            if has_bias:
                for j in range(columns):
                    store(target, j, source[j] + load(added, j))
            elif columns == PANEL:
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
def place_of_item(item: int, rows: int, group: int, outputs: int) -> tuple[int, int, int, int]:
    """The first row of an item and how many it has, its panel's first output and how many that has."""
    most = GROUPS_OF_ITEM * group
    parts = (rows + most - 1) // most
    first, panel = item % parts * most, item // parts * PANEL
    return first, min(most, rows - first), panel, min(PANEL, outputs - panel)


@jit
def add_item(x: Any, panel: Any, sums: Any, rows: int, group: int, words: int) -> None:
    """sums [rows, 32], float32 or int32: the rows, in groups, times a panel. Both are pointers to words."""
    for word in range(0, words, _CHUNK):
        count = min(_CHUNK, words - word)
        for row in range(0, rows, group):
            here = min(group, rows - row)
            # The last two groups have the first cache filled with the next words, a half each.
            groups_left = (rows - row + group - 1) // group
            ahead = advance(panel, (word + (0 if groups_left > 2 else _CHUNK)) * PANEL)
            if groups_left == 1 and row > 0:
                ahead = advance(ahead, count * LANES)
            add_tile(
                here,
                advance(x, row * words + word * here),
                advance(panel, word * PANEL),
                count,
                advance(sums, row * PANEL),
                np.int64(word == 0),
                ahead,
                PANEL if rows <= group else LANES,
            )


@intrinsic
def add_tile(
    typingctx: Any, rows: Any, x: Any, panel: Any, words: Any, sums: Any, fresh: Any, ahead: Any, step: Any
) -> Any:
    """sums [rows, 32] += one group of at most 12 rows times so many words of a panel, or = if `fresh`. In bfloat16 if
    sums are float32, in int8 if they are int32. `ahead`: what will be read next, of which a word's work asks for 32
    numbers, `step` numbers behind those of the word before."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        rows, *others = args
        done = builder.append_basic_block("done")
        chosen = builder.switch(rows, done)
        for count in range(1, GROUP + 1):
            block = builder.append_basic_block(f"rows_{count}")
            chosen.add_case(ir.Constant(_I64, count), block)
            with builder.goto_block(block):
                builder.call(_tile(builder.module, count, sums == F32, [value.type for value in others]), others)
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    i64 = numba_types.int64
    if sums not in (F32, I32):
        return None
    return numba_types.void(i64, I32, I32, i64, sums, i64, I32, i64), code


def _tile(module: Any, rows: int, floats: bool, parameters: list[Any]) -> Any:
    """The function for a group of so many rows, one for all callers in a module."""
    name = f"cairn.tile.{rows}.{'bfloat16' if floats else 'int8'}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), parameters), name)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, panel, words, total, fresh, ahead, step = function.args
    vector = ir.VectorType(_FLOAT if floats else _I32, LANES)
    instruction = "llvm.x86.avx512bf16.dpbf16ps.512" if floats else "llvm.x86.avx512.vpdpbusd.512"
    add = cgutils.get_or_insert_function(module, ir.FunctionType(vector, [vector, _WORDS, _WORDS]), instruction)

    def at(pointer: Any, index: Any, kind: Any) -> Any:
        return builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())

    columns = range(0, PANEL, LANES)
    cells = [(i, column) for i in range(rows) for column in columns]
    sums = {cell: cgutils.alloca_once(builder, vector) for cell in cells}
    places = {(i, column): at(total, ir.Constant(_I64, i * PANEL + column), vector) for i, column in cells}
    is_fresh = builder.icmp_signed("!=", fresh, ir.Constant(_I64, 0))
    for cell in cells:
        before = builder.load(places[cell], align=4)
        builder.store(builder.select(is_fresh, ir.Constant(vector, [0] * LANES), before), sums[cell])
    with cgutils.for_range(builder, words, intp=_I64) as loop:
        first = builder.mul(loop.index, ir.Constant(_I64, PANEL))
        parts = {}
        for column in columns:
            index = builder.add(first, ir.Constant(_I64, column))
            wanted = builder.add(builder.mul(loop.index, step), ir.Constant(_I64, column))
            prefetch_line(builder, at(ahead, wanted, ir.IntType(8)))
            parts[column] = builder.load(at(panel, index, _WORDS), align=4)
        row = builder.mul(loop.index, ir.Constant(_I64, rows))
        for i in range(rows):
            word = builder.load(builder.gep(x, [builder.add(row, ir.Constant(_I64, i))]))
            one = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), word, ir.Constant(_I32, 0))
            everywhere = builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * LANES))
            for column in columns:
                operands = (parts[column], everywhere) if floats else (everywhere, parts[column])
                builder.store(builder.call(add, [builder.load(sums[i, column]), *operands]), sums[i, column])
    for cell in cells:
        builder.store(builder.load(sums[cell]), places[cell], align=4)
    builder.ret_void()
    return function
