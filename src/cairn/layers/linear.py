"""A matrix product with its weight."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.contract import Kernels, Weight


class Projection(Protocol):
    """A matrix product, and what a family does to its result before anybody sees it."""

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """[rows, in] -> [rows, out], a new tensor."""


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x weight^T + bias; weight [out, in], packed, bias [out] or None. `shape`: (out, in)."""

    kernels: Kernels
    weight: Weight
    bias: Tensor | None
    shape: tuple[int, int]

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """See `Projection`."""
        return self.kernels.linear(x, self.weight, self.bias, batch)


@dataclass(frozen=True, slots=True)
class ScaledLinear:
    """A product's results times `factors` [out]: constant multipliers, published with the weights and not folded into
    them, so that bfloat16 weights stay what they are."""

    linear: Projection
    factors: Tensor

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """See `Projection`."""
        return self.linear(x, batch).mul_(self.factors)
