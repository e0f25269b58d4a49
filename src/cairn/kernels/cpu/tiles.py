"""Tiles of products with panels (see `panels`), as LLVM code: the sums of one group of rows times one panel stay in
registers while its words come by."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.core import types as numba_types

from cairn.kernels.cpu.compiled import BF16, F32, I32, intrinsic
from cairn.kernels.cpu.features import cpu_features
from cairn.kernels.cpu.vectors import LANES, call_shared, prefetch_line

PANEL = 32
"""Outputs of a panel: two vectors."""

HAS_AVX512 = bool(cpu_features().get("avx512f"))

GROUP = 12 if HAS_AVX512 else 6
"""Rows of a group at most: 24 vectors of sums, or 12 of half the length, and eight or four are left for what is
multiplied."""

_HALF_LANES = LANES // 2
_SHORT_FLOATS, _SHORT_WORDS = (ir.VectorType(kind, _HALF_LANES) for kind in (ir.FloatType(), ir.IntType(32)))
_FLOAT, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_WORDS, _FLOATS = ir.VectorType(_I32, LANES), ir.VectorType(_FLOAT, LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


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
