"""Elementwise functions whose vector body and scalar tail round differently in torch.

Where a tensor's element count is no multiple of the unrolled vector width, its last elements go through the scalar
code, so the same number gives other bits in another batch. Padding the count to a multiple of 64 leaves no tail.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

_UNROLLED = 64


def _without_tail(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    count = flat.numel()
    missing = -count % _UNROLLED
    if missing:
        flat = F.pad(flat, (0, missing))
    return function(flat)[:count].view(x.shape)


def softplus(x: Tensor) -> Tensor:
    """See `Kernels.softplus`."""
    return _without_tail(F.softplus, x)


def sigmoid(x: Tensor) -> Tensor:
    """See `Kernels.sigmoid`."""
    return _without_tail(Tensor.sigmoid, x)


def silu_(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), in place. torch's own silu has a scalar tail; exp, sum and quotient have none that differs."""
    return x.div_(x.neg().exp_().add_(1))
