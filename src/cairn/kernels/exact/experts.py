"""Experts, each with its tokens in tiles of `ROW_TILE` rows."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.contract import Weight
from cairn.kernels.exact.elementwise import silu_, squared_relu
from cairn.kernels.exact.prepared import ROW_TILE
from cairn.kernels.exact.products import has_fixed_shapes, multiply_tiles


def experts(x: Tensor, choice: Tensor, share: Tensor, up: Weight, down: Weight, batch: Batch) -> Tensor:
    """See `Kernels.experts`."""

    def run(expert: int, rows: Tensor) -> Tensor:
        return _multiply(squared_relu(_multiply(rows, up[expert])), down[expert])

    return _mix(x, choice, share, run)


def gated_experts(x: Tensor, choice: Tensor, share: Tensor, gate_up: Weight, down: Weight, batch: Batch) -> Tensor:
    """See `Kernels.gated_experts`."""

    def run(expert: int, rows: Tensor) -> Tensor:
        gate, up = _multiply(rows, gate_up[expert]).chunk(2, dim=-1)
        return _multiply(silu_(gate.contiguous()).mul_(up), down[expert])

    return _mix(x, choice, share, run)


def _mix(x: Tensor, choice: Tensor, share: Tensor, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The experts' results, added by the tokens' shares; `run` gets an expert and its tokens' rows."""
    out = torch.zeros(x.shape, dtype=share.dtype)
    order = choice.flatten().argsort(stable=True)
    tokens = order // choice.shape[1]
    shares = share.flatten()[order, None]
    begin = 0
    for expert, count in enumerate(torch.bincount(choice.flatten()).tolist()):
        mine = slice(begin, begin + count)
        begin += count
        if count:
            out.index_add_(0, tokens[mine], run(expert, x[tokens[mine]]) * shares[mine])
    return out.to(x.dtype)


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    return multiply_tiles(x, weight, None, ROW_TILE) if has_fixed_shapes(x) else F.linear(x, weight)
