"""Codes of quantized weights become words of a panel, as LLVM code: number * scale + minimum, each rounded once.

A word of codes has eight inputs of an output in four bits, or four in eight; 32 outputs' words lie side by side. Of
five bits the fifth ones are in words of their own, of 32 inputs each. Out of each word come as many inputs' numbers,
float32, or in pairs of bfloat16, in their order, as `panels` multiplies them.
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.core import types as numba_types

from cairn.kernels.cpu.compiled import BF16, F32, I32, U8, intrinsic
from cairn.kernels.cpu.features import cpu_features
from cairn.kernels.cpu.tiles import HAS_AVX512, PANEL
from cairn.kernels.cpu.vectors import call_shared
from cairn.kernels.quantized import E2M1

INTEGER_4, E2M1_4, INTEGER_5, INTEGER_8, E4M3_8 = range(5)
"""What codes are: see `QuantizedWeight`; the first three have eight of them in a word."""

WORD_OF_FIFTHS = 32
"""Inputs whose fifth bits are in one word."""

_BITS = MappingProxyType({INTEGER_4: 4, E2M1_4: 4, INTEGER_5: 4, INTEGER_8: 8, E4M3_8: 8})
"""In words of codes."""

_VARIANTS = 2 * len(_BITS)
_LANES = 16 if HAS_AVX512 else 8
_NARROWS = bool(cpu_features().get("avx512bf16"))
_I16, _I32, _I64, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_WORDS, _FLOATS = (ir.VectorType(kind, _LANES) for kind in (_I32, _FLOAT))
_HALVES = ir.VectorType(_I16, 2 * _LANES)


@intrinsic
def expand(
    typingctx: Any,
    codes: Any,
    words: Any,
    form: Any,
    has_least: Any,
    rounds: Any,
    scales: Any,
    zeros: Any,
    least: Any,
    fifths: Any,
    out: Any,
) -> Any:
    """So many words of codes of a form become numbers at `out`, float32, or pairs of bfloat16 if it points to words.
    `scales`, `zeros`, `least`: of the 32 outputs, for all of these inputs; least is not read unless `has_least`.
    `fifths`: words of fifth bits, from these codes' first one on, read where codes have five.
    `rounds`: float32 numbers are rounded to bfloat16."""
    in_pairs = out == I32

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        codes, words, form, has_least, rounds, *factors, fifths, out = args
        done = builder.append_basic_block("expanded")
        is_rounded = builder.select(_is_true(builder, rounds), _constant(_VARIANTS), _constant(0))
        number = builder.add(builder.mul(form, _constant(2)), builder.select(_is_true(builder, has_least), *_ONE_ZERO))
        chosen = builder.switch(number if in_pairs else builder.add(number, is_rounded), done)
        for variant in range(_VARIANTS if in_pairs else 2 * _VARIANTS):
            block = builder.append_basic_block(f"expand_{variant}")
            chosen.add_case(_constant(variant), block)
            with builder.goto_block(block):
                adds = variant % 2 == 1
                form_of = variant % _VARIANTS // 2
                writer = _Expansion(form_of, adds, in_pairs, rounds=in_pairs or variant >= _VARIANTS)
                call_shared(builder, writer.name, [codes, words, *factors, fifths, out], writer.write)
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    i64 = numba_types.int64
    return numba_types.void(I32, i64, i64, i64, i64, F32, F32, F32, I32, out), code


@intrinsic
def as_numbers(typingctx: Any, x: Any, buffer: Any) -> Any:
    """A float32 buffer's pointer as one to what rows like x are multiplied with: words if they are."""
    kind = I32 if x == I32 else F32
    return kind(x, buffer), lambda context, builder, _, args: builder.bitcast(args[1], context.get_value_type(kind))


@intrinsic
def as_floats(typingctx: Any, pointer: Any) -> Any:
    """A pointer to bytes as one to float32 numbers."""
    return F32(U8), lambda context, builder, _, args: builder.bitcast(args[0], _FLOAT.as_pointer())


@intrinsic
def as_halves(typingctx: Any, pointer: Any) -> Any:
    """A pointer to bytes as one to numbers of 16 bits."""
    return BF16(U8), lambda context, builder, _, args: builder.bitcast(args[0], _I16.as_pointer())


