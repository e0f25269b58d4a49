"""What a stack of layers is made of."""

from collections.abc import Callable

from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.layers.memory import Memory
from cairn.layers.norms import RMSNorm

Mixer = Callable[[Tensor, Batch, Memory], Tensor]
"""[rows, hidden] -> the rank's partial sum of [rows, hidden], a new tensor."""

Layer = tuple[RMSNorm, Mixer]
"""x + mixer(norm(x))."""
