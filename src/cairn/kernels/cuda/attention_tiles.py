"""What attention's kernels are compiled for: tiles by a model's heads and pages, and a layer's `AttentionRule`."""

from math import log2
from typing import Any

import torch

from cairn.kernels.attention_rule import FULL, AttentionRule
from cairn.kernels.batch import CHUNK
from cairn.kernels.cuda.device import limits, power_of_2

_TILE_ROWS = (64, 128)
"""Of a prefill tile in bfloat16, tokens times the group's query heads: with heads of at most 128, and with wider ones,
which leave room for a single program on a multiprocessor anyway."""

MIN_SPLIT = 128
"""Keys of a decode's part, at least: what starting a program is worth."""

MAX_BLOCK = 64
"""Keys that are loaded at a time, at most."""

Tile = tuple[dict[str, Any], dict[str, int]]
"""Constants and options of a kernel."""


def _shapes(heads: int, kv_heads: int, dim: int, page_size: int, rule: AttentionRule, sinks: bool) -> dict[str, Any]:
    """Scores are in powers of 2: with a softcap they are brought there by it, else by the scale."""
    scale, turn = rule.scale or dim**-0.5, log2(2.718281828459045)
    return {
        "GROUP": heads // kv_heads,
        "SCALE": scale / rule.softcap if rule.softcap else scale * turn,
        "SOFTCAP": (rule.softcap or 0.0) * turn,
        **reach_constants(rule),
        "SINKS": sinks,
        "DIM": dim,
        "DIM_BLOCK": power_of_2(dim, 16),
        "PAGE_SIZE": page_size,
    }


def reach_constants(rule: AttentionRule) -> dict[str, int]:
    """0 for no window, and for no chunk."""
    return {"WINDOW": rule.window or 0, "CHUNK": rule.chunk or 0}


def prefill_tile(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, page_size: int, rule: AttentionRule = FULL,
    sinks: bool = False,
) -> Tile:  # fmt: skip
    """Of prefills."""
    shapes = _shapes(heads, kv_heads, dim, page_size, rule, sinks)
    group_block = power_of_2(shapes["GROUP"])
    if dtype == torch.bfloat16:
        rows, block, options = _tensor_core_tile(shapes["DIM_BLOCK"])
    else:
        # Exact products are made without tensor cores, their operands lie in registers: little fits, and least of all
        # where a block's keys lie in several pages.
        block = 16 if page_size % 32 or dim > 256 else 32
        rows, options = 32 if dim <= 128 else 16, {"num_warps": 8, "num_stages": 1}
    constants = {
        "KV_HEADS": kv_heads,
        "GROUP_BLOCK": group_block,
        "TOKENS": min(CHUNK, max(1, rows // group_block)),
        "CHUNK_TOKENS": CHUNK,
        "BLOCK": block,
        **shapes,
    }
    return constants, options


def _tensor_core_tile(width: int) -> tuple[int, int, dict[str, int]]:
    """Rows of a prefill tile, keys of a block, and how it is launched, for heads padded to `width` numbers: as much as
    shared memory has room for. A100s have 163 KiB of it, GPUs of capability 8.6, 8.9 and 12.0 have 99."""
    if width <= 128:
        return _TILE_ROWS[0], 64, {"num_warps": 4, "num_stages": 3}
    rows, room = _TILE_ROWS[1], limits().shared_memory
    if width > 256:
        return _widest_tile(width, room)
    if 2 * (2 * 64 * 2 + rows) * width + 4096 <= room:
        return rows, 64, {"num_warps": 8, "num_stages": 2}
    if 2 * (3 * 32 * 2 + rows) * width <= room:
        return rows, 32, {"num_warps": 8, "num_stages": 3}
    return rows // 2, 32, {"num_warps": 8, "num_stages": 2}


def _widest_tile(width: int, room: int) -> tuple[int, int, dict[str, int]]:
    """The same for heads of more than 256 numbers, whose sums take half of the registers with 64 rows."""
    for rows, block in ((64, 32), (32, 32)):
        if 2 * (2 * block * 2 + rows) * width + 2048 <= room:
            return rows, block, {"num_warps": 8, "num_stages": 2}
    return 32, 16, {"num_warps": 8, "num_stages": 1}


def decode_tile(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, page_size: int, split: bool, rule: AttentionRule = FULL,
    sinks: bool = False,
) -> Tile:  # fmt: skip
    """Of decodes; `split`: whether their keys are cut into parts."""
    shapes = _shapes(heads, kv_heads, dim, page_size, rule, sinks)
    low = dtype == torch.bfloat16
    block = 64 if low and dim <= 128 else 32 if dim <= 256 else 16
    constants = {
        "GROUP_BLOCK": power_of_2(shapes["GROUP"], 16),
        "BLOCK": block,
        "SPLIT": split,
        "LEAST": MIN_SPLIT,
        **shapes,
    }
    return constants, {"num_warps": 4, "num_stages": 3} if low else {"num_warps": 8, "num_stages": 2}
