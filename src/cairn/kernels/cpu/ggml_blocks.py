"""Blocks of ggml's quantized numbers taken apart into codes, scales and factors, as GGUF files have them side by side.

Words of eight bytes at a time, or vectors, wherever they lie: eight codes of four bits are as many operations as one.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cairn.kernels.cpu.compiled import BF16, F32, INT, U8, Kernel, jit, kernel, record
from cairn.kernels.cpu.packing import PackedLoop, packing
from cairn.kernels.cpu.scalars import advance, load_word, store_word, widen_half
from cairn.kernels.cpu.vectors import collect_bits, split_nibbles_16, split_nibbles_32

_BYTE_RATE = 4
"""Of blocks, that one thread takes apart in a nanosecond."""

_BITS_4 = np.uint64(0x0F0F0F0F0F0F0F0F)
_BITS_2 = np.uint64(0x0303030303030303)
_BITS_6 = np.uint64(0x3F3F3F3F)
_SIGNS = np.uint64(0x8080808080808080)
_HALF = np.uint64(0xFFFFFFFF)
_4, _6, _32 = map(np.uint64, (4, 6, 32))


class CodePlaces(NamedTuple):
    """Where the fields of a `QuantizedWeight` are; 0: it has none of this name."""

    codes: Any
    scales: Any
    minimums: Any
    fifths: Any
    factors: Any
    minimum_factors: Any


@jit
def _half_at(source: Any, place: int) -> Any:
    """uint16."""
    return np.uint16(np.uint16(source[place]) | np.uint16(source[place + 1]) << np.uint16(8))


@jit
def _two_levels(block: Any, number: int, out: CodePlaces) -> None:
    """Of Q4_K and Q5_K: eight scales and minimums in six bits, and a factor for all of either."""
    words, third = load_word(block, 4), load_word(block, 12)
    low, high = third & _BITS_4 & _HALF, third >> _4 & _BITS_4 & _HALF
    first, second = words & _HALF, words >> _32
    store_word(out.scales, 8 * number, first & _BITS_6 | (low | (first >> _6 & _BITS_2) << _4) << _32)
    store_word(out.minimums, 8 * number, second & _BITS_6 | (high | (second >> _6 & _BITS_2) << _4) << _32)
    out.factors[number] = widen_half(_half_at(block, 0))
    out.minimum_factors[number] = -widen_half(_half_at(block, 2))


_HALVES = record(CodePlaces, U8, BF16, BF16, U8, F32, F32)
"""Scales and minimums are of two bytes."""
_BYTES = record(CodePlaces, U8, U8, U8, U8, F32, F32)

# Items are rows, `row` bytes from one to the next.


@kernel({"blocks": (U8, INT, INT, INT, _HALVES)})
def _take_q8_0(begin: int, end: int, source: Any, row: int, blocks: int, size: int, out: CodePlaces) -> None:
    for item in range(begin, end):
        for j in range(blocks):
            block, number = advance(source, item * row + j * size), item * blocks + j
            out.scales[number] = _half_at(block, 0)
            for k in range(0, 32, 8):
                # From int8 to codes whose zero is 128.
                store_word(out.codes, 32 * number + k, load_word(block, 2 + k) ^ _SIGNS)


@kernel({"blocks": (U8, INT, INT, INT, _HALVES)})
def _take_32(begin: int, end: int, source: Any, row: int, blocks: int, size: int, out: CodePlaces) -> None:
    """Q4_0, Q4_1, Q5_0 and Q5_1: a scale, the second of each two a minimum, four bytes of fifth bits, and nibbles."""
    has_fifths = size > 20
    has_minimums = size % 4 == 0
    for item in range(begin, end):
        for j in range(blocks):
            block, number = advance(source, item * row + j * size), item * blocks + j
            out.scales[number] = _half_at(block, 0)
            if has_minimums:
                out.minimums[number] = _half_at(block, 2)
            if has_fifths:
                store_word(out.fifths, 4 * number, np.uint32(load_word(block, size - 20)))
            split_nibbles_16(advance(block, size - 16), advance(out.codes, 16 * number))


@kernel({"blocks": (U8, INT, INT, INT, _BYTES)})
def _take_q4_k(begin: int, end: int, source: Any, row: int, blocks: int, size: int, out: CodePlaces) -> None:
    """Q5_K as well, with a bit of each of eight groups in a byte of 32."""
    for item in range(begin, end):
        for j in range(blocks):
            block, number = advance(source, item * row + j * size), item * blocks + j
            _two_levels(block, number, out)
            if size > 144:
                collect_bits(advance(block, 16), advance(out.fifths, 32 * number))
            for k in range(0, 128, 32):
                split_nibbles_32(advance(block, size - 128 + k), advance(out.codes, 128 * number + k))


@kernel({"blocks": (U8, INT, INT, INT, _BYTES)})
def _take_q6_k(begin: int, end: int, source: Any, row: int, blocks: int, size: int, out: CodePlaces) -> None:
    """Of each half of a block: four times 32 codes, whose nibbles are in 64 bytes, the first two in their lower bits,
    and whose two upper bits are in 32."""
    for item in range(begin, end):
        for j in range(blocks):
            block, number = advance(source, item * row + j * size), item * blocks + j
            store_word(out.scales, 16 * number, load_word(block, 192))
            store_word(out.scales, 16 * number + 8, load_word(block, 200))
            out.factors[number] = widen_half(_half_at(block, 208))
            for k in range(0, 64, 8):
                half, place = k // 32, k % 32
                codes, upper = advance(out.codes, 256 * number + 128 * half + place), load_word(block, 128 + k)
                for part in range(2):
                    low = load_word(block, 64 * half + 32 * part + place)
                    first, second = upper >> np.uint64(2 * part), upper >> np.uint64(2 * part + 4)
                    store_word(codes, 32 * part, low & _BITS_4 | (first & _BITS_2) << _4)
                    store_word(codes, 32 * part + 64, low >> _4 & _BITS_4 | (second & _BITS_2) << _4)


TAKEN_APART: Mapping[str, Kernel] = MappingProxyType(
    {
        **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1"), _take_32),
        **dict.fromkeys(("Q4_K", "Q5_K"), _take_q4_k),
        "Q8_0": _take_q8_0,
        "Q6_K": _take_q6_k,
    }
)
"""By ggml's name."""


def take_apart(type_name: str, rows: NDArray[Any], size: int, fields: Mapping[str, Tensor]) -> None:
    """uint8 rows, each contiguous, of blocks of one of `TAKEN_APART`, each of `size` bytes, into the fields of a
    `QuantizedWeight` [rows, n], contiguous; now, or as `Packing.put_off` has it."""
    places = [fields[name].data_ptr() if name in fields else 0 for name in CodePlaces._fields]
    taken = rows.ctypes.data, rows.strides[0], rows.shape[1] // size, size, *places
    loop = TAKEN_APART[type_name]["blocks"]
    packing().get_ready(PackedLoop(loop, len(rows), rows.size // _BYTE_RATE, 0, taken, (rows, *fields.values())))
