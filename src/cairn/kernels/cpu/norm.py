"""Root mean square norms, plain and gated. Each row is reduced by itself, in the same order whatever the batch."""

import torch
from torch import Tensor

from cairn.kernels.cpu.elementwise import silu_


def _widened(x: Tensor, copy: bool = False) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=copy)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.rms_norm`."""
    wide = _widened(x)
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """See `Kernels.gated_rms_norm`."""
    rows, width = x.shape
    gated = silu_(_widened(gate, copy=True).contiguous()).mul_(x).view(rows, groups, width // groups)
    scale = gated.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return gated.mul_(scale).view(rows, width).to(gate.dtype).mul_(weight)
