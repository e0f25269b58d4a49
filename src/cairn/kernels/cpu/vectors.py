"""Small products over float32 buffers, with the vectors and the accumulators written out.

LLVM makes good code of a loop over one row. It does not keep a tile of sums in registers over a whole product, nor
add sixteen dot products up in one go; these functions do. A vector has 16 lanes whatever the CPU has: LLVM cuts it.
"""

from collections.abc import Sequence
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils

from cairn.kernels.cpu.compiled import F32, intrinsic

LANES = 16
_AVX512 = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))

TILE_ROWS = 8 if _AVX512 else 2
"""Rows of a tile whose sums stay in registers: half of 32, and half of what 16 shorter ones hold."""

TILE_LANES = 32
"""Columns of a tile."""

_I64, _FLOAT = ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _vector_at(builder: Any, pointer: Any, index: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [index]), _VECTOR.as_pointer())


def _load(builder: Any, pointer: Any, index: Any) -> Any:
    return builder.load(_vector_at(builder, pointer, index), align=4)


def _store(builder: Any, value: Any, pointer: Any, index: Any) -> None:
    builder.store(value, _vector_at(builder, pointer, index), align=4)


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _broadcast(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return _shuffle(builder, one, one, [0] * LANES)


def _shuffle(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), list(lanes))
    return builder.shuffle_vector(a, b, mask)


def _interleave(builder: Any, low: Any, high: Any, step: int) -> tuple[Any, Any]:
    """Of each pair of blocks of `step` lanes: the first blocks of both vectors, and the second ones of both."""
    first = [j if not j & step else LANES + j - step for j in range(LANES)]
    second = [j + step if not j & step else LANES + j for j in range(LANES)]
    return _shuffle(builder, low, high, first), _shuffle(builder, low, high, second)


@intrinsic
def pointer(typingctx: Any, array: Any, row: Any, column: Any) -> Any:
    """Where a number of a contiguous float32 matrix lies."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        view = context.make_array(kind)(context, builder, args[0])
        columns = builder.extract_value(view.shape, 1)
        return builder.gep(view.data, [builder.add(builder.mul(args[1], columns), args[2])])

    wanted = types.Array(types.float32, 2, "C")
    return (F32(array, types.int64, types.int64), code) if array == wanted else None


@intrinsic
def dot_16_rows(typingctx: Any, q: Any, k: Any, row: Any, dim: Any, out: Any) -> Any:
    """out[t] = sum of q[d] * k[t * row + d] for d < dim, for 16 rows t; dim a multiple of 16."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        q, k, row, dim, out = args
        sums = [cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, [0.0] * LANES)) for _ in range(LANES)]
        for total in sums:
            builder.store(ir.Constant(_VECTOR, [0.0] * LANES), total)
        step = ir.Constant(_I64, LANES)
        with cgutils.for_range_slice(builder, ir.Constant(_I64, 0), dim, step, _I64) as (d, _):
            part = _load(builder, q, d)
            for t, total in enumerate(sums):
                at = builder.add(builder.mul(row, ir.Constant(_I64, t)), d)
                builder.store(_multiply_add(builder, part, _load(builder, k, at), builder.load(total)), total)
        vectors = [builder.load(total) for total in sums]
        # Halves of two vectors are added as one, until one vector has all sixteen sums, in bit-reversed order undone
        # by pairing the vectors whose numbers differ in the same bit as the lanes.
        step_lanes = LANES // 2
        while step_lanes:
            half = len(vectors) // 2
            pairs = [_interleave(builder, vectors[i], vectors[i + half], step_lanes) for i in range(half)]
            vectors = [builder.fadd(first, second) for first, second in pairs]
            step_lanes //= 2
        _store(builder, vectors[0], out, ir.Constant(_I64, 0))
        return context.get_dummy_value()

    return types.void(F32, F32, types.int64, types.int64, F32), code


def _add_product(rows: int, lanes: int) -> Any:
    """The function for tiles of so many rows and columns."""

    @intrinsic
    def add_product(typingctx: Any, a: Any, a_row: Any, b: Any, b_row: Any, c: Any, c_row: Any, depth: Any) -> Any:
        def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
            a, a_row, b, b_row, c, c_row, depth = args
            columns = range(0, lanes, LANES)

            def place(i: int, column: int) -> Any:
                return builder.add(builder.mul(c_row, ir.Constant(_I64, i)), ir.Constant(_I64, column))

            cells = [(i, column) for i in range(rows) for column in columns]
            sums = {cell: cgutils.alloca_once(builder, _VECTOR) for cell in cells}
            for cell in cells:
                builder.store(_load(builder, c, place(*cell)), sums[cell])
            a_rows = [builder.gep(a, [builder.mul(a_row, ir.Constant(_I64, i))]) for i in range(rows)]
            with cgutils.for_range(builder, depth, intp=_I64) as loop:
                b_at = builder.mul(loop.index, b_row)
                parts = {n: _load(builder, b, builder.add(b_at, ir.Constant(_I64, n))) for n in columns}
                for i in range(rows):
                    factor = _broadcast(builder, builder.load(builder.gep(a_rows[i], [loop.index])))
                    for n in columns:
                        total = sums[i, n]
                        builder.store(_multiply_add(builder, factor, parts[n], builder.load(total)), total)
            for cell in cells:
                _store(builder, builder.load(sums[cell]), c, place(*cell))
            return context.get_dummy_value()

        return types.void(F32, types.int64, F32, types.int64, F32, types.int64, types.int64), code

    return add_product


add_tile = _add_product(TILE_ROWS, TILE_LANES)
"""(a, a_row, b, b_row, c, c_row, depth): c += a b for TILE_ROWS rows of a and TILE_LANES columns of b."""

add_row = _add_product(1, TILE_LANES)
"""The same for one row of a."""
