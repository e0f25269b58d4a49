"""Products with weights row by row, plain, in int8 and in four bits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.kernels.batch import Batch, HostBatch
from cairn.kernels.contract import Weight
from cairn.kernels.int4 import Int4Weight
from cairn.kernels.reference.elementwise import widen
from cairn.kernels.staging import Staging

LARGEST = 127


@dataclass(frozen=True, slots=True)
class RowScaledInt8:
    """`numbers` int8 [out, in] or [E, out, in], `scales` float32 [out, 1] or [E, out, 1], `dtype` of the model."""

    numbers: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def __getitem__(self, expert: int) -> "RowScaledInt8":
        return RowScaledInt8(self.numbers[expert], self.scales[expert], self.dtype)


def pack_int8(weight: Tensor) -> RowScaledInt8:
    """See `Kernels.pack_int8`."""
    numbers, scales = _quantized(weight.float())
    return RowScaledInt8(numbers.to(torch.int8), scales, weight.dtype)


def multiply(weight: Weight, row: Tensor) -> Tensor:
    """weight [out, in], row [in], which is float32 or wider -> [out]."""
    if isinstance(weight, Int4Weight):
        numbers, scale = _quantized(row.view(-1, weight.group))
        return weight.dequantize(row.dtype) @ (numbers * scale).flatten()
    if not isinstance(weight, RowScaledInt8):
        return widen(weight) @ row
    numbers, scale = _quantized(row)
    return (weight.numbers.double() @ numbers.double()).to(row.dtype) * weight.scales[:, 0] * scale


def _quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    scales = values.abs().amax(-1, keepdim=True) / LARGEST
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    return (values / scales).round(), scales


def build_metadata(host: HostBatch, staging: Staging) -> object:
    """See `Kernels.build_metadata`."""
    return None


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """See `Kernels.embed`."""
    out = weight.new_empty(len(tokens), weight.shape[1])
    for row, token in enumerate(tokens.tolist()):
        out[row] = weight[token]
    return out


def linear(x: Tensor, weight: Weight, bias: Tensor | None, batch: Batch) -> Tensor:
    """See `Kernels.linear`."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    for row in range(x.shape[0]):
        product = multiply(weight, widen(x[row]))
        out[row] = product if bias is None else product + bias
    return out


def lm_head(hidden: Tensor, weight: Weight) -> Tensor:
    """See `Kernels.lm_head`."""
    wide = widen(hidden)
    out = torch.empty(hidden.shape[0], weight.shape[0], dtype=wide.dtype)
    for row in range(hidden.shape[0]):
        out[row] = multiply(weight, wide[row])
    return out
