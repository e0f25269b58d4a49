"""Small products over float32 buffers, with the vectors and the accumulators written out.

LLVM makes good code of a loop over one row. It does not keep a tile of sums in registers over a whole product, nor
add sixteen dot products up in one go; these functions do. A vector has 16 lanes whatever the CPU has: LLVM cuts it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import RequireLiteralValue

from cairn.kernels.cpu.compiled import BF16, F32, I32, I64, U8, intrinsic, jit
from cairn.kernels.cpu.features import cpu_features
from cairn.kernels.cpu.scalars import advance

LANES = 16
_AVX512 = bool(cpu_features().get("avx512f"))

LINE = 64
"""Bytes of a cache line, and of a vector."""

TILE_ROWS = 8 if _AVX512 else 2
"""Rows of a tile whose sums stay in registers: half of 32, and half of what 16 shorter ones hold."""

TILE_LANES = 32
"""Columns of a tile."""

ROWS_ACROSS = LANES if _AVX512 else LANES // 2
"""Rows of `transpose_rows`: lanes of a register."""

_ROWS_AT_ONCE = LANES if _AVX512 else 4
"""Rows whose dot products are summed up at once: their sums, of 16 lanes each, stay in registers."""

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


def everywhere(builder: Any, number: Any, vector: Any) -> Any:
    """LLVM code: a vector that has the number in each lane."""
    inserted = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(inserted, inserted, lanes)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """LLVM code: a * b + c of float32 vectors, rounded once whatever is around it."""
    function = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(
        cgutils.get_or_insert_function(builder.module, function, f"llvm.fma.v{a.type.count}f32"), [a, b, c]
    )


def _shuffle(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
    return builder.shuffle_vector(a, b, mask)


def _interleave(builder: Any, low: Any, high: Any, step: int) -> tuple[Any, Any]:
    """Of each pair of blocks of `step` lanes: the first blocks of both vectors, and the second ones of both."""
    lanes = low.type.count
    first = [j if not j & step else lanes + j - step for j in range(lanes)]
    second = [j + step if not j & step else lanes + j for j in range(lanes)]
    return _shuffle(builder, low, high, first), _shuffle(builder, low, high, second)


def prefetch_line(builder: Any, address: Any, cache: int = 1) -> None:
    """LLVM code: the line at an address will be read soon, into the first or the second cache."""
    byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    # For reading, how near, and data, not code.
    builder.call(function, [builder.bitcast(address, byte), *(ir.Constant(i32, n) for n in (0, 4 - cache, 1))])


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """What lies at a pointer will be read soon: into the second cache, the first is full of what is being worked on."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        prefetch_line(builder, args[0], cache=2)
        return context.get_dummy_value()

    return types.void(address), code


@intrinsic
def prefetch_near(typingctx: Any, address: Any) -> Any:
    """What lies at a pointer will be read next: into the first cache."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        prefetch_line(builder, args[0])
        return context.get_dummy_value()

    return types.void(address), code


@intrinsic
def pointer_to(typingctx: Any, array: Any) -> Any:
    """Pointer to the first number of a buffer, which has to be mentioned after its last use, as for `aligned`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), code


@intrinsic
def stack_buffer(typingctx: Any, count: Any) -> Any:
    """Pointer to so many float32 numbers, a constant, of the function's own, of which LLVM knows that no other pointer
    leads there."""
    if not isinstance(count, types.IntegerLiteral):
        raise RequireLiteralValue("count")
    length = count.literal_value

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        buffer = cgutils.alloca_once(builder, ir.ArrayType(_FLOAT, length))
        buffer.align = LINE
        return builder.bitcast(buffer, _FLOAT.as_pointer())

    return F32(count), code


@intrinsic
def aligned(typingctx: Any, array: Any) -> Any:
    """Pointer to the first number of a float32 or int32 buffer that a cache line begins with: where vectors cross
    lines, two are fetched for one. 15 numbers of the buffer may be left over in front. The buffer has to be mentioned
    after the last use of the pointer, or it is gone before."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        address = builder.add(builder.ptrtoint(view.data, _I64), ir.Constant(_I64, LINE - 1))
        return builder.inttoptr(builder.and_(address, ir.Constant(_I64, -LINE)), context.get_value_type(pointer))

    pointer = types.CPointer(array.dtype)
    return (pointer(array), code) if array.dtype in (types.float32, types.int32) else None


def _transposed(builder: Any, rows: Sequence[Any]) -> Sequence[Any]:
    """LLVM code: as many vectors as each has lanes, transposed."""
    lines, step = list(rows), len(rows) // 2
    while step:
        for number in range(len(lines)):
            if not number & step:
                pair = lines[number], lines[number + step]
                lines[number], lines[number + step] = _interleave(builder, *pair, step)
        step //= 2
    return lines


@intrinsic
def set_address(typingctx: Any, table: Any, number: Any, pointer: Any) -> Any:
    """Number `number` of a table becomes the address that a pointer has."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        builder.store(builder.ptrtoint(args[2], _I64), builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return types.void(I64, types.int64, pointer), code


