"""Elementwise functions by their textbook formulas."""

import torch
from torch import Tensor


def softplus(x: Tensor) -> Tensor:
    """See `Kernels.softplus`."""
    return torch.logaddexp(x, torch.zeros_like(x))


def sigmoid(x: Tensor) -> Tensor:
    """See `Kernels.sigmoid`."""
    return 1 / (1 + torch.exp(-x))
