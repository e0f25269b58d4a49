"""The squared-ReLU feed-forward layer."""

from dataclasses import dataclass

from torch import Tensor

from cairn.layers.batch import Batch
from cairn.layers.linear import Linear
from cairn.layers.memory import Memory


@dataclass(frozen=True, slots=True)
class SquaredReluMLP:
    """down relu(up x)^2 (arXiv 2109.08668), one rank's inner channels."""

    up: Linear
    down: Linear

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """[rows, hidden] -> the rank's partial sum of [rows, hidden]."""
        return self.down(self.up(hidden, batch.tiles).relu_().square_(), batch.tiles)
