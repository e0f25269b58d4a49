"""Tiles of products with panels (see `panels`), as LLVM code: the sums of one group of rows times one panel stay in
registers while its words come by."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.core import types as numba_types

from cairn.kernels.cpu.amx import FACTOR_WORDS, HAS_AMX, ROWS, call_tile, has_product
from cairn.kernels.cpu.compiled import BF16, F32, I8, I16, I32, U8, intrinsic
from cairn.kernels.cpu.features import cpu_features, shifts_beside_products
from cairn.kernels.cpu.vectors import LANES, call_shared, everywhere, fused, prefetch_line

PANEL = 32
"""Outputs of a panel: two vectors."""

HAS_AVX512 = bool(cpu_features().get("avx512f"))

VECTOR_GROUP = 12 if HAS_AVX512 else 6
"""Rows of a group at most: 24 vectors of sums, or 12 of half the length, and eight or four are left for what is
multiplied."""

GROUP = 2 * ROWS if HAS_AMX else VECTOR_GROUP
"""The same where the matrix unit multiplies: few rows of weights in four bits are multiplied by vectors there, too."""

_VNNI_LANES = LANES if cpu_features().get("avx512vnni") else LANES // 2 if cpu_features().get("avxvnni") else 0
"""Outputs of a vector that vpdpbusd takes, of AVX512-VNNI or else of AVX-VNNI; 0: there is none."""

HAS_INT4 = _VNNI_LANES > 0 or bool(cpu_features().get("avx2") and cpu_features().get("fma"))
"""Whether there are products with weights of four bits."""

_FLOAT, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_SHORT = LANES // 2
_WIDEST = LANES if HAS_AVX512 else _SHORT
_WIDEST_WHOLE = LANES if cpu_features().get("avx512bw") else _SHORT
"""Outputs of a vector where numbers are widened: floats, and whole numbers of 16 bits."""

_WRITES_WIDENING = not HAS_AVX512 and shifts_beside_products()
"""Whether words are widened by shifts and masks that are written out: multipliers have no part in them. LLVM would take
blends."""

_WIDENED_SUMS = 2 * VECTOR_GROUP if HAS_AVX512 else 8
"""Vectors of sums that have room in registers beside whole rows of a panel that are widened, or were."""

_FLOATS, _HALVES = ir.VectorType(_FLOAT, LANES), ir.VectorType(_I16, LANES)


@dataclass(frozen=True, slots=True)
class _Form:
    """How words of a panel are multiplied. `name`: for the functions. `lanes`: outputs of a vector. `parts`: into how
    many a word is cut, each of which has a number of its own in a row's word. `part_of` (builder, words, part): the
    vector that is multiplied. `multiply_add` (builder, sums, part, numbers) with a row's number in each lane: new sums.
    `number`, `total`: types of a row's number and of a sum. `in_groups`: whether words are groups of inputs with
    factors in front, see `FACTOR_WORDS`; sums of a group are int32. `run`: words whose sums have room in 16 bits; 0:
    they are int32 at once. `most_sums`: vectors of them, of all outputs of a panel, that have room in registers."""

    name: str
    lanes: int
    parts: int
    number: ir.Type
    total: ir.Type
    part_of: Callable[[Any, Any, int], Any]
    multiply_add: Callable[[Any, Any, Any, Any], Any]
    in_groups: bool = False
    run: int = 0
    most_sums: int = 2 * VECTOR_GROUP

    def vector(self, kind: ir.Type) -> ir.VectorType:
        return ir.VectorType(kind, self.lanes)

    def outputs_of_tile(self, rows: int) -> int:
        """All 32 where the sums of so many rows have room in registers, else half of them, and then the others."""
        return PANEL if rows * PANEL // self.lanes <= self.most_sums else PANEL // 2


def _whole(builder: Any, words: Any, part: int) -> Any:
    return words


def _call(builder: Any, name: str, result: Any, args: Sequence[Any]) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _dot_bfloat16(builder: Any, total: Any, part: Any, numbers: Any) -> Any:
    return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", total.type, [total, part, numbers])


def _dot_bytes(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """vpdpbusd, which without AVX512-VNNI is AVX-VNNI's."""
    return _call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * total.type.count}", total.type, [total, unsigned, signed])


def _dot_int8(builder: Any, total: Any, part: Any, numbers: Any) -> Any:
    return _dot_bytes(builder, total, numbers, part)


