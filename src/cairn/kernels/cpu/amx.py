"""Tiles of products on the processor's matrix unit, AMX: 16 rows times 16 outputs, of 16 words at once.

A panel's words lie as the unit wants them. Of a group's rows it wants 16 words of a row side by side, and then those of
the next one: `RUN`. It takes 16 rows whatever there are: after a group's last row it reads what follows in memory and
writes sums that nobody reads, so that rows and sums need room for 15 more. A sum is taken in the same order for any
number of rows, as with vectors: one row is multiplied here as well, and is as fast as its weights come.

Weights of four bits become bytes first, a group of 128 inputs at a time, which are two tiles high. A group's sums are
whole numbers, and its factors are multiplied with by vectors: the sums are those that vectors alone come to.

Intel, "Architecture Instruction Set Extensions Programming Reference", chapter 3 (TDPBF16PS, TDPBUSD, TDPBSUD).
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.core import types as numba_types

from cairn.kernels.cpu.compiled import F32, I32, U8, intrinsic
from cairn.kernels.cpu.features import cpu_features
from cairn.kernels.cpu.vectors import call_shared, everywhere, fused, prefetch_line

HAS_AMX = all(cpu_features().get(name) for name in ("amx-tile", "amx-bf16", "amx-int8"))

ROWS = 16
"""Of a tile."""

RUN = 16 if HAS_AMX else 1
"""Words of a row of a group that lie together."""

SPARE_ROWS = ROWS - 1 if HAS_AMX else 0
"""That are read and written after the last one of a group."""

FACTOR_WORDS = 2
"""Words in front of those of a group of inputs, where weights have four bits: of a panel the outputs' scales, and their
minimums; of a row two pairs of numbers: its scale and the sum of its numbers, and two that are not used."""

INT4_GROUP_WORDS = 16
"""Of a panel in four bits, that tiles are made of: of eight inputs each."""

_WORDS, _OUTPUTS, _PANEL, _PANEL_BYTES, _ROW_BYTES = 16, 16, 32, 128, 64
_HALVES = (0, 1)
_INT4 = "tdpbsud"
_PRODUCTS: Mapping[Any, str] = MappingProxyType({(I32, F32): "tdpbf16ps", (I32, I32): "tdpbusd", (U8, F32): _INT4})
_I8, _I32, _I64, _FLOAT, _VOID = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.VoidType()
_WHOLES, _FLOATS = ir.VectorType(_I32, _OUTPUTS), ir.VectorType(_FLOAT, _OUTPUTS)
_EIGHT_FULL_TILES = bytes([1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [16] * 8 + [0] * 8)


def has_product(x: Any, sums: Any) -> bool:
    """Whether the unit multiplies rows of such words to such sums."""
    return HAS_AMX and (x, sums) in _PRODUCTS


@intrinsic
def begin_tiles(typingctx: Any, x: Any, sums: Any) -> Any:
    """Before the first tile of a thread's, given what rows and sums are in; nothing where the unit does not do it."""

    def code(context: Any, builder: Any, signature: Any, _: Any) -> Any:
        if has_product(*signature.args):
            data = cgutils.global_constant(builder, "cairn.amx.tiles", cgutils.make_bytearray(_EIGHT_FULL_TILES))
            _assembly(builder, "ldtilecfg ($0)", builder.bitcast(data, _I8.as_pointer()))
        return context.get_dummy_value()

    return numba_types.void(x, sums), code


@intrinsic
def end_tiles(typingctx: Any, x: Any, sums: Any) -> Any:
    """Behind the last one: the system need not keep the tiles any more where it stops the thread."""

    def code(context: Any, builder: Any, signature: Any, _: Any) -> Any:
        if has_product(*signature.args):
            _assembly(builder, "tilerelease")
        return context.get_dummy_value()

    return numba_types.void(x, sums), code


def call_tile(builder: Any, kinds: tuple[Any, Any], rows: Any, *args: Any) -> None:
    """LLVM code for `tiles.add_tile`, given what rows and sums are in: half the tiles where they take 16 rows."""
    product = _PRODUCTS[kinds]
    write = _write_int4 if product == _INT4 else partial(_write, product)
    few = builder.icmp_signed("<=", rows, _constant(ROWS))
    with builder.if_else(few) as (then, otherwise):
        for block, tiles in ((then, 1), (otherwise, 2)):
            with block:
                call_shared(builder, f"cairn.{product}.{tiles}", [rows, *args], partial(write, tiles))


