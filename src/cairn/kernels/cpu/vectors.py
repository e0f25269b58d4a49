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

from cairn.kernels.cpu.compiled import BF16, F32, intrinsic

LANES = 16
_AVX512 = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))

LINE = 64
"""Bytes of a cache line, and of a vector."""

TILE_LANES = 64
"""What the rows of the buffers are rounded up to, so that only whole tiles of columns are needed."""

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


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


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
def prefetch(typingctx: Any, address: Any) -> Any:
    """What lies at a pointer will be read soon."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # For reading, into the second cache: the first is full of what is being worked on. Data, not code.
        builder.call(function, [builder.bitcast(args[0], byte), *(ir.Constant(i32, n) for n in (0, 2, 1))])
        return context.get_dummy_value()

    return types.void(address), code


@intrinsic
def aligned(typingctx: Any, array: Any) -> Any:
    """Pointer to the first number of a float32 buffer that a cache line begins with: where vectors cross lines, two
    are fetched for one. 15 numbers of the buffer may be left over in front. The buffer has to be mentioned behind the
    last use of the pointer, or it is gone before."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        address = builder.add(builder.ptrtoint(view.data, _I64), ir.Constant(_I64, LINE - 1))
        return builder.inttoptr(builder.and_(address, ir.Constant(_I64, -LINE)), _FLOAT.as_pointer())

    return F32(types.Array(types.float32, 1, "C")), code


@intrinsic
def widen_16(typingctx: Any, source: Any, target: Any) -> Any:
    """16 numbers of float32 or bfloat16 become float32 ones."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        zero = ir.Constant(_I64, 0)
        if source == F32:
            vector = _load(builder, args[0], zero)
        else:
            narrow, wide = (ir.VectorType(ir.IntType(bits), LANES) for bits in (16, 32))
            bits = builder.load(builder.bitcast(args[0], narrow.as_pointer()), align=2)
            shifted = builder.shl(builder.zext(bits, wide), ir.Constant(wide, [16] * LANES))
            vector = builder.bitcast(shifted, _VECTOR)
        _store(builder, vector, args[1], zero)
        return context.get_dummy_value()

    return (types.void(source, F32), code) if source in (F32, BF16) else None


@intrinsic
def largest_of(typingctx: Any, x: Any, count: Any) -> Any:
    """The largest of `count` numbers, a multiple of 16."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        x, count = args
        best = cgutils.alloca_once(builder, _VECTOR)
        builder.store(_load(builder, x, ir.Constant(_I64, 0)), best)
        first = step = ir.Constant(_I64, LANES)
        with cgutils.for_range_slice(builder, first, count, step, _I64) as (at, _):
            builder.store(_larger(builder, _load(builder, x, at), builder.load(best)), best)
        vector = builder.load(best)
        distance = LANES // 2
        while distance:
            turned = _shuffle(builder, vector, vector, [lane ^ distance for lane in range(LANES)])
            vector = _larger(builder, vector, turned)
            distance //= 2
        return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))

    return types.float32(F32, types.int64), code


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
    """The function for so many rows, whose sums of so many columns are kept in registers."""

    @intrinsic
    def add_product(
        typingctx: Any, a: Any, a_row: Any, b: Any, b_row: Any, c: Any, c_row: Any, width: Any, depth: Any
    ) -> Any:
        def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
            *_, width, _ = args
            step = ir.Constant(_I64, lanes)
            with cgutils.for_range_slice(builder, ir.Constant(_I64, 0), width, step, _I64) as (column, _):
                tile(builder, args, column)
            return context.get_dummy_value()

        def tile(builder: Any, args: Any, column: Any) -> None:
            a, a_row, b, b_row, c, c_row, _, depth = args
            b, c = builder.gep(b, [column]), builder.gep(c, [column])
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

        return types.void(F32, types.int64, F32, types.int64, F32, types.int64, types.int64, types.int64), code

    return add_product


# As many sums as there are registers for them, and at least four, one for each step that an addition takes.
add_8_rows = _add_product(8, 32 if _AVX512 else 16)
"""(a, a_row, b, b_row, c, c_row, width, depth): c[:, :width] += a b for 8 rows of a; width a multiple of 64."""

add_4_rows = _add_product(4, 32 if _AVX512 else 16)
"""The same for 4 rows of a."""

add_row = _add_product(1, 64)
"""The same for one."""
