"""Small float32 matrix products inside compiled loops.

A kernel that works through one chunk of one head wants products of some 64 x 128 x 128 numbers whose operands lie in
the core's own cache. BLAS is called on far larger ones to be worth the call. Here the sums of a tile of the result
stay in vector registers, which a loop over memory does not get out of the compiler: it is written as LLVM's vectors.
"""

from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cairn.kernels.cpu.compiled import F32, jit
from cairn.kernels.cpu.scalars import advance

_WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f", False))
_LANES = 16 if _WIDE else 8
_VECTORS = 2
TILE_ROWS = 8 if _WIDE else 4
TILE_COLUMNS = _LANES * _VECTORS
"""A tile of a product's result: as many sums as the registers hold beside the operands."""

ALIGNMENT = 16
"""Numbers of a cache line: scratch memory begins at one, and its rows are whole numbers of them long."""

_INT = ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), _LANES)


@jit
def round_up(count: int, step: int) -> int:
    return (count + step - 1) // step * step


@intrinsic  # type: ignore[untyped-decorator]
def aligned(typingctx: Any, array: Any) -> Any:
    """Pointer to the first number of a float32 array that a cache line begins with; nothing keeps the array alive."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        line = ir.Constant(_INT, ALIGNMENT * 4 - 1)
        address = builder.and_(builder.add(builder.ptrtoint(data, _INT), line), builder.not_(line))
        return builder.inttoptr(address, data.type)

    return F32(array), code


@intrinsic  # type: ignore[untyped-decorator]
def _tile(
    typingctx: Any,
    c: Any,
    c_row: Any,
    scale: Any,
    a: Any,
    a_row: Any,
    a_step: Any,
    b: Any,
    b_row: Any,
    depth: Any,
) -> Any:
    """`add_product` for one tile."""
    integer = types.int64
    signature = types.void(F32, integer, types.float32, F32, integer, integer, F32, integer, integer)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.call(_tile_function(builder.module, [arg.type for arg in args]), args)
        return context.get_dummy_value()

    return signature, code


def _tile_function(module: Any, parameters: list[Any]) -> Any:
    """One function for all its callers: copies of it in each would take seconds to compile."""
    if "cairn.tile" in module.globals:
        return module.globals["cairn.tile"]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), parameters), "cairn.tile")
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    c, c_row, scale, a, a_row, a_step, b, b_row, depth = function.args
    contract = ("contract",)

    def vector_at(pointer: Any) -> Any:
        return builder.bitcast(pointer, _VECTOR.as_pointer())

    def load(pointer: Any) -> Any:
        loaded = builder.load(vector_at(pointer))
        loaded.align = 4
        return loaded

    def spread(number: Any) -> Any:
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        one = builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
        return builder.shuffle_vector(one, undefined, lanes)

    def times(number: int, step: Any) -> Any:
        return builder.mul(ir.Constant(_INT, number), step)

    places = [
        builder.gep(c, [builder.add(times(row, c_row), ir.Constant(_INT, vector * _LANES))])
        for row in range(TILE_ROWS)
        for vector in range(_VECTORS)
    ]
    zero = ir.Constant(_VECTOR, [0.0] * _LANES)
    # What is not wanted may be anything, and 0 times anything may be NaN.
    unwanted = builder.fcmp_unordered("==", scale, ir.Constant(ir.FloatType(), 0.0))
    factor = spread(scale)
    begun = [builder.select(unwanted, zero, builder.fmul(factor, load(place))) for place in places]

    entry, body, done = builder.block, builder.append_basic_block("step"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed(">", depth, ir.Constant(_INT, 0)), body, done)
    builder.position_at_end(body)
    step = builder.phi(_INT)
    step.add_incoming(ir.Constant(_INT, 0), entry)
    sums = [builder.phi(_VECTOR) for _ in places]
    b_here = builder.gep(b, [builder.mul(step, b_row)])
    columns = [load(builder.gep(b_here, [ir.Constant(_INT, vector * _LANES)])) for vector in range(_VECTORS)]
    a_here = builder.gep(a, [builder.mul(step, a_step)])
    added = []
    for row in range(TILE_ROWS):
        number = spread(builder.load(builder.gep(a_here, [times(row, a_row)])))
        for vector in range(_VECTORS):
            product = builder.fmul(number, columns[vector], flags=contract)
            added.append(builder.fadd(product, sums[row * _VECTORS + vector], flags=contract))
    following = builder.add(step, ir.Constant(_INT, 1))
    step.add_incoming(following, body)
    for total, first, later in zip(sums, begun, added, strict=True):
        total.add_incoming(first, entry)
        total.add_incoming(later, body)
    builder.cbranch(builder.icmp_signed("<", following, depth), body, done)

    builder.position_at_end(done)
    results = [builder.phi(_VECTOR) for _ in places]
    for place, result, first, later in zip(places, results, begun, added, strict=True):
        result.add_incoming(first, entry)
        result.add_incoming(later, body)
        builder.store(result, vector_at(place), align=4)
    builder.ret_void()
    return function


@jit
def add_product(
    c: Any,
    c_row: int,
    scale: float,
    a: Any,
    a_row: int,
    a_step: int,
    b: Any,
    b_row: int,
    rows: int,
    columns: int,
    depth: int,
) -> None:
    """c = scale * c + a b, for scale 0 whatever c was: c [rows, columns], a [rows, depth], b [depth, columns].

    Rows of c begin `c_row` numbers apart and those of b `b_row`; a[i, t] is number i * a_row + t * a_step. All `rows`
    up to a multiple of TILE_ROWS and all `columns` up to one of TILE_COLUMNS are read and written.
    """
    for column in range(0, columns, TILE_COLUMNS):
        for row in range(0, rows, TILE_ROWS):
            _tile(
                advance(c, row * c_row + column),
                c_row,
                np.float32(scale),
                advance(a, row * a_row),
                a_row,
                a_step,
                advance(b, column),
                b_row,
                depth,
            )
