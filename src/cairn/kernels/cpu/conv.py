"""Causal depthwise convolution with a time-major state.

Prefill and decode add the taps in the same order with the same operations, so both give the same bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.kernels.contract import TILE
from cairn.kernels.cpu.elementwise import silu_


def _taps(windows: Sequence[Tensor], weight: Tensor, bias: Tensor | None, out: Tensor, silu: bool) -> None:
    """out = bias + sum over taps of windows[tap] * weight[tap], or silu of it; `windows` may not overlap `out`."""
    torch.mul(windows[0], weight[0], out=out)
    for window, tap in zip(windows[1:], weight[1:], strict=True):
        out.addcmul_(window, tap)
    if bias is not None:
        out.add_(bias)
    if silu:
        silu_(out)


def conv_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    front: int,
    marks: Sequence[int],
    silu: bool = True,
) -> list[Tensor]:
    """See `Kernels.conv_prefill`. One tile at a time, so that the temporaries stay in the cache."""
    total, width = x.shape[0], weight.shape[0]
    kept: list[Tensor] = []
    before = state.to(x.dtype)
    begin = 0
    while begin < total:
        end = min(begin + TILE - (front if begin == 0 else 0), total)
        rows = end - begin
        inputs = torch.cat([before, x[begin:end]])
        for mark in marks[len(kept) :]:
            if mark <= end:
                kept.append(inputs[mark - begin : mark - begin + width - 1].to(state.dtype, copy=True))
        _taps([inputs[tap : tap + rows] for tap in range(width)], weight, bias, x[begin:end], silu)
        before = inputs[rows:]
        begin = end
    return kept


def conv_update(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, slots: Tensor, silu: bool = True
) -> None:
    """See `Kernels.conv_update`."""
    before = states.index_select(0, slots)
    raw = x.clone()
    states[slots] = torch.cat([before[:, 1:], raw[:, None].to(states.dtype)], dim=1)
    past = before.to(x.dtype)
    _taps([*past.unbind(1), raw], weight, bias, x, silu)
