"""Weights in FP8 with their scales, as quantized checkpoints hold them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
"""Numbers of a row that have one scale, where a row has several: what every checkpoint with block scales has."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight, or a stack of experts' ones, in FP8 (e4m3).

    `numbers`: their bits, uint8 [..., out, in]. `scales`: float32 [..., out, 1], one for a row, or, where there are
    more than BLOCK inputs, [..., out, ceil(in / BLOCK)]: the weight is numbers[..., i, j] * scales[..., i, j // BLOCK].
    `dtype`: of the model.
    """

    numbers: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    @property
    def is_blocked(self) -> bool:
        """Whether a row has several scales."""
        return self.scales.shape[-1] > 1

    def to(self, device: torch.device) -> "Fp8Weight":
        """On a device."""
        return self.changed(lambda part: part.to(device))

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Fp8Weight":
        """With its numbers and its scales put elsewhere, or their rows into another order."""
        return Fp8Weight(change(self.numbers), change(self.scales), self.dtype)

    def __getitem__(self, rows: slice) -> "Fp8Weight":
        """Some rows."""
        return self.changed(lambda part: part[rows])

    def dequantize(self) -> Tensor:
        """The weight in `dtype`, rounded to it once."""
        if self.numbers.is_meta:
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        wide = self.numbers.view(torch.float8_e4m3fn).float()
        scales = self.scales
        if self.is_blocked:
            scales = scales.repeat_interleave(BLOCK, dim=-1)[..., : self.shape[-1]]
        return wide.mul_(scales).to(self.dtype)
