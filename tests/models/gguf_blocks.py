"""Blocks of ggml's K-quants, which the `gguf` package reads and does not write (ggml-common.h, `block_q4_K` and on)."""

from collections.abc import Callable, Mapping

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

Array = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def encode(values: Array, type_name: str) -> Bytes | NDArray:
    """Numbers [..., columns] as the file has them."""
    if type_name not in _BLOCKS:
        return gguf.quants.quantize(values, GGMLQuantizationType[type_name])
    blocks = np.ascontiguousarray(values, dtype=np.float32).reshape(-1, 256)
    return _BLOCKS[type_name](blocks).reshape(*values.shape[:-1], -1)


def _half(values: Array) -> Bytes:
    return values.astype(np.float16).reshape(-1, 1).view(np.uint8)


def _with_minimums(blocks: Array, most: int) -> tuple[Array, Array, Bytes, Bytes, Bytes]:
    """Of eight groups of 32: factors of scales and of minimums, both of these in 6 bits, and codes up to `most`."""
    groups = blocks.reshape(len(blocks), 8, 32)
    low = np.minimum(groups.min(-1), 0.0)
    scales, minimums = (groups.max(-1) - low) / most, -low
    factors = [np.maximum(each.max(-1, keepdims=True) / 63, 1e-7).astype(np.float16) for each in (scales, minimums)]
    numbers = [np.clip(np.round(each / by), 0, 63) for each, by in zip((scales, minimums), factors, strict=True)]
    steps = np.maximum(numbers[0] * factors[0], 1e-7)[..., None]
    codes = np.clip(np.round((groups + (numbers[1] * factors[1])[..., None]) / steps), 0, most)
    return *factors, *(each.astype(np.uint8) for each in (*numbers, codes))


def _six_bits(scales: Bytes, minimums: Bytes) -> Bytes:
    """Eight scales and eight minimums in 12 bytes: the last four of each in four bits, and two above the others."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minimums[:, :4] | (minimums[:, 4:] >> 4) << 6
    return np.concatenate([first, second, scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4], axis=1)


def _q4_k(blocks: Array) -> Bytes:
    d, dmin, scales, minimums, codes = _with_minimums(blocks, 15)
    pairs = codes.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([_half(d), _half(dmin), _six_bits(scales, minimums), nibbles], axis=1)


def _q5_k(blocks: Array) -> Bytes:
    d, dmin, scales, minimums, codes = _with_minimums(blocks, 31)
    pairs = (codes & 15).reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    fifth = np.zeros((len(blocks), 32), np.uint8)
    for group in range(8):
        fifth |= codes[:, group] >> 4 << group
    return np.concatenate([_half(d), _half(dmin), _six_bits(scales, minimums), fifth, nibbles], axis=1)


def _q6_k(blocks: Array) -> Bytes:
    groups = blocks.reshape(len(blocks), 16, 16)
    scales = np.abs(groups).max(-1) / 32
    d = np.maximum(scales.max(-1, keepdims=True) / 127, 1e-7).astype(np.float16)
    numbers = np.clip(np.round(scales / d), 1, 127)
    codes = np.clip(np.round(groups / (numbers * d)[..., None]), -32, 31).astype(np.int8) + 32
    halves = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate([halves[:, :, each] & 15 | (halves[:, :, each + 2] & 15) << 4 for each in (0, 1)], axis=2)
    high = sum((halves[:, :, each] >> 4) << 2 * each for each in range(4))
    parts = [low.reshape(-1, 128), high.reshape(-1, 64), numbers.astype(np.int8).view(np.uint8), _half(d)]
    return np.concatenate(parts, axis=1)


_BLOCKS: Mapping[str, Callable[[Array], Bytes]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
