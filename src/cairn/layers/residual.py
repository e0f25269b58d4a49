"""What a stack of layers is made of."""

from collections.abc import Callable

from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.layers.memory import Memory
from cairn.layers.norms import PostNorm, RMSNorm

Mixer = Callable[[Tensor, Batch, Memory], Tensor]
"""[rows, hidden] -> the rank's partial sum of [rows, hidden], a new tensor."""

Layer = tuple[RMSNorm | PostNorm, Mixer]
"""x + mixer(norm(x)), or x + norm(mixer(x))."""
