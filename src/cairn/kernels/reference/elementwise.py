"""Activations, gates, rotations and norms by their textbook formulas."""

import math

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """x in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def gelu(x: Tensor) -> Tensor:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x))."""
    return torch.logaddexp(x, torch.zeros_like(x))


def silu_mul(gate: Tensor, x: Tensor) -> Tensor:
    """See `Kernels.silu_mul`."""
    return (silu(widen(gate)) * widen(x)).to(gate.dtype).contiguous()


def gelu_mul(gate: Tensor, x: Tensor) -> Tensor:
    """See `Kernels.gelu_mul`."""
    return (gelu(widen(gate)) * widen(x)).to(gate.dtype).contiguous()


def softcap(x: Tensor, cap: float) -> Tensor:
    """See `Kernels.softcap`."""
    return (cap * torch.tanh(x / cap)).contiguous()


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """See `Kernels.sigmoid_mul`."""
    return (widen(x) * sigmoid(widen(gate))).to(x.dtype).contiguous()


def squared_relu(x: Tensor) -> Tensor:
    """See `Kernels.squared_relu`."""
    return (torch.relu(widen(x)) ** 2).to(x.dtype).contiguous()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `Kernels.rope`."""
    pairs = cos.shape[-1]
    out = widen(x).clone(memory_format=torch.contiguous_format)
    for row in range(x.shape[0]):
        for i in range(pairs):
            first, second = widen(x[row, :, i]), widen(x[row, :, i + pairs])
            out[row, :, i] = first * cos[row, i] - second * sin[row, i]
            out[row, :, i + pairs] = second * cos[row, i] + first * sin[row, i]
    return out.to(x.dtype)


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


def rms_norm_then_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.rms_norm_then_gate`."""
    normed = _normed(x, eps) * weight
    return (normed * silu(widen(gate)).view(x.shape)).to(gate.dtype).view(gate.shape)
