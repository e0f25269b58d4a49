"""Root mean square norms, plain and gated. Each row is reduced by itself, in the same order whatever the batch."""

from torch import Tensor

from cairn.kernels.exact.elementwise import sigmoid, silu_, widen


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


def head_norm_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.head_norm_gate`."""
    normed = _normed(x.contiguous(), weight, eps).view(gate.shape)
    wide = widen(gate)
    return sigmoid(wide).mul_(wide).mul_(normed).to(gate.dtype)
