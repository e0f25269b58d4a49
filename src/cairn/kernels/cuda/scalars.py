"""Formulas that several kernels share, in float32."""

import triton
import triton.language as tl

LEAST_DECAY = tl.constexpr(-30.0)
"""Of a token's logarithm of decay in a chunked scan: what e^-30 leaves is far below float32's last digit, and sums over
a chunk stay so small that differences of two have four digits and more."""


@triton.jit
def softplus(x):
    """log(1 + exp(x)), by its series where adding 1 would lose the small one's digits."""
    small = tl.exp(tl.minimum(x, 20.0))
    series = small * (1.0 - small * (0.5 - small * 0.33333333))
    return tl.where(x > 20.0, x, tl.where(small < 0.01, series, tl.log(1.0 + small)))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def product(a, b, total, LOW: tl.constexpr):
    """total + a b: of bfloat16 operands if LOW, of float32 ones (three TF32 products each) if not."""
    if LOW:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="tf32x3")


@triton.jit
def wide_product(a, b, LOW: tl.constexpr):
    """a b of float32 operands: of their first 11 bits (TF32) if LOW, three such products if not."""
    if LOW:
        return tl.dot(a, b, input_precision="tf32")
    return tl.dot(a, b, input_precision="tf32x3")
