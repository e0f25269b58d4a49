"""Words of codes as layouts have them across, brought into words of neighbouring inputs, and into another order: on the
host by the CPU's compiled loops where there are some, which take a tenth of torch's time, and on a device by torch."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cairn.models.weights.compiled_loops import compiled_loops

_HALVES = ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F))
"""Codes of half of a square's side, and the bits of every second such half of a word."""

_MOST_SHORT = 1 << 15
"""Numbers from 0 on that 16 bits have."""

_WORDS_AT_A_TIME = 1 << 15
"""Of more of them torch gives some to other threads, for which each of many short operations would wait."""


def transpose_words(words: Tensor) -> Tensor:
    """int32 [n, m] -> [m, n], contiguous."""
    loops = _loops_for(words)
    transposed: Tensor = words.t().contiguous() if loops is None else loops.transpose_words(words)
    return transposed


def join_codes(words: Tensor, order: Sequence[int]) -> Tensor:
    """Codes of four bits, eight columns' a word: int32 [8 n, m] -> eight rows' a word, of 8 m columns: [n, 8 m].

    `order`: of the columns in a word, from its lowest bits on.
    """
    if (loops := _loops_for(words)) is not None:
        joined: Tensor = loops.join_codes(words, order)
        return joined
    blocks, width = words.shape[0] // 8, words.shape[1]
    out = words.new_empty(blocks, width, 8)
    if out.is_meta or not out.numel():
        return out.view(blocks, 8 * width)
    # A few rows at a time, in memory that stays in a cache.
    step = min(blocks, max(1, _WORDS_AT_A_TIME // (8 * width)))
    buffer, half = words.new_empty(8 * step, width), words.new_empty(4 * step, width)
    for begin in range(0, blocks, step):
        count = min(step, blocks - begin)
        part = buffer[: 8 * count].copy_(words[8 * begin : 8 * (begin + count)])
        for size, mask in _HALVES:
            # Of squares of 2 * size codes, the two quarters that lie across from each other.
            upper, lower = part.view(-1, 2, size, width).unbind(1)
            changed = torch.bitwise_right_shift(upper, 4 * size, out=half[: 4 * count].view(upper.shape))
            lower.bitwise_xor_(changed.bitwise_xor_(lower).bitwise_and_(mask))
            upper.bitwise_xor_(changed.bitwise_left_shift_(4 * size))
        rows = part.view(-1, 8, width)
        for place, column in enumerate(order):
            out[begin : begin + count, :, column] = rows[:, place]
    return out.view(blocks, 8 * width)


def unpack_codes(words: Tensor, order: Sequence[int], added: int = 0) -> Tensor:
    """int32 [n, m] -> their codes of four bits plus `added`, modulo 16, uint8 [n, 8 m].

    `order`: of the columns in a word, from its lowest bits on.
    """
    if (loops := _loops_for(words)) is not None:
        unpacked: Tensor = loops.unpack_codes(words, order, added)
        return unpacked
    out = torch.empty((*words.shape, 8), dtype=torch.uint8, device=words.device)
    for place, column in enumerate(() if out.is_meta else order):
        out[:, :, column] = ((words >> 4 * place) + added) & 15
    return out.flatten(1)


def order_codes(words: Tensor, order: Tensor, bits: int) -> Tensor:
    """Words whose columns have codes one below the other: int32 [n, m], 32 / bits n codes of a column, from the lowest
    bits of the first row on -> the codes in this order."""
    if (loops := _loops_for(words)) is not None:
        ordered: Tensor = loops.order_codes(words, order, bits)
        return ordered
    in_word, kept, out = 32 // bits, (1 << bits) - 1, torch.zeros_like(words)
    for place in range(in_word):
        numbers = order[place::in_word].long()
        codes = words[numbers // in_word].bitwise_right_shift_((bits * (numbers % in_word)).int()[:, None])
        out.bitwise_or_(codes.bitwise_and_(kept).bitwise_left_shift_(bits * place))
    return out


def sort_by_group(groups: Tensor, num_groups: int, size: int) -> Tensor | None:
    """The group of each input [n] -> int32 [n], the order of inputs in which each group's lie together; None for the
    stored order, also where an input is in no group (-1). Raises ValueError where groups are not all of one size."""
    is_plain = groups.device.type == "cpu" and groups.dtype == torch.int32 and groups.is_contiguous()
    if is_plain and (loops := compiled_loops("transposing")) is not None:
        sorted_inputs, kind = loops.sort_by_group(groups, num_groups, size)
        if kind == loops.UNEVEN:
            raise ValueError(f"groups are not of {size} inputs")
        return sorted_inputs if kind == loops.MOVED else None
    # numpy's, as torch takes five times as long for so few.
    stored, wanted = groups.cpu().numpy(), _groups_in_order(num_groups * size, size)
    if (stored == wanted).all() or (stored == -1).any():
        return None
    # Numbers of 16 bits are sorted by their digits. What does not fit them is not what is wanted.
    order = (stored.astype(np.int16) if num_groups <= _MOST_SHORT else stored).argsort(kind="stable")
    if not (stored[order] == wanted).all():
        raise ValueError(f"groups are not of {size} inputs")
    return torch.from_numpy(order.astype(np.int32)).to(groups.device)


@lru_cache(maxsize=16)
def _groups_in_order(inputs: int, group: int) -> NDArray[np.int32]:
    """Of each input."""
    return np.arange(inputs, dtype=np.int32) // np.int32(group)


def _loops_for(words: Tensor) -> Any:
    """The module of compiled transposes, None for words that it is not for."""
    is_plain = words.device.type == "cpu" and words.numel() > 0 and words.stride(1) == 1
    return compiled_loops("transposing") if is_plain else None
