"""Root mean square norms, part by part."""

import torch
from torch import Tensor

from cairn.kernels.reference.elementwise import silu, widen


def _normed(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.rms_norm`."""
    return (_normed(widen(x), eps) * widen(weight)).to(x.dtype).contiguous()


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.add_rms_norm`."""
    residual += x
    return rms_norm(residual, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """See `Kernels.gated_rms_norm`."""
    gated = x * silu(widen(gate))
    parts = [_normed(part, eps) for part in gated.chunk(groups, dim=-1)]
    return (torch.cat(parts, dim=-1) * widen(weight)).to(gate.dtype)


def head_norm_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.head_norm_gate`."""
    normed = _normed(x, eps) * weight
    return (normed * silu(widen(gate)).view(x.shape)).to(gate.dtype).view(gate.shape)
