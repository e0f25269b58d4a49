"""Mamba2's gate without a norm behind it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.kernels.contract import Kernels


@dataclass(frozen=True, slots=True)
class PlainGate:
    """x * silu(gate). `own`: the channels that are wanted of the result, None for all."""

    kernels: Kernels
    own: slice | None = None

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """See `GatedNorm`."""
        if self.own is not None:
            x, gate = x[:, self.own], gate[:, self.own]
        wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
        return self.kernels.sigmoid(wide).mul_(wide).mul_(x).to(gate.dtype)
