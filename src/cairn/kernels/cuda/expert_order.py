"""Pairs of a token and one of its experts in the order of the experts, and the blocks of rows that they make up."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.cuda.device import kernel

_COUNTED_PAIRS = 8192
"""Up to so many are sorted by counting for each how many come before it."""

_SORT_ROWS, _SORT_COLUMNS = 32, 512


@kernel
def _sort_kernel(topk_ids, order, starts, num_pairs, num_experts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pair i goes to the place that is the number of pairs that come before it; `starts` [experts + 1]: the number of
    pairs with a lower expert, as of pairs that follow the last one and come before all others of their expert."""
    item = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_pair = item < num_pairs
    expert = tl.load(topk_ids + item, mask=is_pair, other=0).to(tl.int32)
    expert = tl.where(is_pair, expert, item - num_pairs)
    turn = tl.where(is_pair, item, 0)
    before = tl.zeros((ROWS,), dtype=tl.int32)
    for first in range(0, num_pairs, COLUMNS):
        other = first + tl.arange(0, COLUMNS)
        # Padding comes after all.
        experts = tl.load(topk_ids + other, mask=other < num_pairs, other=2147483647).to(tl.int32)
        lower = experts[None, :] < expert[:, None]
        earlier = (experts[None, :] == expert[:, None]) & (other[None, :] < turn[:, None])
        before += tl.sum((lower | earlier).to(tl.int32), axis=1)
    tl.store(order + before, item, mask=is_pair)
    tl.store(starts + (item - num_pairs), before, mask=(item >= num_pairs) & (item <= num_pairs + num_experts))


@triton.jit
def block_of_pairs(starts, num_experts, block, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """The expert of a block of rows, `num_experts` if there is no such block; its first pair; the end of its expert's
    pairs."""
    expert = tl.arange(0, EXPERTS)
    first = tl.load(starts + expert, mask=expert < num_experts, other=0)
    end = tl.load(starts + expert + 1, mask=expert < num_experts, other=0)
    blocks = (end - first + (ROWS - 1)) // ROWS
    last_blocks = tl.cumsum(blocks, axis=0)
    block_expert = tl.sum(((last_blocks <= block) & (expert < num_experts)).to(tl.int32), axis=0)
    matches = expert == block_expert
    first_pair = tl.sum(tl.where(matches, first + (block - (last_blocks - blocks)) * ROWS, 0), axis=0)
    return block_expert, first_pair, tl.sum(tl.where(matches, end, 0), axis=0)


def sort_pairs(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Pairs in the order of their experts, and for each expert and after the last one the first of its places."""
    pairs = topk_ids.numel()
    if pairs > _COUNTED_PAIRS:
        by_expert, order = torch.sort(topk_ids.flatten(), stable=True)
        bounds = torch.arange(num_experts + 1, device=topk_ids.device)
        return order.int(), torch.searchsorted(by_expert, bounds, out_int32=True)
    order = torch.empty(pairs, dtype=torch.int32, device=topk_ids.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=topk_ids.device)
    _sort_kernel[(triton.cdiv(pairs + num_experts + 1, _SORT_ROWS),)](
        topk_ids, order, starts, pairs, num_experts, ROWS=_SORT_ROWS, COLUMNS=_SORT_COLUMNS, num_warps=4
    )
    return order, starts
