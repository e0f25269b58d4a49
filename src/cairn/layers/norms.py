"""Root mean square norms with their weights."""

from dataclasses import dataclass

from torch import Tensor

from cairn.kernels.contract import Kernels

__all__ = ["GatedRMSNorm", "RMSNorm"]


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / rms(x) * weight over each row (arXiv 1910.07467)."""

    kernels: Kernels
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, width] -> [rows, width]."""
        return self.kernels.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class GatedRMSNorm:
    """The norm behind Mamba2's scan: the gate is applied first, then each of `groups` parts is normed by itself."""

    kernels: Kernels
    weight: Tensor
    groups: int
    eps: float

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x (float32) and gate, both [rows, width] -> [rows, width] in the gate's dtype."""
        return self.kernels.gated_rms_norm(x, gate, self.weight, self.groups, self.eps)
