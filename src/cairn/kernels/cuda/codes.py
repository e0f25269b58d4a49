"""Weights in codes as the products of `fp8` and `experts` read them: a tile becomes numbers of the model's dtype,
with the bits that `QuantizedWeight.dequantize` gives, and is multiplied as a plain one.

A code becomes a float32 number by its bits, a scale or zero point is read once for a group, and the result is rounded
once. Which forms there are products with: see `gpu_codes.why_no_codes`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.quantized import NumberFormat, QuantizedWeight

ScaleFormat = Literal["plain", "e4m3", "e8m0"]
"""What scales are stored in: what has a type of its own in Triton, or bytes that stand for numbers of FP8."""

_FORMATS: Mapping[torch.dtype, ScaleFormat] = MappingProxyType(
    {torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0"}
)


@dataclass(frozen=True, slots=True)
class CodeForm:
    """What a kernel is compiled for: see `QuantizedWeight`.

    `group`: inputs of a group, 0 where a row is one. `factors`: what is done with them to scales. `factor_groups`: how
    many groups have one factor, 0 where all have.
    """

    bits: Literal[4, 5, 8]
    numbers: NumberFormat
    group: int
    zero: int
    has_zeros: bool
    has_minimums: bool
    scales: ScaleFormat
    factors: Literal["none", "times", "over"]
    scales_minimums: bool
    factor_groups: int


def code_form(weight: QuantizedWeight) -> CodeForm:
    """Of a weight that there are products with."""
    groups = weight.scales.shape[-1]
    factors = weight.minimum_factors if weight.factors is None else weight.factors
    shared = groups if factors is None else groups // factors.shape[-1]
    return CodeForm(
        bits=weight.bits,
        numbers=weight.numbers,
        group=0 if groups == 1 else weight.group,
        zero=weight.zero,
        has_zeros=weight.zeros is not None,
        has_minimums=weight.minimums is not None,
        scales=_FORMATS.get(weight.scales.dtype, "plain"),
        factors="none" if weight.factors is None else "over" if weight.divides else "times",
        scales_minimums=weight.minimum_factors is not None,
        factor_groups=0 if shared == groups else shared,
    )


def code_operands(weight: QuantizedWeight) -> tuple[Tensor, ...]:
    """What a kernel gets of a weight: codes, scales, and what `load_codes` calls `more`, codes where there is none."""
    scales = weight.scales.view(torch.uint8) if weight.scales.dtype in _FORMATS else weight.scales
    more = weight.zeros, weight.minimums, weight.factors, weight.minimum_factors, weight.fifths
    return weight.codes, scales, *(weight.codes if part is None else part for part in more)


NUM_OPERANDS = 7
"""What `code_operands` gives."""

_E2M1_UNIT = tl.constexpr(2.0**126)


@triton.jit
def load_codes(
    codes, scales, more, row, is_row, k, width,
    DEPTH: tl.constexpr, dtype: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Weights [rows, DEPTH] in `dtype`, of inputs from k on, a multiple of DEPTH; finite ones where there is no row
    or no input. `row`: int64, counted over all experts. `more`: zeros, minimums, factors, those of minimums, and fifth
    bits, where the form has them."""
    GROUP: tl.constexpr = CODES.group
    GROUPS: tl.constexpr = DEPTH // GROUP if GROUP > 0 and GROUP < DEPTH else 1
    ROWS: tl.constexpr = row.shape[0]
    zeros, minimums, factors, minimum_factors, fifths = more
    numbers = _load_codes(codes, fifths, row, is_row, k, width, DEPTH, CODES)
    numbers = tl.reshape(numbers, (ROWS, GROUPS, DEPTH // GROUPS))
    num_groups = width // GROUP if GROUP > 0 else 1
    group = (k // GROUP if GROUP > 0 else 0) + tl.arange(0, GROUPS)
    known = is_row[:, None] & (group < num_groups)[None, :]
    places = (row * num_groups)[:, None] + group[None, :]
    SHARED: tl.constexpr = CODES.factor_groups
    factor_places = (row * (num_groups // SHARED if SHARED > 0 else 1))[:, None]
    factor_places += (group // SHARED if SHARED > 0 else group * 0)[None, :]
    sizes = _load_scales(scales + places, known, CODES.scales)
    if CODES.factors == "over":
        sizes = tl.div_rn(sizes, tl.load(factors + factor_places, mask=known, other=1.0))
    if CODES.factors == "times":
        sizes = sizes * tl.load(factors + factor_places, mask=known, other=0.0)
    if CODES.numbers == "e2m1":
        values = _widen_e2m1(numbers)
    elif CODES.numbers == "e4m3":
        values = widen_e4m3(numbers)
    else:
        # The code becomes the last bits of 2**23.
        values = (numbers | 0x4B000000).to(tl.float32, bitcast=True)
        if CODES.has_zeros:
            zero = tl.load(zeros + places, mask=known, other=0).to(tl.float32) + 8388608.0
            values = values - zero[:, :, None]
        else:
            values = values - (8388608.0 + CODES.zero)
    values = values * sizes[:, :, None]
    if CODES.has_minimums:
        least = tl.load(minimums + places, mask=known, other=0).to(tl.float32)
        if CODES.scales_minimums:
            least = least * tl.load(minimum_factors + factor_places, mask=known, other=0.0)
        values = values + least[:, :, None]
    return tl.reshape(values.to(dtype), (ROWS, DEPTH))


@triton.jit
def _load_codes(codes, fifths, row, is_row, k, width, DEPTH: tl.constexpr, CODES: tl.constexpr):
    """int32 [rows, DEPTH]."""
    if CODES.bits == 8:
        byte = k + tl.arange(0, DEPTH)
        known = is_row[:, None] & (byte < width)[None, :]
        return tl.load(codes + (row * width)[:, None] + byte[None, :], mask=known, other=0).to(tl.int32)
    byte = k // 2 + tl.arange(0, DEPTH // 2)
    known = is_row[:, None] & (byte < width // 2)[None, :]
    pairs = tl.load(codes + (row * (width // 2))[:, None] + byte[None, :], mask=known, other=0).to(tl.int32)
    numbers = tl.interleave(pairs & 15, pairs >> 4)
    if CODES.bits == 5:
        ROWS: tl.constexpr = row.shape[0]
        byte = k // 8 + tl.arange(0, DEPTH // 8)
        known = is_row[:, None] & (byte < width // 8)[None, :]
        eight = tl.load(fifths + (row * (width // 8))[:, None] + byte[None, :], mask=known, other=0).to(tl.int32)
        bits = (eight[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
        numbers |= tl.reshape(bits, (ROWS, DEPTH)) << 4
    return numbers


@triton.jit
def _load_scales(places, mask, FORMAT: tl.constexpr):
    """In float32."""
    values = tl.load(places, mask=mask, other=0)
    if FORMAT == "e4m3":
        return widen_e4m3(values)
    if FORMAT == "e8m0":
        # The exponent's bits; the smallest number has too few of them, and the last one is NaN.
        bits = values.to(tl.int32)
        bits = tl.where(bits == 0, 0x400000, tl.where(bits == 255, 0x7FC00000, bits << 23))
        return bits.to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def widen_e4m3(values):
    """Bytes as numbers of FP8, in float32: as float16, whose exponent has one bit more and begins 8 lower."""
    bits = values.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    wide = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), wide)


@triton.jit
def _widen_e2m1(codes):
    """Codes of FP4 in float32: as float32, whose exponent begins 126 lower."""
    size = ((codes & 7) << 22).to(tl.float32, bitcast=True) * _E2M1_UNIT
    return ((codes & 8) << 28 | size.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
