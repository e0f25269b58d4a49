"""Mixers put together: scaled as a family scales them, and side by side."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.layers.memory import Memory

Mixer = Callable[[Tensor, Batch, Memory], Tensor]
"""[rows, hidden] -> the rank's partial sum of [rows, hidden], a new tensor."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """after * mixer(before * x): constant multipliers, published with the weights and not folded into them, so that
    bfloat16 weights stay what they are."""

    mixer: Mixer
    after: float
    before: float = 1.0

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """See `Mixer`."""
        inner = hidden if self.before == 1.0 else hidden * self.before
        return self.mixer(inner, batch, memory).mul_(self.after)


@dataclass(frozen=True, slots=True)
class Parallel:
    """The sum of several mixers of the same input, in their order."""

    mixers: tuple[Mixer, ...]

    def __call__(self, hidden: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """See `Mixer`."""
        return reduce(Tensor.add_, (mixer(hidden, batch, memory) for mixer in self.mixers))
