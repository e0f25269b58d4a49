"""oneDNN's products, with weights in the layout that it multiplies with, where the processor has no dot instructions
for `panels` or has a matrix unit.

torch has these operations for its own compiler and promises nobody that they stay: where bfloat16's fail, the weight
remains as it is, and where int8's do, int8 is refused.
"""

import logging
import platform
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.errors import ConfigError
from cairn.kernels.cpu.features import cpu_features

logger = logging.getLogger(__name__)

ZERO_POINT = 128
"""What stands for 0 among activations, uint8: the processor's products are of one unsigned and one signed byte."""


def height_of(rows: int) -> int:
    """Rows of the product that so many rows are part of: one of a few numbers, at most a sixteenth more than wanted
    from 64 rows on.

    oneDNN makes code for every shape that it meets, and keeps it: that takes time in the middle of serving, and memory
    for as many as were met.
    """
    if rows <= 16:
        return rows
    step = 8 if rows <= 64 else 1 << ((rows - 1).bit_length() - 5)
    return -(-rows // step) * step


# -- bfloat16 --------------------------------------------------------------------------------------------------------


@cache
def has_products(dtype: torch.dtype) -> bool:
    """Whether products in this dtype are made of it. For bfloat16 oneDNN wants AVX512 at least; torch's own products of
    bfloat16 take many times as long as those of float32 where it has no instructions for them."""
    if dtype != torch.bfloat16 or not platform.machine().startswith(("x86", "AMD64")):
        return True
    return all(cpu_features().get(name) for name in ("avx512bw", "avx512dq", "avx512vl"))


@cache
def can_reorder(dtype: torch.dtype) -> bool:
    """Whether this torch on this CPU multiplies with weights in oneDNN's layout, and comes to the same result. float32
    stays with torch's own products, which are as fast."""
    if dtype != torch.bfloat16 or not has_products(dtype):
        return False
    weight = torch.linspace(-1, 1, 48 * 32).view(48, 32).to(dtype)
    x, bias = torch.linspace(-1, 1, 3 * 32).view(3, 32).to(dtype), torch.linspace(-1, 1, 48).to(dtype)
    try:
        close = torch.allclose(
            reordered_product(x, reorder(weight), bias), F.linear(x, weight, bias), rtol=0.02, atol=0.02
        )
    except (AttributeError, RuntimeError, TypeError) as error:
        logger.warning("weights stay in torch's own layout, in which products of few rows are slower: %s", error)
        return False
    if not close:
        logger.warning("weights stay in torch's own layout: oneDNN's gives other results here")
    return close


def reorder(matrix: Tensor) -> Tensor:
    """[out, in] bfloat16 in oneDNN's layout, chosen for one row; it serves any number."""
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), 1)
    return reordered


def reordered_product(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, in] times the transpose of a reordered matrix, [n, out]."""
    rows = x.shape[0]
    height = height_of(rows)
    if height != rows:
        padded = x.new_zeros(height, x.shape[1])
        padded[:rows] = x
        x = padded
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, matrix, bias, "none", [], "")
    return result[:rows]


# -- int8 ------------------------------------------------------------------------------------------------------------


def reorder_int8(matrix: Tensor) -> Tensor:
    """[out, in] int8 in oneDNN's layout."""
    reordered: Tensor = torch.ops.onednn.qlinear_prepack.default(matrix, None)
    return reordered


def scaled_int8_sums(numbers: Tensor, matrix: Tensor, scales: Tensor) -> Tensor:
    """numbers uint8 [n, in], `ZERO_POINT` for 0, n a `height_of`: the sums of a reordered matrix times the outputs'
    scales, float32 [n, out]."""
    zero_points = torch.zeros(scales.shape, dtype=torch.int32)
    sums: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        numbers, 1.0, ZERO_POINT, matrix, scales, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return sums


@cache
def check_int8() -> None:
    """Raises ConfigError where this torch on this CPU has no int8 products, or has wrong ones: some processors'
    instructions add two products up in 16 bits, for which numbers in -127..127 are too large."""
    numbers = torch.full((3, 64), 127, dtype=torch.int8)
    numbers[1] = -127
    numbers[2, ::2] = 0
    activations = torch.full((2, 64), ZERO_POINT + 127, dtype=torch.uint8)
    activations[1, ::3] = ZERO_POINT - 127
    try:
        sums = scaled_int8_sums(activations, reorder_int8(numbers), torch.ones(3))
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"--quantization int8: this torch has no int8 products on this machine ({error}); leave it out"
        ) from error
    if not torch.equal(sums.double(), (activations.double() - ZERO_POINT) @ numbers.double().t()):
        raise ConfigError(
            "--quantization int8: this machine's int8 products give wrong sums, as on processors without VNNI and "
            "AMX do; leave it out"
        )
    capabilities = torch.cpu.get_capabilities()
    if not any(capabilities.get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8", "i8mm")):
        logger.warning(
            "--quantization int8: this processor has no instructions for int8 products (VNNI or AMX): they are right, "
            "but may be slower than bfloat16's"
        )
