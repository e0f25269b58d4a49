"""Root mean square norms, part by part."""

import torch
from torch import Tensor


def _normed(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.rms_norm`."""
    return (_normed(_widened(x), eps) * weight).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """See `Kernels.gated_rms_norm`."""
    wide = _widened(gate)
    gated = x * wide / (1 + torch.exp(-wide))
    parts = [_normed(part, eps) for part in gated.chunk(groups, dim=-1)]
    return torch.cat(parts, dim=-1).to(gate.dtype) * weight
