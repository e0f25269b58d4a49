"""Causal depthwise convolution, token by token."""

from collections.abc import Sequence

import torch
from torch import Tensor


def conv_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    front: int,
    marks: Sequence[int],
    silu: bool = True,
) -> list[Tensor]:
    """See `Kernels.conv_prefill`."""
    width = weight.shape[0]
    inputs = torch.cat([state.to(x.dtype), x])
    kept = [inputs[mark : mark + width - 1].to(state.dtype, copy=True) for mark in marks]
    for token in range(x.shape[0]):
        mixed = (inputs[token : token + width] * weight).sum(0)
        if bias is not None:
            mixed += bias
        x[token] = mixed / (1 + torch.exp(-mixed)) if silu else mixed
    return kept


def conv_update(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, slots: Tensor, silu: bool = True
) -> None:
    """See `Kernels.conv_update`."""
    for row, slot in enumerate(slots.tolist()):
        states[slot] = conv_prefill(x[row : row + 1], weight, bias, states[slot].clone(), 0, [1], silu)[0]
