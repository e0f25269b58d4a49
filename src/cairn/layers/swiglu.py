"""The SwiGLU feed-forward layer (arXiv 2002.05202)."""

from dataclasses import dataclass

from torch import Tensor

from cairn.kernels.contract import Kernels
from cairn.layers.batch import Batch
from cairn.layers.linear import Projection
from cairn.layers.memory import Memory


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """down(silu(gate x) * up x), one rank's inner channels."""

    kernels: Kernels
    gate: Projection
    up: Projection
    down: Projection

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]."""
        gate = self.gate(hidden, batch.tiles)
        inner = self.kernels.sigmoid(gate).mul_(gate).mul_(self.up(hidden, batch.tiles))
        return self.down(inner, batch.tiles)
