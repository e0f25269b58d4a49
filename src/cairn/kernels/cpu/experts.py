"""Experts: the tokens sorted by expert, one product for each expert that has some."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.cpu.compiled import ELEMENTS, F32, I64, INT, kernel
from cairn.kernels.cpu.elementwise import silu_mul, squared_relu
from cairn.kernels.cpu.products import AnyWeight, product
from cairn.kernels.cpu.scalars import advance, load, store


def experts(x: Tensor, choice: Tensor, share: Tensor, up: AnyWeight, down: AnyWeight, batch: Batch) -> Tensor:
    """See `Kernels.experts`."""
    return _mixed(x, choice, share, down, lambda rows, expert: squared_relu(product(rows, up, None, expert)))


def gated_experts(
    x: Tensor, choice: Tensor, share: Tensor, gate_up: AnyWeight, down: AnyWeight, batch: Batch
) -> Tensor:
    """See `Kernels.gated_experts`."""

    def inner(rows: Tensor, expert: int) -> Tensor:
        return silu_mul(*product(rows, gate_up, None, expert).chunk(2, dim=-1))

    return _mixed(x, choice, share, down, inner)


def _mixed(x: Tensor, choice: Tensor, share: Tensor, down: AnyWeight, inner: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The experts' results, added by the tokens' shares. `inner`: what an expert makes of some rows before `down`."""
    rows, top_k = choice.shape
    width = x.shape[1]
    ends, order = torch.zeros(down.shape[0], dtype=torch.int64), torch.empty(rows * top_k, dtype=torch.int64)
    shares, total = torch.empty(rows * top_k), torch.zeros(rows, width)
    choice, share = choice.contiguous(), share.float().contiguous()
    _sort_by_expert[choice.dtype](
        1,
        0,
        choice.data_ptr(),
        share.data_ptr(),
        rows * top_k,
        top_k,
        ends.data_ptr(),
        down.shape[0],
        order.data_ptr(),
        shares.data_ptr(),
    )
    sorted_x = x.index_select(0, order)
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end == begin:
            continue
        result = product(inner(sorted_x[begin:end], expert), down, None, expert)
        _add_shares[result.dtype](
            end - begin,
            result.numel() // 4,
            result.data_ptr(),
            order.data_ptr() + 8 * begin,
            shares.data_ptr() + 4 * begin,
            total.data_ptr(),
            width,
        )
        begin = end
    return total.to(x.dtype)


@kernel({torch.int64: (I64, F32, INT, INT, I64, INT, I64, F32)})
def _sort_by_expert(
    begin: int,
    end: int,
    choice: Any,
    share: Any,
    count: int,
    top_k: int,
    ends: Any,
    num_experts: int,
    order: Any,
    shares: Any,
) -> None:
    """Fills `order` with the tokens, those of expert 0 first, `shares` with theirs, and `ends` with where an expert's
    tokens end. One item does all of it. `ends` comes in as zeros."""
    for i in range(count):
        ends[choice[i]] += 1
    total = np.int64(0)
    for e in range(num_experts):
        mine = ends[e]
        ends[e] = total
        total += mine
    for i in range(count):
        place = ends[choice[i]]
        ends[choice[i]] = place + 1
        order[place] = i // top_k
        shares[place] = share[i]


@kernel({dtype: (x, I64, F32, F32, INT) for dtype, x in ELEMENTS.items()})
def _add_shares(begin: int, end: int, result: Any, order: Any, shares: Any, total: Any, width: int) -> None:
    """An expert's rows into their tokens' sums. A token has an expert once at most, so that no two rows meet."""
    for i in range(begin, end):
        source, target = advance(result, i * width), advance(total, order[i] * width)
        for j in range(width):
            store(target, j, load(target, j) + shares[i] * load(source, j))
