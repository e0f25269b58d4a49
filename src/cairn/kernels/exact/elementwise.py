"""Elementwise functions and norms. The vector body and the scalar tail of some of torch's round differently.

Where a tensor's element count is no multiple of the unrolled vector width, its last elements go through the scalar
code, so the same number gives other bits in another batch. Padding the count to a multiple of 64 leaves no tail. Where
elements do not lie together all of them go through the scalar code.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_UNROLLED = 64


def widen(x: Tensor, copy: bool = False) -> Tensor:
    """x in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=copy)


def _without_tail(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    flat = x.contiguous().view(-1)
    count = flat.numel()
    missing = -count % _UNROLLED
    if missing:
        flat = F.pad(flat, (0, missing))
    return function(flat)[:count].view(x.shape)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), a new tensor."""
    return _without_tail(F.softplus, x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), a new tensor."""
    return _without_tail(Tensor.sigmoid, x)


def silu_(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), in place. torch's own silu has a scalar tail; exp, sum and quotient have none that differs."""
    return x.div_(x.neg().exp_().add_(1))


def silu_mul(gate: Tensor, x: Tensor) -> Tensor:
    """See `Kernels.silu_mul`."""
    wide = widen(gate)
    return sigmoid(wide).mul_(wide).mul_(x).to(gate.dtype)


def gelu_mul(gate: Tensor, x: Tensor) -> Tensor:
    """See `Kernels.gelu_mul`."""
    wide = widen(gate)
    # (1 + tanh(v)) / 2 is sigmoid(2 v), which keeps its digits where it is small.
    inner = wide.square().mul_(wide).mul_(0.044715).add_(wide).mul_(2 * math.sqrt(2 / math.pi))
    return sigmoid(inner).mul_(wide).mul_(x).to(gate.dtype)


def softcap(x: Tensor, cap: float) -> Tensor:
    """See `Kernels.softcap`."""
    return _without_tail(torch.tanh, x / cap).mul_(cap)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """See `Kernels.sigmoid_mul`."""
    return (sigmoid(widen(gate)) * x).to(x.dtype)


def squared_relu(x: Tensor) -> Tensor:
    """See `Kernels.squared_relu`."""
    return widen(x, copy=True).contiguous().relu_().square_().to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `Kernels.rope`. Products and sums are operations of their own: their bits cannot depend on what a compiler
    fuses."""
    pairs = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = torch.split(widen(x), [pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    turned = (first * cos).sub_(second * sin), (second * cos).add_(first * sin)
    return torch.cat([*turned, rest], dim=-1).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.rms_norm`."""
    return _normed(widen(x).contiguous(), weight, eps).to(x.dtype)


def _normed(wide: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight)


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.add_rms_norm`."""
    return rms_norm(residual.add_(x), weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """See `Kernels.gated_rms_norm`."""
    rows, width = x.shape
    gated = silu_(widen(gate, copy=True).contiguous()).mul_(x).view(rows, groups, width // groups)
    scale = gated.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return gated.mul_(scale).view(rows, width).mul_(weight).to(gate.dtype)


def rms_norm_then_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.rms_norm_then_gate`."""
    normed = _normed(x.contiguous(), weight, eps).view(gate.shape)
    wide = widen(gate)
    return sigmoid(wide).mul_(wide).mul_(normed).to(gate.dtype)
