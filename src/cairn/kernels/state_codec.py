"""The arithmetic of `StateEncoding` by torch's operations. Scales are made from the bits of the largest numbers, so
that every backend finds the same ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

LEAST_BITS = 0x0080_0000
"""Of 2^-126. Smaller numbers have fewer bits, and are stored as 0 where none is larger."""

INFINITY_BITS = 0x7F80_0000

HALF_TOP = 14
"""A head's largest number becomes at least 2^HALF_TOP and, once rounded, less than twice that."""

HALF_ROUNDING, ROW_ROUNDING = 0x1000, 0x40
"""Half a unit in the last of 11 and of 17 bits."""

MOST_HALF = 32752.0
"""The largest number of 11 bits below 2^15: what is rounded beyond it is more than the largest float32 number."""

MOST_INT8 = 127.0


@dataclass(frozen=True, slots=True)
class StateCodec:
    """`dtype`: of stored numbers. `find_scales`: from largest magnitudes, float32, to scales. `round_all`: from float32
    numbers over their scales to stored ones."""

    dtype: torch.dtype
    find_scales: Callable[[Tensor], Tensor]
    round_all: Callable[[Tensor], Tensor]

    def encode(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """numbers float32 [..., n] -> (values [..., n], scales float32 [..., 1])."""
        most = torch.maximum(numbers.amax(-1, keepdim=True), numbers.amin(-1, keepdim=True).neg_())
        # A NaN may have a sign, which is not to be one of its bits.
        bits = most.abs_().view(torch.int32)
        scales = self.find_scales(most).masked_fill_(bits < LEAST_BITS, 1.0)
        broken = bits >= INFINITY_BITS
        values = self.round_all((numbers / scales).masked_fill_(broken, 0.0))
        return values, scales.masked_fill_(broken, torch.nan)

    def decode(self, values: Tensor, scales: Tensor) -> Tensor:
        """What `encode` returns -> float32 [..., n]."""
        return values.float().mul_(scales)


def _find_half_scales(most: Tensor) -> Tensor:
    # The largest float32 numbers would be rounded up to infinity, whose exponent is 255.
    exponents = ((most.view(torch.int32) + HALF_ROUNDING) >> 23).clamp_(HALF_TOP + 1, 254)
    return exponents.sub_(HALF_TOP).bitwise_left_shift_(23).view(torch.float32)


def _round_halves(scaled: Tensor) -> Tensor:
    return scaled.clamp_(-MOST_HALF, MOST_HALF).half()


def _find_row_scales(most: Tensor) -> Tensor:
    bits = (most / MOST_INT8).view(torch.int32).add_(ROW_ROUNDING)
    return bits.bitwise_and_(~(2 * ROW_ROUNDING - 1)).clamp_(LEAST_BITS).view(torch.float32)


def _round_int8(scaled: Tensor) -> Tensor:
    return scaled.round_().to(torch.int8)


CODECS: Mapping[str, StateCodec] = MappingProxyType(
    {
        "float16": StateCodec(torch.float16, _find_half_scales, _round_halves),
        "int8": StateCodec(torch.int8, _find_row_scales, _round_int8),
    }
)
"""By the name of a `StateEncoding` that has scales."""
