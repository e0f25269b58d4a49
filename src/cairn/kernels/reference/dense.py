"""Matrix products row by row, experts token by token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.kernels.contract import Tiles


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles | None) -> Tensor:
    """See `Kernels.linear`. Rows outside all tiles stay 0."""
    out = x.new_zeros(x.shape[0], weight.shape[0])
    for rows in [slice(0, x.shape[0])] if tiles is None else tiles:
        for row in range(rows.start, rows.stop):
            out[row] = weight @ x[row]
            if bias is not None:
                out[row] += bias
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
    for token in range(x.shape[0]):
        for expert, part in sorted(zip(choice[token].tolist(), share[token].tolist(), strict=True)):
            inner = torch.relu(up[expert] @ x[token]) ** 2
            out[token] += part * (down[expert] @ inner)
    return out


def gated_experts(
    x: Tensor,
    choice: Tensor,
    share: Tensor,
    weights: tuple[Sequence[Tensor], Sequence[Tensor]],
    tile: int | None,
) -> Tensor:
    """See `Kernels.gated_experts`."""
    gate_up, down = weights
    out = torch.zeros(x.shape, dtype=share.dtype, device=x.device)
    for token in range(x.shape[0]):
        for expert, part in sorted(zip(choice[token].tolist(), share[token].tolist(), strict=True)):
            gate, up = torch.tensor_split(gate_up[expert] @ x[token], 2)
            out[token] += part * (down[expert] @ (gate / (1 + torch.exp(-gate)) * up))
    return out