def _transpose_rows(bits: int) -> Any:
    """The function for rows of words, or of bfloat16 numbers that become float32."""

    def write(builder: Any, function: Any) -> None:
        rows, first, target, line = function.args
        words = ir.VectorType(ir.IntType(32), ROWS_ACROSS)

        def row(number: int) -> Any:
            address = builder.load(builder.gep(rows, [ir.Constant(_I64, number)]))
            at = builder.gep(builder.inttoptr(address, ir.IntType(bits).as_pointer()), [first])
            vector = ir.VectorType(ir.IntType(bits), ROWS_ACROSS)
            loaded = builder.load(builder.bitcast(at, vector.as_pointer()), align=1)
            if bits == 32:
                return loaded
            return builder.shl(builder.zext(loaded, words), ir.Constant(words, [16] * ROWS_ACROSS))

        for number, each in enumerate(_transposed(builder, [row(number) for number in range(ROWS_ACROSS)])):
            at = builder.gep(target, [builder.mul(line, ir.Constant(_I64, number))])
            builder.store(each, builder.bitcast(at, words.as_pointer()), align=4)

    @intrinsic
    def transpose(typingctx: Any, rows: Any, first: Any, target: Any, line: Any) -> Any:
        def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
            call_shared(builder, f"cairn.transpose_rows.{bits}", args, write)
            return context.get_dummy_value()

        kind = I32 if bits == 32 else F32
        return (types.void(I64, types.int64, kind, types.int64), code) if target == kind else None

    return transpose


transpose_rows = _transpose_rows(32)
"""(rows, first, target, line): of `ROWS_ACROSS` rows of words, at the addresses in a table, `ROWS_ACROSS` words from
number `first` on become as many lines, `line` words apart. Lines are written one after the other, each of them in full:
of fewer rows, those that are too many are where the next line begins, and behind the last one."""

transpose_widened = _transpose_rows(16)
"""The same of rows of bfloat16, which become float32."""


@intrinsic
def transpose_16(typingctx: Any, source: Any, row: Any, target: Any, line: Any) -> Any:
    """The first 16 numbers of 16 rows at `source`, `row` numbers apart, become 16 lines at `target`, `line` numbers
    apart. Rows may begin anywhere."""
    bits = source.dtype.bitwidth

    def write(builder: Any, function: Any) -> None:
        source, row, target, line = function.args
        vector = ir.VectorType(ir.IntType(bits), LANES).as_pointer()

        def place(pointer: Any, step: Any, number: int) -> Any:
            return builder.bitcast(builder.gep(pointer, [builder.mul(step, ir.Constant(_I64, number))]), vector)

        rows = [builder.load(place(source, row, number), align=1) for number in range(LANES)]
        for number, each in enumerate(_transposed(builder, rows)):
            builder.store(each, place(target, line, number), align=1)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        call_shared(builder, f"cairn.transpose_16.{bits}", args, write)
        return context.get_dummy_value()

    return (types.void(source, types.int64, source, types.int64), code) if source in (I32, BF16, U8) else None


@intrinsic
def transpose_nibbles(typingctx: Any, source: Any, row: Any, target: Any, line: Any) -> Any:
    """Of 16 squares side by side, each of 8 words with eight codes of four bits, the transposes: rows at `source` are
    `row` words apart, and become 8 lines at `target`, `line` words apart."""

    def write(builder: Any, function: Any) -> None:
        source, row, target, line = function.args
        words = ir.VectorType(ir.IntType(32), LANES)

        def place(pointer: Any, step: Any, number: int) -> Any:
            at = builder.gep(pointer, [builder.mul(step, ir.Constant(_I64, number))])
            return builder.bitcast(at, words.as_pointer())

        rows = [builder.load(place(source, row, number), align=1) for number in range(8)]
        for size, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
            shift, kept = (ir.Constant(words, [value] * LANES) for value in (4 * size, mask))
            for number in range(8):
                if not number & size:
                    # Of squares of 2 * size codes, the two quarters that lie across from each other.
                    upper, lower = rows[number], rows[number + size]
                    changed = builder.and_(builder.xor(builder.lshr(upper, shift), lower), kept)
                    rows[number + size] = builder.xor(lower, changed)
                    rows[number] = builder.xor(upper, builder.shl(changed, shift))
        for number, each in enumerate(rows):
            builder.store(each, place(target, line, number), align=1)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        call_shared(builder, "cairn.transpose_nibbles", args, write)
        return context.get_dummy_value()

    return types.void(I32, types.int64, I32, types.int64), code


