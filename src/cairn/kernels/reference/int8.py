"""Weights in int8 and products with them, row by row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.kernels.contract import Weight
from cairn.kernels.reference.elementwise import widen

LARGEST = 127


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """`numbers` int8 [out, in] or [E, out, in], `scales` float32 [out, 1] or [E, out, 1], `dtype` of the model."""

    numbers: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def __getitem__(self, expert: int) -> "Int8Weight":
        return Int8Weight(self.numbers[expert], self.scales[expert], self.dtype)


def pack_int8(weight: Tensor) -> Int8Weight:
    """See `Kernels.pack_int8`."""
    numbers, scales = _quantized(weight.float())
    return Int8Weight(numbers.to(torch.int8), scales, weight.dtype)


def multiply(weight: Weight, row: Tensor) -> Tensor:
    """weight [out, in], row [in], which is float32 or wider -> [out]."""
    if not isinstance(weight, Int8Weight):
        return widen(weight) @ row
    numbers, scale = _quantized(row)
    return (weight.numbers.double() @ numbers.double()).to(row.dtype) * weight.scales[:, 0] * scale


def _quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    scales = values.abs().amax(-1, keepdim=True) / LARGEST
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    return (values / scales).round(), scales
