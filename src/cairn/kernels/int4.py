"""Weights of four bits, with a scale and a minimum for each group of inputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.errors import ConfigError

GROUPS = (128, 64, 32)
"""Inputs of a group, the first choice first."""

LEVELS = 16
_SHARES = (1.0, 0.9)
"""Of a group's range. Of normally distributed numbers the second one leaves 9 % less squared error."""
_NUMBERS_AT_A_TIME = 1 << 20
_FACTOR_BYTES = 8
"""Of an output's group: its scale and its minimum."""


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight, or a stack of experts' ones, in four bits.

    `numbers`: 0..15, uint8 [..., out, in], a byte each. `scales`: float32 [..., out, in / group]; `minimums`: the same,
    or None where a group reaches equally far on both sides, with 8 for 0. The weight is number * scale + minimum.
    `dtype`: of the model.
    """

    numbers: Tensor
    scales: Tensor
    minimums: Tensor | None
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.shape[-1] // self.scales.shape[-1]

    def __getitem__(self, expert: int) -> "Int4Weight":
        """One expert's, of a stack."""
        least = None if self.minimums is None else self.minimums[expert]
        return Int4Weight(self.numbers[expert], self.scales[expert], least, self.dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight, computed in a dtype."""
        groups = _in_groups(self.numbers.to(dtype), self.group)
        return (groups * self.scales.to(dtype)[..., None] + self.least().to(dtype)[..., None]).flatten(-2)

    def least(self) -> Tensor:
        """The minimums, whether they are given or not."""
        return self.scales * -(LEVELS // 2) if self.minimums is None else self.minimums


def group_of(inputs: int) -> int:
    """Inputs of a group of a weight that is brought to four bits: the most that divide its inputs. Raises ConfigError
    that names --quantization where none does."""
    for group in GROUPS:
        if inputs % group == 0:
            return group
    raise ConfigError(
        f"--quantization int4: a weight has {inputs} inputs, and groups of {GROUPS[-1]} at least have to divide them; "
        "take --quantization int8, or leave it out"
    )


def int4_bytes(shape: Sequence[int], group: int | None = None) -> int:
    """Of a weight of this shape once it has been brought to four bits, in groups of so many inputs, or of `group_of`.
    Raises as that."""
    return math.prod(shape) // 2 + math.prod(shape) // (group or group_of(shape[-1])) * _FACTOR_BYTES


def quantize_int4(weight: Tensor) -> Int4Weight:
    """Each group's range in 16 levels, or a tenth less of it, which cuts off its ends and has finer levels for the
    rest: whichever leaves the smaller sum of squared errors. Raises as `group_of`."""
    *outer, inputs = weight.shape
    group = group_of(inputs)
    rows = weight.reshape(-1, inputs)
    numbers = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    factors = torch.empty(2, len(rows), inputs // group, device=rows.device)
    # A few rows at a time stay in the processor's cache, and need no memory of the weight's size in float32.
    for begin in range(0, len(rows), step := max(1, _NUMBERS_AT_A_TIME // inputs)):
        part = slice(begin, begin + step)
        wide = _in_groups(rows[part].float(), group)
        least, most = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
        first, second = (_quantized(wide, least, (most - least) * share, 1 - share) for share in _SHARES)
        is_better = second[-1] < first[-1]
        part_numbers, *part_factors = (
            torch.where(is_better, new, old) for old, new in zip(first[:3], second[:3], strict=True)
        )
        numbers[part] = part_numbers.flatten(-2)
        factors[:, part] = torch.stack(part_factors).squeeze(-1)
    scales, minimums = factors.view(2, *outer, inputs // group).unbind()
    return Int4Weight(numbers.view(weight.shape), scales, minimums, weight.dtype)


def _quantized(wide: Tensor, least: Tensor, span: Tensor, cut: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers of four bits, their scales and minimums, and the sum of squared errors of each group, where levels span
    `span`, with a half of `cut` of the whole range left out at either end."""
    scales = (span / (LEVELS - 1)).clamp_(min=torch.finfo(torch.float32).tiny)
    low = least + span * (cut / (1 - cut) / 2)
    levels = (wide - low).div_(scales).round_().clamp_(0, LEVELS - 1)
    numbers = levels.to(torch.uint8)
    errors = levels.mul_(scales).add_(low).sub_(wide).square_().sum(-1, keepdim=True)
    return numbers, scales, low, errors


def _in_groups(numbers: Tensor, group: int) -> Tensor:
    """[..., in] as [..., in / group, group]."""
    return numbers.reshape(*numbers.shape[:-1], -1, group)