class _Expansion:
    """A function that expands codes of one form."""

    def __init__(self, form: int, has_least: bool, in_pairs: bool, rounds: bool) -> None:
        self.form, self.has_least, self.in_pairs, self.rounds = form, has_least, in_pairs, rounds
        self.name = f"cairn.expand.{form}.{has_least:d}{in_pairs:d}{rounds:d}"

    def write(self, builder: Any, function: Any) -> None:
        """The function's body."""
        codes, words, scales, zeros, least, fifths, out = function.args
        out = builder.bitcast(out, _I32.as_pointer())
        count = 32 // _BITS[self.form]
        lines = count // 2 if self.in_pairs else count
        for column in range(0, PANEL, _LANES):
            at = _constant(column)
            factors = [builder.load(_at(builder, each, at, _FLOATS), align=4) for each in (scales, zeros)]
            factors.append(builder.load(_at(builder, least, at, _FLOATS), align=4) if self.has_least else None)
            with cgutils.for_range(builder, words, intp=_I64) as loop:
                place = builder.add(builder.mul(loop.index, _constant(PANEL)), at)
                word = builder.load(_at(builder, codes, place, _WORDS), align=4)
                target = builder.add(builder.mul(loop.index, _constant(lines * PANEL)), at)
                high = self._fifths_of_word(builder, fifths, loop.index, at) if self.form == INTEGER_5 else None
                self._write_word(builder, word, high, factors, out, target)

    def _fifths_of_word(self, builder: Any, fifths: Any, index: Any, at: Any) -> Any:
        """The fifth bits of a word's codes are the lowest ones of these."""
        in_one = _constant(WORD_OF_FIFTHS // 8)
        place = builder.add(builder.mul(builder.udiv(index, in_one), _constant(PANEL)), at)
        word = builder.load(_at(builder, fifths, place, _WORDS), align=4)
        passed = builder.trunc(builder.mul(builder.urem(index, in_one), _constant(8)), _I32)
        return builder.lshr(word, _splat(builder, passed))

    def _write_word(self, builder: Any, word: Any, high: Any, factors: list[Any], out: Any, target: Any) -> None:
        count = 32 // _BITS[self.form]
        numbers = [self._number(builder, word, high, place, factors) for place in range(count)]
        if self.in_pairs:
            bits = [_narrow_pair(builder, *numbers[place : place + 2]) for place in range(0, count, 2)]
        else:
            bits = [_rounded(builder, each) if self.rounds else builder.bitcast(each, _WORDS) for each in numbers]
        for line, value in enumerate(bits):
            place = builder.add(target, _constant(line * PANEL))
            builder.store(value, _at(builder, out, place, _WORDS), align=4)

    def _number(self, builder: Any, word: Any, high: Any, place: int, factors: list[Any]) -> Any:
        bits = _BITS[self.form]
        scales, zeros, least = factors
        code = builder.lshr(word, _everywhere(bits * place)) if place else word
        if self.form == E2M1_4:
            number = _e2m1(builder, code)
        elif self.form == E4M3_8:
            number = _e4m3(builder, word, place)
        elif self.form == INTEGER_4 and HAS_AVX512:
            number = builder.fsub(_look_up(builder, range(16), code), zeros)
        else:
            if (place + 1) * bits < 32:
                code = builder.and_(code, _everywhere((1 << bits) - 1))
            if self.form == INTEGER_5:
                moved = builder.shl if place < 4 else builder.lshr
                fifth = builder.and_(moved(high, _everywhere(abs(4 - place))), _everywhere(16))
                code = builder.or_(code, fifth)
            number = builder.fsub(builder.sitofp(code, _FLOATS), zeros)
        number = builder.fmul(number, scales)
        return builder.fadd(number, least) if self.has_least else number


def _e2m1(builder: Any, code: Any) -> Any:
    """The numbers that the lowest four bits stand for."""
    size = _look_up(builder, E2M1[:_LANES], code)
    if HAS_AVX512:
        return size
    sign = builder.shl(builder.and_(code, _everywhere(8)), _everywhere(28))
    return builder.bitcast(builder.or_(builder.bitcast(size, _WORDS), sign), _FLOATS)


def _e4m3(builder: Any, word: Any, place: int) -> Any:
    """The numbers that the bytes at a place of words stand for, none of them NaN: a float32's exponent has four bits
    more and begins 120 higher."""
    top = builder.shl(word, _everywhere(24 - 8 * place)) if place < 3 else word
    sign = builder.and_(top, _everywhere(-(1 << 31)))
    size = builder.and_(builder.lshr(top, _everywhere(4)), _everywhere(0x7F00000))
    number = builder.fmul(
        builder.bitcast(size, _FLOATS), ir.Constant(_FLOATS, [ir.Constant(_FLOAT, 2.0**120)] * _LANES)
    )
    return builder.bitcast(builder.or_(builder.bitcast(number, _WORDS), sign), _FLOATS)


def _look_up(builder: Any, numbers: Sequence[float], index: Any) -> Any:
    """One of as many numbers as a vector has, by the lowest bits of an index: the instruction looks at no others."""
    table = ir.Constant(_FLOATS, [ir.Constant(_FLOAT, float(number)) for number in numbers])
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _WORDS])
    name = "llvm.x86.avx512.permvar.sf.512" if HAS_AVX512 else "llvm.x86.avx2.permps"
    return builder.call(_declared(builder, kind, name), [table, index])


def _narrow_pair(builder: Any, first: Any, second: Any) -> Any:
    """Words of two bfloat16 numbers, the first one in the lower half."""
    if _NARROWS:
        kind = ir.FunctionType(_HALVES, [_FLOATS, _FLOATS])
        narrow = _declared(builder, kind, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
        both = builder.call(narrow, [second, first])
        places = [lane + _LANES * half for lane in range(_LANES) for half in range(2)]
        mask = ir.Constant(ir.VectorType(_I32, 2 * _LANES), places)
        return builder.bitcast(builder.shuffle_vector(both, both, mask), _WORDS)
    low, high = (_rounded(builder, each) for each in (first, second))
    return builder.or_(builder.lshr(low, _everywhere(16)), high)


def _rounded(builder: Any, numbers: Any) -> Any:
    """Bits of float32 numbers rounded to bfloat16, a tie to the even one."""
    bits = builder.bitcast(numbers, _WORDS)
    odd = builder.and_(builder.lshr(bits, _everywhere(16)), _everywhere(1))
    wide = builder.add(builder.add(bits, _everywhere(0x7FFF)), odd)
    return builder.and_(wide, _everywhere(-65536))


def _declared(builder: Any, kind: Any, name: str) -> Any:
    return cgutils.get_or_insert_function(builder.module, kind, name)


def _at(builder: Any, pointer: Any, index: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())


def _everywhere(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * _LANES)


def _splat(builder: Any, number: Any) -> Any:
    single = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), number, _I32(0))
    return builder.shuffle_vector(single, single, _everywhere(0))


def _constant(value: int) -> Any:
    return ir.Constant(_I64, value)


def _is_true(builder: Any, number: Any) -> Any:
    return builder.icmp_signed("!=", number, _constant(0))


_ONE_ZERO = _constant(1), _constant(0)
