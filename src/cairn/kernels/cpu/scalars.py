"""Numbers inside compiled loops: memory of any dtype, and functions that LLVM makes vector code of.

`np.exp` and its kind are calls into the C library here, one number at a time; what is below is plain arithmetic.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from cairn.kernels.cpu.compiled import BF16, F16, F32, U8, exact_jit, intrinsic

ZERO: Any = np.float32(0)
ONE: Any = np.float32(1)
_I32 = ir.IntType(32)
_ROUNDING = np.float32(1.5 * 2**23)
"""Added to a small float32, it leaves the nearest whole number in the lowest bits, the even one of two."""
_LEAST = np.float32(-86.98)
"""What e is raised to where it is not 0: from here on 2^(turns - 1) is a normal number."""


@intrinsic
def bits_of(typingctx: Any, x: Any) -> Any:
    """uint32 with the bits of a float32."""
    return types.uint32(types.float32), lambda context, builder, _, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def float_of(typingctx: Any, bits: Any) -> Any:
    """float32 of a uint32 with its bits."""
    return types.float32(types.uint32), lambda context, builder, _, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def opaque(typingctx: Any, x: Any) -> Any:
    """A float32 of which LLVM does not know that it is a constant: in a loop it stays in a register or on the stack. Of
    a constant LLVM makes an address and a broadcast each time, and of two bounds comparisons and blends."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        kind = ir.FloatType()
        asm = ir.InlineAsm(ir.FunctionType(kind, [kind]), "", "=x,0", False)
        return builder.call(asm, [args[0]], attrs=("nounwind", "readnone"))

    return types.float32(types.float32), code


@intrinsic
def advance(typingctx: Any, pointer: Any, count: Any) -> Any:
    """The pointer `count` numbers on."""
    return pointer(pointer, types.int64), lambda context, builder, _, args: builder.gep(args[0], [args[1]])


@intrinsic
def widen(typingctx: Any, bits: Any) -> Any:
    """float32 of a bfloat16 that is given as uint16."""
    return types.float32(types.uint16), lambda context, builder, _, args: _widen(builder, args[0])


@intrinsic
def narrow(typingctx: Any, x: Any) -> Any:
    """uint16 of the bfloat16 nearest to a float32, the even one of two; a NaN stays a NaN."""
    return types.uint16(types.float32), lambda context, builder, _, args: _narrow(builder, args[0])


@intrinsic
def widen_half(typingctx: Any, bits: Any) -> Any:
    """float32 of a float16 that is given as uint16."""
    return types.float32(types.uint16), lambda context, builder, _, args: _widen_half(builder, args[0])


@intrinsic
def narrow_half(typingctx: Any, x: Any) -> Any:
    """uint16 of the float16 nearest to a float32, the even one of two; from 65520 on infinity; a NaN stays a NaN."""
    return types.uint16(types.float32), lambda context, builder, _, args: _narrow_half(builder, args[0])


@intrinsic
def load(typingctx: Any, pointer: Any, index: Any) -> Any:
    """float32: number `index` at a pointer to float32, bfloat16 or float16."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        return _widened(pointer, builder, builder.load(builder.gep(args[0], [args[1]])))

    return (types.float32(pointer, types.int64), code) if pointer in (F32, BF16, F16) else None


@intrinsic
def store(typingctx: Any, pointer: Any, index: Any, value: Any) -> Any:
    """A float32 becomes number `index` at a pointer to float32, bfloat16 or float16."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        builder.store(_narrowed(pointer, builder, args[2]), builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return (types.void(pointer, types.int64, types.float32), code) if pointer in (F32, BF16, F16) else None


@intrinsic
def load_apart(typingctx: Any, pointer: Any, index: Any) -> Any:
    """`load` of what no `store_apart` of the same kernel writes: without that LLVM would compare where all of them
    lead, and leaves a loop of many as it is."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        number = builder.load(builder.gep(args[0], [args[1]]))
        number.set_metadata("noalias", _results(builder.module))
        return _widened(pointer, builder, number)

    return (types.float32(pointer, types.int64), code) if pointer in (F32, BF16, F16) else None


@intrinsic
def store_apart(typingctx: Any, pointer: Any, index: Any, value: Any) -> Any:
    """`store` of what no `load_apart` of the same kernel reads."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        stored = builder.store(_narrowed(pointer, builder, args[2]), builder.gep(args[0], [args[1]]))
        stored.set_metadata("alias.scope", _results(builder.module))
        return context.get_dummy_value()

    return (types.void(pointer, types.int64, types.float32), code) if pointer in (F32, BF16, F16) else None