def _code_for(product: str, tiles: int) -> tuple[str, str, str, str]:
    """Assembly for so many tiles of rows that clears the sums; that loads them and stores them ($0: where, $1:
    `_PANEL_BYTES`); and that adds a product to them ($0: words of a panel, $1: of rows, $2, $3: how many bytes their
    lines are apart). Tiles 0 to 3 have the sums, 4 and 5 rows, 6 and 7 outputs."""
    sums = [
        (2 * tile + half, tile * ROWS * _PANEL_BYTES + half * _ROW_BYTES) for tile in range(tiles) for half in _HALVES
    ]
    clear = "\n".join(f"tilezero %tmm{number}" for number, _ in sums)
    fetch = "\n".join(f"tileloadd {at}($0,$1), %tmm{number}" for number, at in sums)
    keep = "\n".join(f"tilestored %tmm{number}, {at}($0,$1)" for number, at in sums)
    lines = [f"tileloadd {half * _ROW_BYTES}($0,$2), %tmm{6 + half}" for half in _HALVES]
    for tile in range(tiles):
        lines.append(f"tileloadd {tile * ROWS * _ROW_BYTES}($1,$3), %tmm{4 + tile}")
        lines += [f"{product} %tmm{6 + half}, %tmm{4 + tile}, %tmm{2 * tile + half}" for half in _HALVES]
    return clear, fetch, keep, "\n".join(lines)


def _write(product: str, tiles: int, builder: Any, function: Any) -> None:
    """The body of the function for so many tiles of rows."""
    rows, x, panel, words, total, fresh, ahead, step, _ = function.args
    x, panel, total = (builder.bitcast(each, _I8.as_pointer()) for each in (x, panel, total))
    panel_stride, row_stride = _constant(_PANEL_BYTES), _constant(_ROW_BYTES)
    clear, fetch, keep, add = _code_for(product, tiles)
    with builder.if_else(_is_true(builder, fresh)) as (first, later):
        with first:
            _assembly(builder, clear)
        with later:
            _assembly(builder, fetch, total, panel_stride)
    asks = _is_true(builder, step)
    with cgutils.for_range(builder, builder.udiv(words, _constant(_WORDS)), intp=_I64) as loop:
        with builder.if_then(asks):
            _ask_ahead(builder, ahead, builder.mul(loop.index, _constant(_WORDS)), step, _WORDS)
        at_words = builder.gep(panel, [builder.mul(loop.index, _constant(_WORDS * _PANEL_BYTES))])
        at_rows = builder.gep(x, [builder.mul(loop.index, builder.mul(rows, row_stride))])
        _assembly(builder, add, at_words, at_rows, panel_stride, row_stride)
    _assembly(builder, keep, total, panel_stride)


