"""ggml's blocks of quantized numbers (structs of its ggml-common.h) as codes with scales, of which products are
made without dequantizing them. Each is the number that the `gguf` package makes of it, bit for bit."""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cairn.kernels.quantized import QuantizedWeight
from cairn.models.weights.compiled_loops import compiled_loops, passing_tensor

Bytes = NDArray[Any]
"""uint8, of which numpy's types say something wider as soon as bits are shifted."""

_RUNS: Mapping[int, Any] = MappingProxyType({8: np.uint64, 16: np.complex128})
"""Numbers of so many bytes: as one of them numpy copies a run in an eighth of the time that its bytes take."""

_HOST = torch.device("cpu")

_LOW_NIBBLES, _LOW_PAIRS = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0303030303030303)

_BIT_SWAPS = ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))
"""Of a square of 8 by 8 bits: how far two quarters of parts of it lie apart, and the bits of one of them."""


def pack_blocks(type_name: str, rows: Bytes, dtype: torch.dtype) -> QuantizedWeight:
    """Whole rows of blocks, [rows, bytes], of one of `CODED`."""
    block_bytes, unpack = CODED[type_name]
    fields = unpack(rows.reshape(len(rows), -1, block_bytes))
    zero, bits = fields.pop("zero", 0), fields.pop("bits", 4)
    # Group by group -> [rows, columns].
    tensors: dict[str, Any] = {name: torch.from_numpy(part.reshape(len(rows), -1)) for name, part in fields.items()}
    return QuantizedWeight(dtype=dtype, bits=bits, zero=zero, **tensors)


def empty_codes(
    type_name: str, num_rows: int, row_bytes: int, dtype: torch.dtype, device: torch.device = _HOST
) -> QuantizedWeight:
    """So many rows, of nothing yet."""
    single, fields = _single_row(type_name, row_bytes, dtype)
    memory, end, parts = passing_tensor((num_rows * single.nbytes,), torch.uint8, device), 0, {}
    for name, number, width in fields:
        begin, end = end, end + num_rows * width * number.itemsize
        parts[name] = memory[begin:end].view(number).view(num_rows, width)
    return single.with_rows(parts)


@cache
def _single_row(
    type_name: str, row_bytes: int, dtype: torch.dtype
) -> tuple[QuantizedWeight, tuple[tuple[str, torch.dtype, int], ...]]:
    """Its tensors by name, dtype and numbers as well: those of the widest numbers first, each at a multiple of its own
    where rows are put one after the other."""
    single = pack_blocks(type_name, np.zeros((1, row_bytes), np.uint8), dtype)
    parts = sorted(single.row_tensors().items(), key=lambda each: -each[1].itemsize)
    return single, tuple((name, part.dtype, part.shape[1]) for name, part in parts)


def has_loops() -> bool:
    """Whether `fill_codes` has compiled loops, which take all threads by themselves."""
    return compiled_loops("ggml_blocks") is not None


def fill_codes(type_name: str, rows: Bytes, made: QuantizedWeight, first: int) -> None:
    """Whole rows of blocks, [rows, bytes], as those of `made` from `first` on."""
    places = {field: part[first : first + len(rows)] for field, part in made.row_tensors().items()}
    loops = compiled_loops("ggml_blocks")
    if loops is not None and rows.strides[1] == 1:
        loops.take_apart(type_name, rows, CODED[type_name][0], places)
        return
    for field, part in pack_blocks(type_name, np.ascontiguousarray(rows), made.dtype).row_tensors().items():
        places[field].copy_(part)


