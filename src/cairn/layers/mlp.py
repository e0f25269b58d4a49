"""Feed-forward layers."""

from dataclasses import dataclass

from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.contract import Kernels
from cairn.layers.linear import Linear, Projection
from cairn.layers.memory import Memory


@dataclass(frozen=True, slots=True)
class SquaredReluMLP:
    """down relu(up x)^2 (arXiv 2109.08668), one rank's inner channels."""

    kernels: Kernels
    up: Linear
    down: Linear

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]."""
        return self.down(self.kernels.squared_relu(self.up(hidden, batch)), batch)


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """down(silu(gate x) * up x) (arXiv 2002.05202), one rank's inner channels; `gate_up` gives gate | up."""

    kernels: Kernels
    gate_up: Projection
    down: Projection

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]."""
        gate, up = self.gate_up(hidden, batch).chunk(2, dim=-1)
        return self.down(self.kernels.silu_mul(gate, up), batch)
