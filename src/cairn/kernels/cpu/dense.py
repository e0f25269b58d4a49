"""Matrix products: whole, or cut into GEMMs of fixed shape.

BLAS picks its code path by the number of rows, so a row's bits depend on how many rows come with it. Inside a GEMM of
fixed shape they depend neither on the row's place nor on its neighbours (the runner's self test checks it).
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.contract import Tiles
from cairn.kernels.cpu.elementwise import silu_


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles | None) -> Tensor:
    """See `Kernels.linear`."""
    if tiles is None:
        return F.linear(x, weight, bias)
    out = x.new_empty(x.shape[0], weight.shape[0])
    columns = weight.t()
    for rows in tiles:
        if bias is None:
            torch.mm(x[rows], columns, out=out[rows])
        else:
            torch.addmm(bias, x[rows], columns, out=out[rows])
    return out


def experts(
    x: Tensor,
    choice: Tensor,
    share: Tensor,
    weights: tuple[Sequence[Tensor], Sequence[Tensor]],
    tile: int | None,
) -> Tensor:
    """See `Kernels.experts`."""
    return _mixed(x, choice, share, lambda expert, rows: _squared_relu(rows, weights, expert, tile))


def gated_experts(
    x: Tensor,
    choice: Tensor,
    share: Tensor,
    weights: tuple[Sequence[Tensor], Sequence[Tensor]],
    tile: int | None,
) -> Tensor:
    """See `Kernels.gated_experts`."""
    return _mixed(x, choice, share, lambda expert, rows: _swiglu(rows, weights, expert, tile))


_Weights = tuple[Sequence[Tensor], Sequence[Tensor]]


def _squared_relu(x: Tensor, weights: _Weights, expert: int, tile: int | None) -> Tensor:
    inner = _tiled(x, weights[0][expert], tile)
    return _tiled(inner.relu_().square_(), weights[1][expert], tile)


def _swiglu(x: Tensor, weights: _Weights, expert: int, tile: int | None) -> Tensor:
    gate, up = _tiled(x, weights[0][expert], tile).chunk(2, dim=-1)
    return _tiled(silu_(gate.contiguous()).mul_(up), weights[1][expert], tile)


def _mixed(x: Tensor, choice: Tensor, share: Tensor, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The experts' results, added by the tokens' shares; `run` gets an expert and its tokens' rows, and may give more
    rows than it got."""
    out = torch.zeros(x.shape, dtype=share.dtype, device=x.device)
    order = choice.flatten().argsort(stable=True)
    tokens = order // choice.shape[1]
    shares = share.flatten()[order, None]
    counts = torch.bincount(choice.flatten()).tolist()
    begin = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        mine = slice(begin, begin + count)
        begin += count
        result = run(expert, x[tokens[mine]])
        out.index_add_(0, tokens[mine], result[:count] * shares[mine])
    return out


def _tiled(x: Tensor, weight: Tensor, tile: int | None) -> Tensor:
    """x [n, in] -> [n, or n rounded up to whole tiles, out]."""
    if tile is None:
        return F.linear(x, weight)
    missing = -x.shape[0] % tile
    if missing:
        x = F.pad(x, (0, 0, 0, missing))
    return linear(x, weight, None, [slice(i, i + tile) for i in range(0, x.shape[0], tile)])