def _write_int4(tiles: int, builder: Any, function: Any) -> None:
    """The same for weights of four bits. Of a row's numbers in a group those come first that lower halves of bytes are
    multiplied with, and then those of upper halves."""
    rows, x, panel, words, total, fresh, ahead, step, block = function.args
    x, panel = (builder.bitcast(each, _I32.as_pointer()) for each in (x, panel))
    numbers, whole = (_scratch(builder) for _ in range(2))
    strides = _constant(_PANEL_BYTES), _constant(_ROW_BYTES)
    clear, _, keep, add = _code_for(_INT4, tiles)
    with builder.if_then(_is_true(builder, fresh)), cgutils.for_range(builder, rows, intp=_I64) as row:
        for place in _columns_of(builder, total, row.index):
            _store(builder, ir.Constant(_FLOATS, None), place)
    asks = _is_true(builder, step)
    with cgutils.for_range(builder, builder.udiv(words, block), intp=_I64) as loop:
        first = builder.mul(loop.index, block)
        with builder.if_then(asks):
            _ask_ahead(builder, ahead, first, step, INT4_GROUP_WORDS + FACTOR_WORDS)
        group = builder.gep(panel, [builder.mul(first, _constant(_PANEL))])
        row_words = builder.mul(rows, _constant(2 * (INT4_GROUP_WORDS + FACTOR_WORDS)))
        group_rows = builder.gep(x, [builder.mul(loop.index, row_words)])
        _spread_nibbles(builder, builder.gep(group, [_constant(FACTOR_WORDS * _PANEL)]), numbers)
        _assembly(builder, clear)
        for half in _HALVES:
            before = builder.mul(rows, _constant(2 * FACTOR_WORDS + half * INT4_GROUP_WORDS))
            places = builder.gep(numbers, [_constant(half * _WORDS * _PANEL)]), builder.gep(group_rows, [before])
            _assembly(builder, add, *places, *strides)
        _assembly(builder, keep, whole, strides[0])
        factors = [_columns_of(builder, group, _constant(word)) for word in range(FACTOR_WORDS)]
        scales, least = ([_load(builder, place, _FLOATS) for place in places] for places in factors)
        with cgutils.for_range(builder, rows, intp=_I64) as row:
            row_factors = [builder.gep(group_rows, [place]) for place in (row.index, builder.add(rows, row.index))]
            scale, row_sum = (everywhere(builder, _load(builder, place, _FLOAT), _FLOATS) for place in row_factors)
            targets, sums = _columns_of(builder, total, row.index), _columns_of(builder, whole, row.index)
            for column, (target, place) in enumerate(zip(targets, sums, strict=True)):
                so_far = fused(builder, row_sum, least[column], _load(builder, target, _FLOATS))
                number = builder.sitofp(_load(builder, place, _WHOLES), _FLOATS)
                _store(builder, fused(builder, number, builder.fmul(scale, scales[column]), so_far), target)


def _spread_nibbles(builder: Any, words: Any, numbers: Any) -> None:
    """Of a group's words the lower halves of all bytes, and then the upper ones: 32 lines of 32 words."""
    mask, four = (ir.Constant(_WHOLES, [value] * _OUTPUTS) for value in (0x0F0F0F0F, 4))
    with cgutils.for_range(builder, _constant(INT4_GROUP_WORDS), intp=_I64) as word:
        low = _columns_of(builder, numbers, word.index)
        high = _columns_of(builder, numbers, builder.add(word.index, _constant(INT4_GROUP_WORDS)))
        for column, place in enumerate(_columns_of(builder, words, word.index)):
            both = _load(builder, place, _WHOLES)
            _store(builder, builder.and_(both, mask), low[column])
            _store(builder, builder.and_(builder.lshr(both, four), mask), high[column])


def _ask_ahead(builder: Any, ahead: Any, first: Any, step: Any, words: int) -> None:
    """For what is to come, as much for each word as a tile of vectors does."""
    for word in range(words):
        place = builder.mul(builder.add(first, _constant(word)), step)
        for line in (0, _OUTPUTS):
            prefetch_line(builder, builder.gep(ahead, [builder.add(place, _constant(line))]))


def _assembly(builder: Any, code: str, *operands: Any) -> None:
    kind = ir.FunctionType(_VOID, [operand.type for operand in operands])
    places = ",".join(["r"] * len(operands) + ["~{memory}"])
    builder.asm(kind, code, places, list(operands), side_effect=True)


def _constant(value: int) -> Any:
    return ir.Constant(_I64, value)


def _is_true(builder: Any, number: Any) -> Any:
    return builder.icmp_signed("!=", number, _constant(0))


def _scratch(builder: Any) -> Any:
    """Room for two tiles beside two others, int32 or bytes four by four."""
    lines = cgutils.alloca_once(builder, ir.ArrayType(_WHOLES, 2 * _WORDS * 2))
    return builder.bitcast(lines, _I32.as_pointer())


def _columns_of(builder: Any, lines: Any, index: Any) -> list[Any]:
    """Pointers to the two vectors of a line of 32 numbers."""
    first = builder.mul(index, _constant(_PANEL))
    return [builder.gep(lines, [builder.add(first, _constant(column))]) for column in (0, _OUTPUTS)]


def _load(builder: Any, pointer: Any, kind: Any) -> Any:
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=4)


def _store(builder: Any, numbers: Any, pointer: Any) -> None:
    builder.store(numbers, builder.bitcast(pointer, numbers.type.as_pointer()), align=4)
