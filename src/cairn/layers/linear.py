"""A matrix product with its weight."""

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.contract import ROW_TILE, Kernels, Tiles


class Projection(Protocol):
    """A matrix product, and what a family does to its result before anybody sees it."""

    def __call__(self, x: Tensor, tiles: Tiles | None) -> Tensor:
        """[rows, in] -> [rows, out], a new tensor. `tiles` None runs one product over all rows."""
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x weight^T + bias; weight [out, in], bias [out] or None."""

    kernels: Kernels
    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor, tiles: Tiles | None) -> Tensor:
        """See `Projection`."""
        return self.kernels.linear(x, self.weight, self.bias, tiles)

    def row_tiled(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out] for rows gathered from anywhere, in tiles of ROW_TILE rows, zero-padded."""
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -rows % ROW_TILE))
        tiles = [slice(begin, begin + ROW_TILE) for begin in range(0, padded.shape[0], ROW_TILE)]
        return self(padded, tiles)[:rows]


@dataclass(frozen=True, slots=True)
class ScaledLinear:
    """A product's result times `factor`: a number, or one per output [out]."""

    linear: Projection
    factor: Tensor | float

    def __call__(self, x: Tensor, tiles: Tiles | None) -> Tensor:
        """See `Projection`."""
        return self.linear(x, tiles).mul_(self.factor)