@intrinsic
def load_word(typingctx: Any, pointer: Any, place: Any) -> Any:
    """uint64: eight bytes, wherever they lie, from byte `place` on."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        return builder.load(_word_at(builder, args[0], args[1], ir.IntType(64)), align=1)

    return (types.uint64(pointer, types.int64), code) if pointer == U8 else None


@intrinsic
def store_word(typingctx: Any, pointer: Any, place: Any, word: Any) -> Any:
    """A uint32 or uint64 becomes the bytes from byte `place` on, wherever they lie."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        builder.store(args[2], _word_at(builder, args[0], args[1], args[2].type), align=1)
        return context.get_dummy_value()

    is_word = pointer == U8 and word in (types.uint32, types.uint64)
    return (types.void(pointer, types.int64, word), code) if is_word else None


@intrinsic
def rounded(typingctx: Any, pointer: Any, value: Any) -> Any:
    """A float32 as it would be read back from a pointer."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        return _widened(pointer, builder, _narrowed(pointer, builder, args[1]))

    return (types.float32(pointer, types.float32), code) if pointer in (F32, BF16, F16) else None


def _results(module: Any) -> Any:
    """LLVM's list of alias scopes with the one of `store_apart`."""
    return module.add_metadata([module.add_metadata(["cairn.results", module.add_metadata(["cairn.kernels"])])])


def _word_at(builder: Any, pointer: Any, place: Any, word: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [place]), word.as_pointer())


def _widened(pointer: Any, builder: Any, value: Any) -> Any:
    if pointer == F32:
        return value
    return _widen(builder, value) if pointer == BF16 else _widen_half(builder, value)


def _narrowed(pointer: Any, builder: Any, value: Any) -> Any:
    if pointer == F32:
        return value
    return _narrow(builder, value) if pointer == BF16 else _narrow_half(builder, value)


def _widen(builder: Any, value: Any) -> Any:
    wide = builder.shl(builder.zext(value, _I32), ir.Constant(_I32, 16))
    return builder.bitcast(wide, ir.FloatType())


def _narrow(builder: Any, value: Any) -> Any:
    def constant(number: int) -> Any:
        return ir.Constant(_I32, number)

    bits = builder.bitcast(value, _I32)
    # Half of what is cut off, less one where the result would be even without it: a tie goes to the even one.
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.add(builder.add(bits, constant(0x7FFF)), odd)
    is_nan = builder.fcmp_unordered("uno", value, value)
    # All bits set are a NaN, and with AVX2 an "or" with what the comparison gives. What is cut off might have been all
    # that told this one from infinity, or carry into its sign.
    chosen = builder.select(is_nan, constant(0xFFFFFFFF), rounded)
    return builder.trunc(builder.lshr(chosen, constant(16)), ir.IntType(16))


def _widen_half(builder: Any, value: Any) -> Any:
    def constant(number: int) -> Any:
        return ir.Constant(_I32, number)

    wide = builder.zext(value, _I32)
    magnitude = builder.and_(wide, constant(0x7FFF))
    # The exponent counts from -14 in the place of -126, and from 16 in the place of 128 where there is no number.
    is_finite = builder.icmp_unsigned("<", magnitude, constant(0x7C00))
    exponent = builder.select(is_finite, constant(112 << 23), constant(224 << 23))
    normal = builder.add(builder.shl(magnitude, constant(13)), exponent)
    small = builder.fmul(builder.sitofp(magnitude, ir.FloatType()), ir.Constant(ir.FloatType(), 2.0**-24))
    is_small = builder.icmp_unsigned("<", magnitude, constant(0x400))
    chosen = builder.select(is_small, builder.bitcast(small, _I32), normal)
    sign = builder.shl(builder.and_(wide, constant(0x8000)), constant(16))
    return builder.bitcast(builder.or_(chosen, sign), ir.FloatType())


def _narrow_half(builder: Any, value: Any) -> Any:
    def constant(number: int) -> Any:
        return ir.Constant(_I32, number)

    bits = builder.bitcast(value, _I32)
    magnitude = builder.and_(bits, constant(0x7FFFFFFF))
    # The exponent counts from -14 in the place of -126, and 13 bits are cut off, of which a tie goes to the even.
    even = builder.and_(builder.lshr(magnitude, constant(13)), constant(1))
    moved = builder.add(builder.add(magnitude, constant(0xFFF - (112 << 23) & 0xFFFFFFFF)), even)
    normal = builder.lshr(moved, constant(13))
    # The last bit of one half is worth 2^-24, as that of a float16 below 2^-14 is.
    half = ir.Constant(ir.FloatType(), 0.5)
    added = builder.bitcast(builder.fadd(builder.bitcast(magnitude, ir.FloatType()), half), _I32)
    small = builder.sub(added, constant(0x3F000000))
    chosen = builder.select(builder.icmp_unsigned("<", magnitude, constant(113 << 23)), small, normal)
    # From 65520 on, halfway from the largest number to the next power of two.
    chosen = builder.select(builder.icmp_unsigned("<", magnitude, constant(0x477FF000)), chosen, constant(0x7C00))
    is_nan = builder.icmp_unsigned(">", magnitude, constant(0x7F800000))
    chosen = builder.select(is_nan, constant(0x7E00), chosen)
    sign = builder.and_(builder.lshr(bits, constant(16)), constant(0x8000))
    return builder.trunc(builder.or_(chosen, sign), ir.IntType(16))