def _asm(builder: Any, code: str, places: str, args: Sequence[Any], spare: int = 0) -> Any:
    """What instructions that are written out make of vectors, of the type of the first; before `args` there are so many
    vectors to spare. LLVM leaves them together, in their order."""
    kind = args[0].type
    result = ir.LiteralStructType([kind] * (1 + spare)) if spare else kind
    made = builder.asm(ir.FunctionType(result, [arg.type for arg in args]), code, places, args, side_effect=False)
    return builder.extract_value(made, 0) if spare else made


def _all_lanes(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _as_floats(builder: Any, words: Any, part: int) -> Any:
    return builder.bitcast(words, ir.VectorType(_FLOAT, words.type.count))


def _as_halves(builder: Any, words: Any, part: int) -> Any:
    return builder.bitcast(words, ir.VectorType(_I16, 2 * words.type.count))


def _widened_bfloat16(builder: Any, words: Any, part: int) -> Any:
    """Each half of a word is a float32 once the other half is cleared."""
    kind = words.type
    if not part:
        bits = builder.shl(words, _all_lanes(kind, 16))
    elif _WRITES_WIDENING:
        # Of a plain "and" LLVM makes a blend.
        bits = _asm(builder, "vpand $2, $1, $0", "=x,x,x", [words, _all_lanes(kind, -65536)])
    else:
        bits = builder.and_(words, _all_lanes(kind, -65536))
    return builder.bitcast(bits, ir.VectorType(_FLOAT, kind.count))


def _multiply_add_floats(builder: Any, total: Any, part: Any, numbers: Any) -> Any:
    return builder.fadd(builder.fmul(numbers, part, flags=("contract",)), total, flags=("contract",))


def _widened_int8(builder: Any, words: Any, part: int) -> Any:
    """Of each half of a word the lower or the upper byte, as an int16. The lower one: once, plus 0 times the upper; or
    by two shifts, in an order that LLVM leaves as it is, since it has no register to spare."""
    halves = ir.VectorType(_I16, 2 * words.type.count)
    if _WRITES_WIDENING:
        code = "vpsraw $$8, $1, $0" if part else "vpsllw $$8, $1, $0\nvpsraw $$8, $0, $0"
        return builder.bitcast(_asm(builder, code, "=x,x", [words]), halves)
    if not part:
        return _add_byte_pairs(builder, _all_lanes(words.type, 0x00010001), words)
    return builder.ashr(builder.bitcast(words, halves), _all_lanes(halves, 8))


def _add_byte_pairs(builder: Any, unsigned: Any, signed: Any) -> Any:
    """vpmaddubsw: products of bytes, of which those in a half of a word are added up, as an int16."""
    lanes = unsigned.type.count
    numbers = [builder.bitcast(each, ir.VectorType(ir.IntType(8), 4 * lanes)) for each in (unsigned, signed)]
    instruction = "llvm.x86.avx2.pmadd.ub.sw" if lanes == _SHORT else "llvm.x86.avx512.pmaddubs.w.512"
    return _call(builder, instruction, ir.VectorType(_I16, 2 * lanes), numbers)


def _add_in_order(builder: Any, total: Any, added: Any) -> Any:
    """total + added, of int32 or int16, as an instruction that LLVM leaves where it is. Of a plain sum it takes a
    word's products in another order, for which there are not enough registers."""
    place = "v" if HAS_AVX512 else "x"
    code = f"vpadd{'w' if total.type.element == _I16 else 'd'} $2, $1, $0"
    return _asm(builder, code, f"={place},{place},{place}", [total, added])


def _multiply_add_pairs(builder: Any, total: Any, part: Any, numbers: Any) -> Any:
    """With 16 registers as one: of a product that is apart from its sum LLVM has two, and room for one."""
    pairs = builder.bitcast(numbers, part.type)
    if total.type.count == _SHORT:
        return _asm(builder, "vpmaddwd $4, $3, $1\nvpaddd $1, $0, $0", "=x,=&x,0,x,x", [total, part, pairs], spare=1)
    return _add_in_order(builder, total, _call(builder, "llvm.x86.avx512.pmaddw.d.512", total.type, [part, pairs]))


def _nibbles(builder: Any, words: Any, part: int) -> Any:
    """Of each byte the lower or the upper four bits."""
    bits = builder.lshr(words, _all_lanes(words.type, 4)) if part else words
    return builder.and_(bits, _all_lanes(words.type, 0x0F0F0F0F))


def _dot_nibbles(builder: Any, total: Any, part: Any, numbers: Any) -> Any:
    return _dot_bytes(builder, total, part, numbers)


def _add_nibbles(builder: Any, total: Any, part: Any, numbers: Any) -> Any:
    """15 * 127 twice is an eighth of what an int16 takes."""
    return _add_in_order(builder, total, _add_byte_pairs(builder, part, numbers))


def _int4_form() -> _Form:
    if _VNNI_LANES:
        return _Form("int4", _VNNI_LANES, 2, _I32, _FLOAT, _nibbles, _dot_nibbles, in_groups=True)
    return _Form(
        "int4.widened", _WIDEST_WHOLE, 2, _I32, _FLOAT, _nibbles, _add_nibbles, in_groups=True, run=4,
        most_sums=_WIDENED_SUMS,
    )  # fmt: skip


def _widened(name: str, lanes: int, parts: int, number: ir.Type, part_of: Any, multiply_add: Any) -> _Form:
    """A form whose sums are of the type of a row's numbers, or are whole numbers as large as a pair of them."""
    return _Form(name, lanes, parts, number, number, part_of, multiply_add, most_sums=_WIDENED_SUMS)


_FORMS: Mapping[Any, _Form] = {
    (I32, F32): _Form("bfloat16", LANES, 1, _I32, _FLOAT, _whole, _dot_bfloat16),
    (I32, I32): _Form("int8", _VNNI_LANES, 1, _I32, _I32, _whole, _dot_int8),
    (F32, F32): _widened("bfloat16.widened", _WIDEST, 2, _FLOAT, _widened_bfloat16, _multiply_add_floats),
    (I16, I32): _widened("int8.widened", _WIDEST_WHOLE, 2, _I32, _widened_int8, _multiply_add_pairs),
    (I8, F32): _int4_form(),
}
"""By the types of what rows and sums are in."""

_WIDE_FORMS: Mapping[Any, _Form] = {
    (F32, F32): _widened("float32", _SHORT, 1, _FLOAT, _as_floats, _multiply_add_floats),
    **({} if _WRITES_WIDENING else {(I16, I32): _widened("int16", _SHORT, 1, _I32, _as_halves, _multiply_add_pairs)}),
}
"""The same where the panel has been widened before: see `widen_words`. Not of int8 where to widen takes nothing of what
multiplies."""

WIDENS_ONCE = not HAS_AVX512
"""Whether words are widened once for many groups of rows. With twice the rows in a group and vectors of twice the
length it takes longer than it saves."""


@intrinsic
def add_tile(
    typingctx: Any, rows: Any, x: Any, panel: Any, words: Any, sums: Any, fresh: Any, ahead: Any, step: Any, block: Any
) -> Any:
    """sums [rows, 32] += one group of rows times so many words of a panel, or = if `fresh`; see `_FORMS`. `ahead`: what
    will be read next, of which a word's work asks for 32 numbers, `step` numbers after those of the word before.
    `block`: words of a group of inputs with its factors, where there are groups. `panel`: words as they are packed, or
    as `wide_words` has them."""

    by_matrix_unit = has_product(x, sums)
    form = (_FORMS if panel == I32 else _WIDE_FORMS).get((x, sums))
    if form is None and not by_matrix_unit:
        return None

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        rows, x_pointer, words, *others = args
        others = [x_pointer, builder.bitcast(words, _I32.as_pointer()), *others]
        if form is None or by_matrix_unit:
            call_tile(builder, (x, sums), rows, *others)
            return context.get_dummy_value()
        done = builder.append_basic_block("done")
        chosen = builder.switch(rows, done)
        for count in range(1, VECTOR_GROUP + 1):
            block = builder.append_basic_block(f"rows_{count}")
            chosen.add_case(ir.Constant(_I64, count), block)
            with builder.goto_block(block):
                _call_tiles(builder, form, count, *others)
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    i64 = numba_types.int64
    return numba_types.void(i64, x, panel, i64, sums, i64, I32, i64, i64), code


@intrinsic
def wide_words(typingctx: Any, x: Any, scratch: Any) -> Any:
    """A pointer to where words are widened for rows like x, by its type; to words as they are where nothing is widened
    for them."""
    kind = x if WIDENS_ONCE and (x, scratch) in _WIDE_FORMS else I32
    return kind(x, scratch), lambda context, builder, _, args: builder.bitcast(args[1], context.get_value_type(kind))


@intrinsic
def widen_words(typingctx: Any, panel: Any, count: Any, out: Any) -> Any:
    """So many words of a panel, each as two words of 32 outputs: see `_WIDE_FORMS`. Returns whether it did anything."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        panel, count, out = args
        form = _FORMS[out_type, F32 if out_type == F32 else I32] if out_type != I32 else None
        if form is not None:
            target, lanes = builder.bitcast(out, _I32.as_pointer()), form.lanes
            with cgutils.for_range(builder, count, intp=_I64) as loop:
                for column in range(0, PANEL, lanes):
                    place = builder.add(builder.mul(loop.index, ir.Constant(_I64, PANEL)), ir.Constant(_I64, column))
                    words = builder.load(_vector_at(builder, panel, place, form.vector(_I32)), align=4)
                    for part in range(form.parts):
                        first = builder.mul(loop.index, ir.Constant(_I64, form.parts * PANEL))
                        place = builder.add(first, ir.Constant(_I64, part * PANEL + column))
                        wide = form.part_of(builder, words, part)
                        builder.store(wide, _vector_at(builder, target, place, wide.type), align=4)
        return ir.Constant(ir.IntType(1), form is not None)

    out_type = out
    return numba_types.boolean(I32, numba_types.int64, out), code


@intrinsic
def numbers_of_word(typingctx: Any, x: Any) -> Any:
    """Of a row at a pointer: what a word of weights is multiplied with."""
    numbers = {F32: 2, I16: 4, I8: 8, U8: 8}.get(x, 1)
    return numba_types.int64(x), lambda context, builder, _, args: ir.Constant(_I64, numbers)


def _call_tiles(
    builder: Any,
    form: _Form,
    rows: int,
    x: Any,
    panel: Any,
    words: Any,
    sums: Any,
    fresh: Any,
    ahead: Any,
    *counts: Any,
) -> None:
    outputs = form.outputs_of_tile(rows)
    x = builder.bitcast(x, form.number.as_pointer())
    for column in range(0, PANEL, outputs):
        offset = ir.Constant(_I64, column)
        at_column = [builder.gep(pointer, [offset]) for pointer in (panel, sums, ahead)]
        args = [x, at_column[0], words, at_column[1], fresh, at_column[2], *counts]
        call_shared(builder, f"cairn.tile.{rows}.{form.name}", args, partial(_write_tile, form, rows, outputs))


@contextmanager
def _tile_sums(
    builder: Any, total: Any, fresh: Any, rows: int, columns: Sequence[int], vector: Any
) -> Iterator[Mapping[tuple[int, int], Any]]:
    """A tile's sums by row and first column, in registers inside: loaded before, 0 if `fresh`, and stored after."""

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


def _hidden(builder: Any, pointer: Any) -> Any:
    """The same pointer, of which LLVM does not know that it is: what is read through both is read twice."""
    return builder.asm(ir.FunctionType(pointer.type, [pointer.type]), "", "=r,0", [pointer], side_effect=False)


class _Tile:
    """A tile of so many rows and outputs: the body of a function is written."""

    def __init__(self, form: _Form, rows: int, outputs: int, builder: Any, function: Any) -> None:
        self.form, self.rows, self.builder = form, rows, builder
        self.x, self.panel, self.words, self.total, self.fresh, self.ahead, self.step, self.block = function.args
        self.columns = range(0, outputs, form.lanes)
        self.lines = range(0, outputs, LANES)
        # Each part reads its words anew: there are not enough registers to keep them, where there are 16.
        again = self.panel if HAS_AVX512 or form.parts == 1 or rows == 1 else _hidden(builder, self.panel)
        self.panels = self.panel, again

    def write(self) -> None:
        kind = self.form.vector(self.form.total)
        with _tile_sums(self.builder, self.total, self.fresh, self.rows, self.columns, kind) as sums:
            if self.form.in_groups:
                self._add_groups(sums)
            else:
                with cgutils.for_range(self.builder, self.words, intp=_I64) as loop:
                    self._add_word(sums, loop.index)

    def _after(self, index: Any, count: int) -> Any:
        return self.builder.add(index, ir.Constant(_I64, count))

    def _ask_ahead(self, word: Any) -> None:
        """For what is to come."""
        next_word = self.builder.mul(word, self.step)
        for line in self.lines:
            wanted = self._after(next_word, line)
            prefetch_line(self.builder, _vector_at(self.builder, self.ahead, wanted, ir.IntType(8)))

    def _vectors(self, word: Any, kind: ir.Type, part: int = 0) -> Mapping[int, Any]:
        """Those of a word of the panel, by column, for a part of it."""
        builder = self.builder
        first, vector = builder.mul(word, ir.Constant(_I64, PANEL)), self.form.vector(kind)
        places = {column: self._after(first, column) for column in self.columns}
        return {
            column: builder.load(_vector_at(builder, self.panels[part], place, vector), align=4)
            for column, place in places.items()
        }

    def _number(self, word: Any, part: int, row: int, kind: ir.Type) -> Any:
        """A row's number for a part of a word, in each lane."""
        first = self.builder.mul(word, ir.Constant(_I64, self.form.parts * self.rows))
        place = self.builder.gep(self.x, [self._after(first, part * self.rows + row)])
        number = self.builder.load(self.builder.bitcast(place, kind.as_pointer()), align=4)
        return everywhere(self.builder, number, self.form.vector(kind))

    def _add_word(self, sums: Mapping[tuple[int, int], Any], word: Any) -> None:
        builder, form = self.builder, self.form
        self._ask_ahead(word)
        for part in range(form.parts):
            vectors = self._vectors(word, _I32, part)
            parts = {column: form.part_of(builder, each, part) for column, each in vectors.items()}
            for i in range(self.rows):
                numbers = self._number(word, part, i, form.number)
                for column in self.columns:
                    so_far = builder.load(sums[i, column])
                    builder.store(form.multiply_add(builder, so_far, parts[column], numbers), sums[i, column])

    def _add_groups(self, sums: Mapping[tuple[int, int], Any]) -> None:
        """Of each group whole numbers, which are exact, and then its factors."""
        builder, floats = self.builder, self.form.vector(_FLOAT)
        whole = {cell: cgutils.alloca_once(builder, self.form.vector(_I32)) for cell in sums}
        words = builder.sub(self.block, ir.Constant(_I64, FACTOR_WORDS))
        with cgutils.for_range(builder, builder.udiv(self.words, self.block), intp=_I64) as group:
            first = builder.mul(group.index, self.block)
            for cell in whole.values():
                builder.store(ir.Constant(cell.type.pointee, None), cell)
            step = max(self.form.run, 1)
            with cgutils.for_range(builder, builder.udiv(words, ir.Constant(_I64, step)), intp=_I64) as loop:
                place = builder.mul(loop.index, ir.Constant(_I64, step))
                self._add_run(whole, self._after(builder.add(first, place), FACTOR_WORDS))
            factors = first, self._after(first, 1)
            for word in factors:
                self._ask_ahead(word)
            scales, least = (self._vectors(word, _FLOAT) for word in factors)
            for i in range(self.rows):
                scale, total = (self._number(first, part, i, _FLOAT) for part in range(2))
                for column in self.columns:
                    so_far = fused(builder, total, least[column], builder.load(sums[i, column]))
                    factor = builder.fmul(scale, scales[column])
                    number = builder.sitofp(builder.load(whole[i, column]), floats)
                    builder.store(fused(builder, number, factor, so_far), sums[i, column])

    def _add_run(self, whole: Mapping[tuple[int, int], Any], first: Any) -> None:
        builder, run = self.builder, self.form.run
        if not run:
            self._add_word(whole, first)
            return
        kind = ir.VectorType(_I16, 2 * self.form.lanes)
        sums = {cell: cgutils.alloca_once(builder, kind) for cell in whole}
        for cell in sums.values():
            builder.store(ir.Constant(kind, None), cell)
        for word in range(run):
            self._add_word(sums, self._after(first, word))
        for cell, place in whole.items():
            added = _multiply_add_pairs(builder, builder.load(place), builder.load(sums[cell]), _all_lanes(kind, 1))
            builder.store(added, place)


def _write_tile(form: _Form, rows: int, outputs: int, builder: Any, function: Any) -> None:
    """The body of a tile's function."""
    _Tile(form, rows, outputs, builder, function).write()


@intrinsic
def store_16(typingctx: Any, source: Any, target: Any) -> Any:
    """16 float32 become numbers of the dtype at a pointer, by one instruction."""

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
