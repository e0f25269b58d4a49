"""What a stack of layers is made of."""

from collections.abc import Callable

from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.layers.memory import Memory
from cairn.layers.norms import PostNorm, RMSNorm, SandwichNorm, ScaledSum

Mixer = Callable[[Tensor, Batch, Memory], Tensor]
"""[rows, hidden] -> the rank's partial sum of [rows, hidden], or of what the norm after it takes; a new tensor."""

LayerNorm = RMSNorm | PostNorm | SandwichNorm | ScaledSum
"""Before a mixer, after it, or both."""

Layer = tuple[LayerNorm, Mixer]
"""x + mixer(norm(x)), x + norm(mixer(x)), or x + norm(mixer(other norm(x)))."""
