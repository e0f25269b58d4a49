"""Tiles of products on the processor's matrix unit, AMX: 16 rows times 16 outputs, of 16 words at once.

A panel's words lie as the unit wants them. Of a group's rows it wants 16 words of a row side by side, and then those of
the next one: `RUN`. It takes 16 rows whatever there are: behind a group's last row it reads what follows in memory and
writes sums that nobody reads, so that rows and sums need room for 15 more. A sum is taken in the same order for any
number of rows, as with vectors: one row is multiplied here as well, and is as fast as its weights come.

Intel, "Architecture Instruction Set Extensions Programming Reference", chapter 3 (TDPBF16PS, TDPBUSD).
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.core import types as numba_types

from cairn.kernels.cpu.compiled import F32, I32, intrinsic
from cairn.kernels.cpu.features import cpu_features
from cairn.kernels.cpu.vectors import call_shared, prefetch_line

HAS_AMX = all(cpu_features().get(name) for name in ("amx-tile", "amx-bf16", "amx-int8"))

ROWS = 16
"""Of a tile."""

RUN = 16 if HAS_AMX else 1
"""Words of a row of a group that lie together."""

SPARE_ROWS = ROWS - 1 if HAS_AMX else 0
"""That are read and written behind the last one of a group."""

_WORDS, _OUTPUTS, _PANEL_BYTES, _ROW_BYTES = 16, 16, 128, 64
_HALVES = (0, 1)
_PRODUCTS: Mapping[Any, str] = MappingProxyType({(I32, F32): "tdpbf16ps", (I32, I32): "tdpbusd"})
_I8, _I64, _VOID = ir.IntType(8), ir.IntType(64), ir.VoidType()
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
    few = builder.icmp_signed("<=", rows, ir.Constant(_I64, ROWS))
    with builder.if_else(few) as (one, two):
        for block, tiles in ((one, 1), (two, 2)):
            with block:
                call_shared(builder, f"cairn.{product}.{tiles}", [rows, *args], partial(_write, product, tiles))


def _assembly(builder: Any, code: str, *operands: Any) -> None:
    kind = ir.FunctionType(_VOID, [operand.type for operand in operands])
    places = ",".join(["r"] * len(operands) + ["~{memory}"])
    builder.asm(kind, code, places, list(operands), side_effect=True)


def _write(product: str, tiles: int, builder: Any, function: Any) -> None:
    """The body of the function for so many tiles of rows. Tiles 0 to 3 have the sums, 4 and 5 rows, 6 and 7 outputs."""
    rows, x, panel, words, total, fresh, ahead, step = function.args
    x, panel, total = (builder.bitcast(each, _I8.as_pointer()) for each in (x, panel, total))
    panel_stride, row_stride = ir.Constant(_I64, _PANEL_BYTES), ir.Constant(_I64, _ROW_BYTES)
    sums = [
        (2 * tile + half, tile * ROWS * _PANEL_BYTES + half * _ROW_BYTES) for tile in range(tiles) for half in _HALVES
    ]
    clear = "\n".join(f"tilezero %tmm{number}" for number, _ in sums)
    fetch = "\n".join(f"tileloadd {at}($0,$1), %tmm{number}" for number, at in sums)
    keep = "\n".join(f"tilestored %tmm{number}, {at}($0,$1)" for number, at in sums)
    with builder.if_else(builder.icmp_signed("!=", fresh, ir.Constant(_I64, 0))) as (first, later):
        with first:
            _assembly(builder, clear)
        with later:
            _assembly(builder, fetch, total, panel_stride)
    lines = [f"tileloadd {half * _ROW_BYTES}($0,$2), %tmm{6 + half}" for half in _HALVES]
    for tile in range(tiles):
        lines.append(f"tileloadd {tile * ROWS * _ROW_BYTES}($1,$3), %tmm{4 + tile}")
        lines += [f"{product} %tmm{6 + half}, %tmm{4 + tile}, %tmm{2 * tile + half}" for half in _HALVES]
    asks = builder.icmp_signed("!=", step, ir.Constant(_I64, 0))
    steps = builder.udiv(words, ir.Constant(_I64, _WORDS))
    with cgutils.for_range(builder, steps, intp=_I64) as loop:
        with builder.if_then(asks):
            _ask_ahead(builder, ahead, builder.mul(loop.index, ir.Constant(_I64, _WORDS)), step)
        at_words = builder.gep(panel, [builder.mul(loop.index, ir.Constant(_I64, _WORDS * _PANEL_BYTES))])
        at_rows = builder.gep(x, [builder.mul(loop.index, builder.mul(rows, row_stride))])
        _assembly(builder, "\n".join(lines), at_words, at_rows, panel_stride, row_stride)
    _assembly(builder, keep, total, panel_stride)


def _ask_ahead(builder: Any, ahead: Any, first: Any, step: Any) -> None:
    """For what is to come, as much for each word as a tile of vectors does."""
    for word in range(_WORDS):
        place = builder.mul(builder.add(first, ir.Constant(_I64, word)), step)
        for line in (0, _OUTPUTS):
            prefetch_line(builder, builder.gep(ahead, [builder.add(place, ir.Constant(_I64, line))]))
