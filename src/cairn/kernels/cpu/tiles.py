"""Products of small float32 matrices inside compiled loops.

A scan that works through one chunk of one head wants products of some 64 x 128 x 128 numbers, whose operands lie in the
core's own cache. Here the sums of a tile of the result stay in vector registers, which the compiler does not make of
loops over memory: the tile is written as LLVM's vectors.
"""

from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from cairn.kernels.cpu.compiled import F32, intrinsic, jit
from cairn.kernels.cpu.scalars import advance

_AVX512 = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))

LANES = 16
"""Numbers of a vector, which LLVM cuts where the CPU has shorter ones, and of a cache line."""

TILE_ROWS = 8 if _AVX512 else 2
"""Rows of a tile whose sums stay in registers: half of 32, and half of what 16 shorter ones hold."""

TILE_LANES = 32
"""Columns of a tile."""

_I64, _FLOAT, _I32 = ir.IntType(64), ir.FloatType(), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_CELLS = [(row, column) for row in range(TILE_ROWS) for column in range(0, TILE_LANES, LANES)]


@intrinsic
def aligned(typingctx: Any, array: Any) -> Any:
    """Pointer to the first number of a float32 array that a cache line begins with; nothing keeps the array alive."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        line = ir.Constant(_I64, LANES * 4 - 1)
        address = builder.and_(builder.add(builder.ptrtoint(data, _I64), line), builder.not_(line))
        return builder.inttoptr(address, data.type)

    return F32(array), code


@jit
def round_up(count: int, step: int) -> int:
    return (count + step - 1) // step * step


@intrinsic
def _add_tile(
    typingctx: Any, a: Any, a_row: Any, a_step: Any, b: Any, b_row: Any, c: Any, c_row: Any, depth: Any, scale: Any
) -> Any:
    """`add_product` for one tile."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        builder.call(_tile_function(builder.module, [value.type for value in args]), args)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(F32, i64, i64, F32, i64, F32, i64, i64, types.float32), code


def _tile_function(module: Any, parameters: list[Any]) -> Any:
    """One function for all callers in a kernel: copies of it take seconds to compile, a call of it takes nothing."""
    if "cairn.tile" in module.globals:
        return module.globals["cairn.tile"]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), parameters), "cairn.tile")
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    a, a_row, a_step, b, b_row, c, c_row, depth, scale = function.args

    def constant(number: int) -> Any:
        return ir.Constant(_I64, number)

    def vector_at(pointer: Any, index: Any) -> Any:
        return builder.bitcast(builder.gep(pointer, [index]), _VECTOR.as_pointer())

    def load(pointer: Any, index: Any) -> Any:
        return builder.load(vector_at(pointer, index), align=4)

    def broadcast(number: Any) -> Any:
        one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, ir.Constant(_I32, 0))
        return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))

    places = [builder.add(builder.mul(c_row, constant(row)), constant(column)) for row, column in _CELLS]
    zeros, factor = ir.Constant(_VECTOR, [0.0] * LANES), broadcast(scale)
    # 0 times what nobody has written yet may be NaN.
    fresh = builder.fcmp_ordered("==", scale, ir.Constant(_FLOAT, 0.0))
    sums = [cgutils.alloca_once(builder, _VECTOR) for _ in _CELLS]
    for place, total in zip(places, sums, strict=True):
        builder.store(builder.select(fresh, zeros, builder.fmul(factor, load(c, place))), total)
    a_rows = [builder.gep(a, [builder.mul(a_row, constant(row))]) for row in range(TILE_ROWS)]
    with cgutils.for_range(builder, depth, intp=_I64) as loop:
        a_at, b_at = builder.mul(loop.index, a_step), builder.mul(loop.index, b_row)
        columns = {n: load(b, builder.add(b_at, constant(n))) for n in range(0, TILE_LANES, LANES)}
        numbers = [broadcast(builder.load(builder.gep(pointer, [a_at]))) for pointer in a_rows]
        for (row, column), total in zip(_CELLS, sums, strict=True):
            product = builder.fmul(numbers[row], columns[column], flags=("contract",))
            builder.store(builder.fadd(product, builder.load(total), flags=("contract",)), total)
    for place, total in zip(places, sums, strict=True):
        builder.store(builder.load(total), vector_at(c, place), align=4)
    builder.ret_void()
    return function


@jit
def add_product(
    a: Any,
    a_row: int,
    a_step: int,
    b: Any,
    b_row: int,
    c: Any,
    c_row: int,
    rows: int,
    columns: int,
    depth: int,
    scale: float,
) -> None:
    """c = scale * c + a b, for scale 0 whatever c was: a [rows, depth], b [depth, columns], c [rows, columns].

    a[i, t] is a[i * a_row + t * a_step]; rows of b and of c lie together. All `rows` up to a multiple of TILE_ROWS and
    all `columns` up to one of TILE_LANES are read and written.
    """
    for column in range(0, columns, TILE_LANES):
        for row in range(0, rows, TILE_ROWS):
            left, right, here = advance(a, row * a_row), advance(b, column), advance(c, row * c_row + column)
            _add_tile(left, a_row, a_step, right, b_row, here, c_row, depth, np.float32(scale))
