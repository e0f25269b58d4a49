"""What experts are made of, and the parts of their kernels that blocks of rows and single rows have in common."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.cuda.fp8 import operands_of
from cairn.kernels.weight_rows import WeightRows


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """What experts are made of. `up_bias`: of those that are clamped, by `alpha` and `limit`; `gelu`: in the place of
    the silu."""

    up: WeightRows
    down: WeightRows
    gated: bool = False
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    alpha: float = 0.0
    limit: float = 0.0
    gelu: bool = False

    def of_up(self, no_bias: Tensor) -> tuple[Tensor, float, float]:
        """What the kernels of the first product get; `no_bias` where there is none."""
        return (no_bias if self.up_bias is None else self.up_bias), self.alpha, self.limit

    def bias_of_down(self, no_bias: Tensor) -> Tensor:
        """What the kernels of the second product get; `no_bias` where there is none."""
        return no_bias if self.down_bias is None else self.down_bias


def stack_operands(weight: WeightRows, no_scales: Tensor) -> tuple[tuple[Tensor, ...], int, int]:
    """What kernels get of a stack of weights: see `operands_of`; and how far experts and rows are from each other."""
    numbers, *more = operands_of(weight, no_scales)
    return (numbers, *more), numbers.stride(0), numbers.stride(1)


@triton.jit
def activated(gate, up, alpha, limit, GATED: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr):
    if CLAMPED:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up)
        return (up + 1) * gate * tl.sigmoid(alpha * gate)
    if GELU:
        # As `gelu_mul` has it.
        inner = 1.5957691216 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(tl.maximum(inner, -80.0)) * up
    if GATED:
        return gate * tl.sigmoid(gate) * up
    return tl.where(up < 0, 0.0, up * up)


@triton.jit
def biases_of(bias, expert, column, inner_width, is_column):
    """Of the columns of gate and up, float32."""
    first = bias + expert.to(tl.int64) * inner_width * 2 + column
    gate = tl.load(first, mask=is_column, other=0).to(tl.float32)
    return gate, tl.load(first + inner_width, mask=is_column, other=0).to(tl.float32)


@triton.jit
def up_rows(expert, column, inner_width, GATED: tl.constexpr):
    """Those of the columns of gate and up, counted over all experts; without a gate both are those of up."""
    first = expert.to(tl.int64) * inner_width + column
    if GATED:
        first += expert.to(tl.int64) * inner_width
        return first, first + inner_width
    return first, first
