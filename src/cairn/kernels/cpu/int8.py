"""Products in int8: a weight has a scale for each output channel, an activation one for its row.

    x = row scale * a,    weight = channel scale * w,    a and w whole numbers in -127..127
    x weight^T = row scale * channel scale * (a w^T)

oneDNN has one scale for all rows of a product, so that each row is brought to -127..127 before and back after it. The
sums a w^T are whole numbers and exact: a row has the same bits whatever rows it is multiplied with.
"""

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from cairn.errors import ConfigError
from cairn.kernels.cpu.compiled import ELEMENTS, F32, INT, kernel
from cairn.kernels.cpu.heights import height_of
from cairn.kernels.cpu.scalars import advance, bits_of, float_of, load, store
from cairn.kernels.cpu.threads import step_work

logger = logging.getLogger(__name__)

LARGEST = 127
"""Of the whole numbers; -128 is left out, so that both signs reach equally far."""

MAX_INPUTS = (2**31 - 1) // (255 * LARGEST)
"""Of a weight: the sums are int32, and oneDNN adds up activations that begin at 0."""

_U8 = types.CPointer(types.uint8)
_ZERO_POINT = 128
"""What stands for 0 among activations, uint8: the processor's products are of one unsigned and one signed byte."""

_TINY = np.float32(torch.finfo(torch.float32).tiny)
_ROUNDING = np.float32(1.5 * 2**23)
"""Added to a small float32, it leaves the nearest whole number in the lowest bits, the even one of two."""
_ROUNDING_BITS = np.uint32(_ROUNDING.view(np.uint32))


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight, or a stack of experts' ones, in int8.

    `shape`, `dtype`: those of the tensor it was made of. `matrices`: each [out, in] in oneDNN's layout, one for each
    expert; `scales`: float32 [out] of each. `zero_points`: int32 [out], the zeros that oneDNN asks for.
    """

    shape: torch.Size
    dtype: torch.dtype
    matrices: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    zero_points: Tensor


def pack_int8(weight: Tensor) -> Int8Weight:
    """See `Kernels.pack_int8`."""
    _check_machine()
    if weight.shape[-1] > MAX_INPUTS:
        raise ConfigError(
            f"--quantization int8: a weight has {weight.shape[-1]} inputs, and sums in int32 take at most "
            f"{MAX_INPUTS}; leave --quantization out"
        )
    step_work().packed_bytes += weight.numel()
    packed = [_packed(matrix) for matrix in (weight.unbind() if weight.dim() == 3 else (weight,))]
    zero_points = torch.zeros(weight.shape[-2], dtype=torch.int32)
    matrices, scales = zip(*packed, strict=True)
    return Int8Weight(weight.shape, weight.dtype, matrices, scales, zero_points)


def _packed(matrix: Tensor) -> tuple[Tensor, Tensor]:
    wide = matrix.float()
    scales = wide.abs().amax(dim=1).div_(LARGEST).clamp_(min=float(_TINY))
    numbers = wide.div(scales[:, None]).round_().to(torch.int8)
    return _in_onednns_layout(numbers), scales


def int8_product(
    x: Tensor, weight: Int8Weight, bias: Tensor | None, expert: int, dtype: torch.dtype | None = None
) -> Tensor:
    """x [n, in] times the transpose of one of the matrices, [n, out] in x's dtype or another one."""
    (rows, width), outputs = x.shape, weight.shape[-2]
    out = x.new_empty(rows, outputs, dtype=dtype or x.dtype)
    if not rows:
        return out
    numbers, scales = torch.empty(height_of(rows), width, dtype=torch.uint8), torch.empty(rows)
    _quantize_rows[x.dtype](
        rows, x.numel() // 4, x.data_ptr(), x.stride(0), numbers.data_ptr(), scales.data_ptr(), width
    )
    sums = _scaled_sums(numbers, weight.matrices[expert], weight.scales[expert], weight.zero_points)
    _scale_rows[x.dtype, out.dtype](
        rows,
        out.numel() // 4,
        sums.data_ptr(),
        scales.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        bias is not None,
        out.data_ptr(),
        outputs,
    )
    return out


def _in_onednns_layout(numbers: Tensor) -> Tensor:
    packed: Tensor = torch.ops.onednn.qlinear_prepack.default(numbers, None)
    return packed


def _scaled_sums(numbers: Tensor, matrix: Tensor, scales: Tensor, zero_points: Tensor) -> Tensor:
    """numbers uint8 [n, in], `_ZERO_POINT` for 0 -> the sums times the outputs' scales, float32 [n, out]."""
    sums: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        numbers, 1.0, _ZERO_POINT, matrix, scales, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return sums


@cache
def _check_machine() -> None:
    """Raises ConfigError where this torch on this CPU has no int8 products, or has wrong ones: some processors'
    instructions add two products up in 16 bits, for which numbers in -127..127 are too large."""
    numbers = torch.full((3, 64), LARGEST, dtype=torch.int8)
    numbers[1] = -LARGEST
    numbers[2, ::2] = 0
    activations = torch.full((2, 64), _ZERO_POINT + LARGEST, dtype=torch.uint8)
    activations[1, ::3] = _ZERO_POINT - LARGEST
    try:
        sums = _scaled_sums(activations, _in_onednns_layout(numbers), torch.ones(3), torch.zeros(3, dtype=torch.int32))
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"--quantization int8: this torch has no int8 products on this machine ({error}); leave it out"
        ) from error
    if not torch.equal(sums.double(), (activations.double() - _ZERO_POINT) @ numbers.double().t()):
        raise ConfigError(
            "--quantization int8: this machine's int8 products give wrong sums, as on processors without VNNI and "
            "AMX do; leave it out"
        )
    found = torch.cpu.get_capabilities()
    if not any(found.get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8", "i8mm")):
        logger.warning(
            "--quantization int8: this processor has no instructions for int8 products (VNNI or AMX): they are right, "
            "but may be slower than bfloat16's"
        )


@kernel({dtype: (x, INT, _U8, F32, INT) for dtype, x in ELEMENTS.items()})
def _quantize_rows(begin: int, end: int, x: Any, row: int, out: Any, scales: Any, width: int) -> None:
    """A row's scale is NaN where one of its numbers is, and so is all that comes of the row."""
    for i in range(begin, end):
        source, target = advance(x, i * row), advance(out, i * width)
        most = np.uint32(0)
        for j in range(width):
            # Without its sign, the larger number has the larger bits, and NaN the largest.
            bits = bits_of(load(source, j)) & np.uint32(0x7FFFFFFF)
            most = bits if bits > most else most
        scale = float_of(most) / np.float32(LARGEST)
        scale = _TINY if scale < _TINY else scale
        scales[i] = scale
        factor = np.float32(1) / scale
        for j in range(width):
            bits = bits_of(load(source, j) * factor + _ROUNDING) - _ROUNDING_BITS
            target[j] = np.uint8((bits + np.uint32(_ZERO_POINT)) & np.uint32(255))


@kernel(
    {
        (dtype, out_dtype): (F32, F32, x, INT, out, INT)
        for dtype, x in ELEMENTS.items()
        for out_dtype, out in ELEMENTS.items()
        if out_dtype in (dtype, torch.float32)
    }
)
def _scale_rows(begin: int, end: int, sums: Any, scales: Any, bias: Any, has_bias: int, out: Any, width: int) -> None:
    for i in range(begin, end):
        source, target, scale = advance(sums, i * width), advance(out, i * width), scales[i]
        if has_bias:
            for j in range(width):
                store(target, j, source[j] * scale + load(bias, j))
        else:
            for j in range(width):
                store(target, j, source[j] * scale)
