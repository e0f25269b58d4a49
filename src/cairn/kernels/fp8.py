"""Weights in FP8 with their scales, as quantized checkpoints hold them."""

from collections.abc import Callable, Sequence
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

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Fp8Weight":
        """With its numbers and its scales put elsewhere, or their rows into another order."""
        return Fp8Weight(change(self.numbers), change(self.scales), self.dtype)

    def dequantize(self) -> Tensor:
        """The weight in `dtype`, rounded to it once."""
        if self.numbers.is_meta:
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        wide = self.numbers.view(torch.float8_e4m3fn).float()
        scales = self.scales
        if self.is_blocked:
            scales = scales.repeat_interleave(BLOCK, dim=-1)[..., : self.shape[-1]]
        return wide.mul_(scales).to(self.dtype)


WeightRows = Tensor | Fp8Weight
"""Rows of a weight [out, in], in FP8 or in the model's dtype."""


def join_rows(parts: Sequence[WeightRows]) -> tuple[WeightRows, ...]:
    """The rows of several weights one after the other: neighbours of one kind become one part."""
    runs: list[list[WeightRows]] = []
    for part in parts:
        if runs and _kind(runs[-1][0]) == _kind(part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return tuple(_combine(torch.cat, run) for run in runs)


def stack_experts(matrices: Sequence[WeightRows]) -> WeightRows | None:
    """A matrix [out, in] of each expert as a stack [E, out, in]; None where they are not all of one kind."""
    return _combine(torch.stack, matrices) if len({_kind(matrix) for matrix in matrices}) == 1 else None


def dequantize_rows(parts: Sequence[WeightRows]) -> Tensor:
    """The rows of all parts in the model's dtype."""
    plain = [part.dequantize() if isinstance(part, Fp8Weight) else part for part in parts]
    return plain[0] if len(plain) == 1 else torch.cat(plain)


def _kind(part: WeightRows) -> object:
    return (part.dtype, part.scales.shape[-1]) if isinstance(part, Fp8Weight) else "plain"


def _combine(function: Callable[[list[Tensor]], Tensor], parts: Sequence[WeightRows]) -> WeightRows:
    if len(parts) == 1 and function is torch.cat:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, Fp8Weight)]
    if not quantized:
        return function([part for part in parts if isinstance(part, Tensor)])
    numbers, scales = ([getattr(part, field) for part in quantized] for field in ("numbers", "scales"))
    return Fp8Weight(function(numbers), function(scales), quantized[0].dtype)