def take_columns(weight: QuantizedWeight, runs: NDArray[np.int64], length: int) -> QuantizedWeight:
    """Those of these runs of `length` columns, one after the other, of a matrix whose groups divide them."""
    taken = torch.from_numpy(runs)

    def take(part: torch.Tensor) -> torch.Tensor:
        # What more columns have in common each run of them has by itself.
        shared = max(1, weight.shape[1] // (length * part.shape[1]))
        spread = part.repeat_interleave(shared, dim=1) if shared > 1 else part
        return spread.view(len(part), weight.shape[1] // length, -1)[:, taken].flatten(1)

    return weight.changed(take)


def _split(part: Bytes, *sizes: int) -> Bytes:
    """[..., n] -> [..., *sizes]."""
    return part.reshape(*part.shape[:-1], *sizes)


def _pairs(words: Bytes) -> Bytes:
    """Words of two bytes with a code of four bits each -> one byte with both, the first in the lower bits."""
    pairs: Bytes = (words | words >> 4).astype(np.uint8)
    return pairs


def _float16(blocks: Bytes, begin: int) -> NDArray[np.float16]:
    """[rows, blocks, 1]."""
    return np.ascontiguousarray(blocks[..., begin : begin + 2]).view(np.float16)


def _transpose_bits(squares: Bytes) -> Bytes:
    """uint64, each 8 rows of 8 bits -> bit n of each row is in row n (Warren, Hacker's Delight, section 7-3)."""
    for distance, kept in _BIT_SWAPS:
        changed = (squares ^ squares >> distance) & np.uint64(kept)
        squares = squares ^ changed ^ changed << distance
    return squares


def _q8_0(blocks: Bytes) -> dict[str, Any]:
    # From int8 to codes whose zero is 128.
    return {"codes": blocks[..., 2:] ^ 128, "scales": _float16(blocks, 0), "zero": 128, "bits": 8}


def _q4_0(blocks: Bytes) -> dict[str, Any]:
    return {"codes": _neighbours(blocks[..., 2:]), "scales": _float16(blocks, 0), "zero": 8}


def _q4_1(blocks: Bytes) -> dict[str, Any]:
    return {"codes": _neighbours(blocks[..., 4:]), "scales": _float16(blocks, 0), "minimums": _float16(blocks, 2)}


def _neighbours(nibbles: Bytes) -> Bytes:
    """Bytes of which the lower bits are the first half of n codes -> two neighbours a byte, [..., n / 2]."""
    words, run = np.ascontiguousarray(nibbles).view(np.uint16), _RUNS[nibbles.shape[-1] // 2]
    parts = [_pairs(part).view(run) for part in (words & 0x0F0F, words >> 4 & 0x0F0F)]
    return np.concatenate(parts, axis=-1).view(np.uint8)


def _q5_0(blocks: Bytes) -> dict[str, Any]:
    codes, fifths = _neighbours(blocks[..., 6:]), blocks[..., 2:6]
    return {"codes": codes, "fifths": fifths, "scales": _float16(blocks, 0), "zero": 16, "bits": 5}


def _q5_1(blocks: Bytes) -> dict[str, Any]:
    scales, minimums = _float16(blocks, 0), _float16(blocks, 2)
    codes, fifths = _neighbours(blocks[..., 8:]), blocks[..., 4:8]
    return {"codes": codes, "fifths": fifths, "scales": scales, "minimums": minimums, "bits": 5}


def _two_levels(blocks: Bytes) -> dict[str, Any]:
    """Scales and minimums of Q4_K and Q5_K: eight of each in six bits, and a factor for all of either."""
    # Four of them at a time, in words.
    words = np.ascontiguousarray(blocks[..., 4:16]).view(np.uint32)
    first, second, third = words[..., 0], words[..., 1], words[..., 2]
    low, high = third & 0x0F0F0F0F, third >> 4 & 0x0F0F0F0F
    levels = {
        name: np.stack([part & 0x3F3F3F3F, rest | (part >> 6 & 0x03030303) << 4], axis=-1).view(np.uint8)
        for name, part, rest in (("scales", first, low), ("minimums", second, high))
    }
    return {
        **levels,
        "factors": _float16(blocks, 0).astype(np.float32),
        "minimum_factors": -_float16(blocks, 2).astype(np.float32),
    }


def _q4_k(blocks: Bytes) -> dict[str, Any]:
    return {"codes": _neighbours(_split(blocks[..., 16:], 4, 32)), **_two_levels(blocks)}


def _q5_k(blocks: Bytes) -> dict[str, Any]:
    # A bit of each of eight groups is in a byte of the 32.
    fifths = _transpose_bits(np.ascontiguousarray(blocks[..., 16:48]).view(np.uint64))
    packed = np.ascontiguousarray(_split(fifths.view(np.uint8), 4, 8).swapaxes(-1, -2))
    return {"codes": _neighbours(_split(blocks[..., 48:], 4, 32)), "fifths": packed, **_two_levels(blocks), "bits": 5}


def _q6_k(blocks: Bytes) -> dict[str, Any]:
    # Of each half of a block: four times 32 codes, whose nibbles are in 64 bytes, the first two in their lower bits.
    low, upper = (np.ascontiguousarray(part).view(np.uint64) for part in (blocks[..., :128], blocks[..., 128:192]))
    low, upper = _split(low, 2, 8), _split(upper, 2, 4)
    codes = np.stack([low & _LOW_NIBBLES, low >> 4 & _LOW_NIBBLES], axis=-2)
    parts = _split(codes.reshape(*codes.shape[:-2], 16), 4, 4)
    for part in range(4):
        parts[..., part, :] |= (upper >> 2 * part & _LOW_PAIRS) << 4
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    factors = _float16(blocks, 208).astype(np.float32)
    return {"codes": parts.view(np.uint8), "scales": scales, "factors": factors, "zero": 32, "bits": 8}


CODED: Mapping[str, tuple[int, Callable[[Bytes], dict[str, Any]]]] = MappingProxyType(
    {
        "Q4_0": (18, _q4_0),
        "Q4_1": (20, _q4_1),
        "Q5_0": (22, _q5_0),
        "Q5_1": (24, _q5_1),
        "Q8_0": (34, _q8_0),
        "Q4_K": (144, _q4_k),
        "Q5_K": (176, _q5_k),
        "Q6_K": (210, _q6_k),
    }
)
"""By ggml's name: bytes of a block, and what reads blocks [rows, blocks, bytes]."""