@intrinsic
def weave_lines(typingctx: Any, lines: Any, places: Any, target: Any, step: Any) -> Any:
    """Of 8 lines of 16 words, one after the other, the first words of all, then the second ones, and so on, 128 words,
    32 of them at the target, the next 32 so many words on. `places`: pointer to the lines' numbers in the order in
    which their words follow each other."""

    def write(builder: Any, function: Any) -> None:
        lines, places, target, step = function.args
        words = ir.VectorType(ir.IntType(32), LANES)

        def line(number: int) -> Any:
            place = builder.load(builder.gep(places, [ir.Constant(_I64, number)]))
            at = builder.gep(lines, [builder.mul(place, ir.Constant(_I64, LANES))])
            return builder.load(builder.bitcast(at, words.as_pointer()), align=4)

        runs = [[line(number)] for number in range(8)]
        while len(runs) > 1:
            half = len(runs) // 2
            runs = [
                [part for pair in zip(runs[n], runs[n + half], strict=True) for part in _alternate(builder, *pair)]
                for n in range(half)
            ]
        for number, each in enumerate(runs[0]):
            far = builder.mul(step, ir.Constant(_I64, number // 2))
            at = builder.gep(target, [builder.add(far, ir.Constant(_I64, number % 2 * LANES))])
            builder.store(each, builder.bitcast(at, words.as_pointer()), align=4)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        call_shared(builder, "cairn.weave_lines", args, write)
        return context.get_dummy_value()

    return types.void(I32, I64, I32, types.int64), code


def _alternate(builder: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """The lanes of both by turns, in two vectors."""
    lanes = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
    return _shuffle(builder, first, second, lanes[:LANES]), _shuffle(builder, first, second, lanes[LANES:])


def _gather_codes(bits: int) -> Any:
    """The function for codes of so many bits."""
    in_word = 32 // bits

    def write(builder: Any, function: Any) -> None:
        source, row, numbers, target, count = function.args
        words = ir.VectorType(ir.IntType(32), LANES)

        def splat(value: int) -> Any:
            return ir.Constant(words, [value] * LANES)

        def at(pointer: Any, index: Any) -> Any:
            return builder.bitcast(builder.gep(pointer, [index]), words.as_pointer())

        rows, shifts = [], []
        for place in range(in_word):
            number = builder.load(builder.gep(numbers, [ir.Constant(_I64, place)]))
            line = builder.lshr(number, ir.Constant(_I64, in_word.bit_length() - 1))
            rows.append(builder.gep(source, [builder.mul(line, row)]))
            inside = builder.and_(number, ir.Constant(_I64, in_word - 1))
            shift = builder.trunc(builder.mul(inside, ir.Constant(_I64, bits)), ir.IntType(32))
            shifts.append(everywhere(builder, shift, words))
        first, step = ir.Constant(_I64, 0), ir.Constant(_I64, LANES)
        with cgutils.for_range_slice(builder, first, count, step, _I64) as (column, _):
            joined = splat(0)
            for place in range(in_word):
                code = builder.lshr(builder.load(at(rows[place], column), align=4), shifts[place])
                kept = builder.and_(code, splat((1 << bits) - 1))
                joined = builder.or_(joined, builder.shl(kept, splat(bits * place)))
            builder.store(joined, at(target, column), align=4)

    @intrinsic
    def gather(typingctx: Any, source: Any, row: Any, numbers: Any, target: Any, count: Any) -> Any:
        def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
            call_shared(builder, f"cairn.gather_codes.{bits}", args, write)
            return context.get_dummy_value()

        return types.void(I32, types.int64, I64, I32, types.int64), code

    return gather


gather_codes_4 = _gather_codes(4)
"""(source, row, numbers, target, count): of `count` columns, a multiple of 16, of words of eight codes of four bits
each, rows `row` words apart, a word of the codes with these eight numbers, counted down a column."""

gather_codes_8 = _gather_codes(8)
"""The same of words of four codes of eight bits."""


def _split_nibbles(length: int) -> Any:
    """The function for so many bytes."""

    def write(builder: Any, function: Any) -> None:
        source, target = function.args
        pairs, single = (ir.VectorType(ir.IntType(bits), length // 2) for bits in (16, 8))
        word = builder.load(builder.bitcast(source, pairs.as_pointer()), align=1)

        def shifted(value: Any, by: int) -> Any:
            return builder.lshr(value, ir.Constant(pairs, [by] * (length // 2)))

        for number in range(2):
            kept = builder.and_(shifted(word, 4 * number), ir.Constant(pairs, [0x0F0F] * (length // 2)))
            joined = builder.trunc(builder.or_(kept, shifted(kept, 4)), single)
            at = builder.gep(target, [ir.Constant(_I64, number * length // 2)])
            builder.store(joined, builder.bitcast(at, single.as_pointer()), align=1)

    @intrinsic
    def split(typingctx: Any, source: Any, target: Any) -> Any:
        def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
            call_shared(builder, f"cairn.split_nibbles.{length}", args, write)
            return context.get_dummy_value()

        return types.void(U8, U8), code

    return split


split_nibbles_16 = _split_nibbles(16)
"""(source, target): 16 bytes of which the lower bits are the first half of their codes become two neighbours a byte."""

split_nibbles_32 = _split_nibbles(32)
"""The same for 32 bytes."""


@intrinsic
def collect_bits(typingctx: Any, source: Any, target: Any) -> Any:
    """32 bytes: the lowest bits of all of them become the first four, the next ones the next four, and so on."""

    def write(builder: Any, function: Any) -> None:
        source, target = function.args
        words, single = ir.VectorType(_I64, 4), ir.VectorType(ir.IntType(8), 32)
        square = builder.load(builder.bitcast(source, words.as_pointer()), align=1)
        # Four squares of eight rows of eight bits are transposed (Warren, Hacker's Delight, section 7-3).
        for distance, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0)):
            by, kept = (ir.Constant(words, [value] * 4) for value in (distance, mask))
            changed = builder.and_(builder.xor(square, builder.lshr(square, by)), kept)
            square = builder.xor(builder.xor(square, changed), builder.shl(changed, by))
        lanes = [8 * (lane % 4) + lane // 4 for lane in range(32)]
        rows = builder.bitcast(square, single)
        mask = ir.Constant(ir.VectorType(ir.IntType(32), 32), lanes)
        builder.store(builder.shuffle_vector(rows, rows, mask), builder.bitcast(target, single.as_pointer()), align=1)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        call_shared(builder, "cairn.collect_bits", args, write)
        return context.get_dummy_value()

    return types.void(U8, U8), code


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
        _store(builder, _dot_rows(builder, q, k, row, dim, 0, 1), out, ir.Constant(_I64, 0))
        return context.get_dummy_value()

    return types.void(F32, F32, types.int64, types.int64, F32), code


def _dot_rows(builder: Any, q: Any, k: Any, row: Any, dim: Any, first: int, step: int) -> Any:
    """LLVM code: a vector with the dot products of q and each `step`th of 16 rows from `first` on. Of a row lanes that
    are `step` apart have one each, the others' sums are yet to be added to them."""
    if LANES // step > _ROWS_AT_ONCE:
        low, high = (_dot_rows(builder, q, k, row, dim, each, 2 * step) for each in (first, first + step))
        return _add_lanes(builder, low, high, step)
    zeros = ir.Constant(_VECTOR, [0.0] * LANES)
    sums = {t: cgutils.alloca_once(builder, _VECTOR) for t in range(first, LANES, step)}
    for total in sums.values():
        builder.store(zeros, total)
    lanes = ir.Constant(_I64, LANES)
    with cgutils.for_range_slice(builder, ir.Constant(_I64, 0), dim, lanes, _I64) as (d, _):
        part = _load(builder, q, d)
        for t, total in sums.items():
            at = builder.add(builder.mul(row, ir.Constant(_I64, t)), d)
            builder.store(_multiply_add(builder, part, _load(builder, k, at), builder.load(total)), total)
    vectors, distance = [builder.load(total) for total in sums.values()], LANES // 2
    while len(vectors) > 1:
        half = len(vectors) // 2
        vectors = [_add_lanes(builder, vectors[i], vectors[i + half], distance) for i in range(half)]
        distance //= 2
    return vectors[0]


def _add_lanes(builder: Any, low: Any, high: Any, step: int) -> Any:
    """LLVM code: of both vectors each pair of blocks of `step` lanes added up, as the blocks of one vector in turn."""
    return builder.fadd(*_interleave(builder, low, high, step))


def call_shared(builder: Any, name: str, args: Sequence[Any], write: Callable[[Any, Any], None]) -> None:
    """LLVM code: a call of the function of this name, one for all callers in a module. Copies of it would take seconds
    to compile, a call of it takes nothing. `write` is given a builder and the function, whose body it writes."""
    module = builder.module
    if name not in module.globals:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [value.type for value in args]), name)
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        body = ir.IRBuilder(function.append_basic_block("entry"))
        write(body, function)
        body.ret_void()
    builder.call(module.globals[name], args)


def _add_product(rows: int, lanes: int) -> Any:
    """The function for tiles of so many rows and columns."""
    columns = range(0, lanes, LANES)
    cells = [(i, column) for i in range(rows) for column in columns]

    def write(builder: Any, function: Any) -> None:
        a, a_row, a_step, b, b_row, c, c_row, depth, scale = function.args

        def place(i: int, column: int) -> Any:
            return builder.add(builder.mul(c_row, ir.Constant(_I64, i)), ir.Constant(_I64, column))

        sums = {cell: cgutils.alloca_once(builder, _VECTOR) for cell in cells}
        zeros, factor = ir.Constant(_VECTOR, [0.0] * LANES), everywhere(builder, scale, _VECTOR)
        # 0 times what nobody has written yet may be NaN.
        fresh = builder.fcmp_ordered("==", scale, ir.Constant(_FLOAT, 0.0))
        for cell in cells:
            scaled = builder.fmul(factor, _load(builder, c, place(*cell)))
            builder.store(builder.select(fresh, zeros, scaled), sums[cell])
        a_rows = [builder.gep(a, [builder.mul(a_row, ir.Constant(_I64, i))]) for i in range(rows)]
        with cgutils.for_range(builder, depth, intp=_I64) as loop:
            a_at, b_at = builder.mul(loop.index, a_step), builder.mul(loop.index, b_row)
            parts = {n: _load(builder, b, builder.add(b_at, ir.Constant(_I64, n))) for n in columns}
            for i in range(rows):
                number = everywhere(builder, builder.load(builder.gep(a_rows[i], [a_at])), _VECTOR)
                for n in columns:
                    total = sums[i, n]
                    builder.store(_multiply_add(builder, number, parts[n], builder.load(total)), total)
        for cell in cells:
            _store(builder, builder.load(sums[cell]), c, place(*cell))

    @intrinsic
    def add(
        typingctx: Any, a: Any, a_row: Any, a_step: Any, b: Any, b_row: Any, c: Any, c_row: Any, depth: Any, scale: Any
    ) -> Any:
        def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
            call_shared(builder, f"cairn.add_product.{rows}.{lanes}", args, write)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(F32, i64, i64, F32, i64, F32, i64, i64, types.float32), code

    return add


add_tile = _add_product(TILE_ROWS, TILE_LANES)
"""(a, a_row, a_step, b, b_row, c, c_row, depth, scale): c = scale * c + a b for TILE_ROWS rows of a and TILE_LANES
columns of b; for scale 0 c may be anything. a[i, t] is a[i * a_row + t * a_step]; rows of b and c lie together."""

add_half_tile = _add_product(TILE_ROWS // 2, TILE_LANES)
"""The same for half as many rows."""

add_row = _add_product(1, 2 * TILE_LANES)
"""The same for one row and twice the columns: an addition takes four steps, and as many sums keep it busy."""


@jit
def round_up(count: int, step: int) -> int:
    return (count + step - 1) // step * step


@jit
def add_product(
    a: Any, a_row: int, a_step: int, b: Any, b_row: int, c: Any, c_row: int, rows: int, columns: int, depth: int,
    scale: float,
) -> None:  # fmt: skip
    """`add_tile` for c of so many rows and columns: all of them up to whole tiles are read and written."""
    for column in range(0, columns, TILE_LANES):
        for row in range(0, rows, TILE_ROWS):
            left, right, here = advance(a, row * a_row), advance(b, column), advance(c, row * c_row + column)
            add_tile(left, a_row, a_step, right, b_row, here, c_row, depth, np.float32(scale))