@exact_jit
def exp(x: Any) -> Any:
    """e^x of a float32 within two units in the last place; 0 below -86.98, infinity above 88.8, NaN of NaN."""
    # Comparisons in this order are a processor's own minimum, which keeps a NaN.
    bounded = np.float32(89.0) if x > np.float32(89.0) else x
    shifted = bounded * np.float32(1.44269504) + _ROUNDING
    turns = shifted - _ROUNDING
    # ln 2 in two parts: the first has few enough bits for the product to be exact.
    rest = bounded - turns * np.float32(0.693359375)
    rest = rest - turns * np.float32(-2.12194440e-4)
    # Twice e^rest, so that what is left of 2^turns has an exponent up to where e^x is infinity.
    square = rest * rest
    high = np.float32(2 * 1.9875691500e-4) * rest + np.float32(2 * 1.3981999507e-3)
    middle = np.float32(2 * 8.3334519073e-3) * rest + np.float32(2 * 4.1665795894e-2)
    low = np.float32(2 * 1.6666665459e-1) * rest + np.float32(2 * 5.0000001201e-1)
    value = ((high * square + middle) * square + low) * square + (rest + rest + np.float32(2))
    # 2^(turns - 1): the lowest bits of `shifted` are turns, and what else it has is shifted out.
    value = value * float_of((bits_of(shifted) << np.uint32(23)) + np.uint32(126 << 23))
    return ZERO if x < _LEAST else value


@exact_jit
def tanh(x: Any) -> Any:
    """Of a float32, within some units in the last place: near 0 by Cephes' polynomial, as 1 - 2 / (e^2x + 1) has lost
    digits there."""
    square = x * x
    value = np.float32(-5.70498872745e-3) * square + np.float32(2.06390887954e-2)
    value = value * square + np.float32(-5.37397155531e-2)
    value = value * square + np.float32(1.33314422036e-1)
    value = value * square + np.float32(-3.33332819422e-1)
    near = value * square * x + x
    far = ONE - np.float32(2) / (exp(x + x) + ONE)
    return near if square < np.float32(0.390625) else far


@exact_jit
def product(a: Any, b: Any, c: Any) -> Any:
    """a * b * c, from left to right. Free to choose, LLVM may order a loop's vector code and its scalar code
    differently, and which of them runs may depend on where the memory happens to lie."""
    return a * b * c


@exact_jit
def _one_plus_exp(x: Any) -> Any:
    """1 + e^-x of a float32, as 2^(-x log2 e), with two thirds of what `exp` computes: within three units in the last
    place, and for x below 0 what it is to have x rounded once more. 1 for large x, infinity below -88.4, NaN of NaN."""
    least, most, rounding = opaque(np.float32(-89)), opaque(np.float32(88.25)), opaque(_ROUNDING)
    # Comparisons in this order are a processor's own maximum and minimum, which keep a NaN.
    bounded = least if x < least else x
    bounded = most if bounded > most else bounded
    shifted = bounded * opaque(np.float32(-1.44269504)) + rounding
    rest = bounded * opaque(np.float32(1.44269504)) + (shifted - rounding)
    # 2^-rest within 9.2e-8, fitted for the least relative error on [-0.5, 0.5].
    value = opaque(np.float32(-1.3264727e-3)) * rest + opaque(np.float32(9.671513e-3))
    value = value * rest + opaque(np.float32(-5.5507336e-2))
    value = value * rest + opaque(np.float32(2.4022242e-1))
    value = value * rest + opaque(np.float32(-6.931470e-1))
    value = value * rest + opaque(ONE)
    # 2^turns for turns from -127, where the bits are those of 0, to 128, where they are those of infinity.
    return value * float_of((bits_of(shifted) << np.uint32(23)) + bits_of(opaque(ONE))) + opaque(ONE)


@exact_jit
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    return ONE / _one_plus_exp(x)


@exact_jit
def gelu(x: Any) -> Any:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as x sigmoid of twice what tanh is of."""
    return x / _one_plus_exp(np.float32(1.5957691216) * (x + np.float32(0.044715) * x * x * x))


@exact_jit
def silu(x: Any) -> Any:
    """x / (1 + e^-x)."""
    return x / _one_plus_exp(x)
