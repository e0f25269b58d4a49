"""Matrix products: whole, or cut into GEMMs of fixed shape.

BLAS picks its code path by the number of rows, so a row's bits depend on how many rows come with it. Inside a GEMM of
fixed shape they depend neither on the row's place nor on its neighbours (the runner's self test checks it).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.contract import Tiles

__all__ = ["experts", "linear"]


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
    up, down = weights
    out = torch.zeros(x.shape, dtype=share.dtype, device=x.device)
    order = choice.flatten().argsort(stable=True)
    tokens = order // choice.shape[1]
    shares = share.flatten()[order, None]
    counts = torch.bincount(choice.flatten(), minlength=len(up)).tolist()
    begin = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        mine = slice(begin, begin + count)
        begin += count
        inner = _tiled(x[tokens[mine]], up[expert], tile)
        result = _tiled(inner.relu_().square_(), down[expert], tile)
        out.index_add_(0, tokens[mine], result[:count] * shares[mine])
    return out


def _tiled(x: Tensor, weight: Tensor, tile: int | None) -> Tensor:
    """x [n, in] -> [n rounded up to whole tiles, out]."""
    if tile is None:
        return F.linear(x, weight)
    missing = -x.shape[0] % tile
    if missing:
        x = F.pad(x, (0, 0, 0, missing))
    return linear(x, weight, None, [slice(i, i + tile) for i in range(0, x.shape[0], tile)])
