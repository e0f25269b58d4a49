"""Products in int8: a weight has a scale for each output channel, an activation one for its row.

    x = row scale * a,    weight = channel scale * w,    a and w whole numbers in -127..127
    x weight^T = row scale * channel scale * (a w^T)

Each row is brought to -127..127 before the product, also for oneDNN, which has one scale for all rows. The sums a w^T
are whole numbers and exact: a row has the same bits whatever rows it is multiplied with.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numba.core import types as numba_types
from torch import Tensor

from cairn.errors import ConfigError
from cairn.kernels.cpu.compiled import ELEMENTS, F32, I32, INT, jit, kernel
from cairn.kernels.cpu.onednn import ZERO_POINT, check_int8, height_of, reorder_int8, scaled_int8_sums
from cairn.kernels.cpu.panels import (
    PANEL,
    SUMS_OF_ITEM,
    add_item,
    has_instructions,
    items_of,
    place_of_item,
    rows_of_group,
    to_panels,
    words_at,
)
from cairn.kernels.cpu.scalars import advance, bits_of, float_of, load, store
from cairn.kernels.cpu.threads import step_work
from cairn.kernels.cpu.vectors import LANES, aligned, pointer_to

LARGEST = 127
"""Of the whole numbers; -128 is left out, so that both signs reach equally far."""

MAX_INPUTS = (2**31 - 1) // (255 * LARGEST)
"""Of a weight: the sums are int32, and are taken of activations that begin at 0."""

_U8 = numba_types.CPointer(numba_types.uint8)
_TINY = np.float32(torch.finfo(torch.float32).tiny)
_ROUNDING = np.float32(1.5 * 2**23)
"""Added to a small float32, it leaves the nearest whole number in the lowest bits, the even one of two."""
_ROUNDING_BITS = np.uint32(_ROUNDING.view(np.uint32))


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight, or a stack of experts' ones, in int8.

    `shape`, `dtype`: those of the tensor it was made of. `matrices`: each [out, in], one for each expert, in `layout`;
    `scales`: float32 [out] of each. `zeros`: int32 [out] of each, what its sums are of a row in which all stands for 0.
    """

    shape: torch.Size
    dtype: torch.dtype
    matrices: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    zeros: tuple[Tensor, ...]
    layout: Literal["panels", "onednn"]


def pack_int8(weight: Tensor) -> Int8Weight:
    """See `Kernels.pack_int8`."""
    layout: Literal["panels", "onednn"] = "panels" if has_instructions(torch.int8) else "onednn"
    if layout == "onednn":
        check_int8()
    if weight.shape[-1] > MAX_INPUTS:
        raise ConfigError(
            f"--quantization int8: a weight has {weight.shape[-1]} inputs, and sums in int32 take at most "
            f"{MAX_INPUTS}; leave --quantization out"
        )
    step_work().packed_bytes += weight.numel()
    matrices, scales, zeros = [], [], []
    for matrix in weight.unbind() if weight.dim() == 3 else (weight,):
        wide = matrix.float()
        scales.append(wide.abs().amax(dim=1).div_(LARGEST).clamp_(min=float(_TINY)))
        numbers = wide.div_(scales[-1][:, None]) if wide is not matrix else wide / scales[-1][:, None]
        numbers = numbers.round_().to(torch.int8)
        zeros.append(numbers.sum(dim=1, dtype=torch.int32).mul_(ZERO_POINT))
        matrices.append(to_panels(numbers) if layout == "panels" else reorder_int8(numbers))
    return Int8Weight(weight.shape, weight.dtype, tuple(matrices), tuple(scales), tuple(zeros), layout)


def int8_product(
    x: Tensor, weight: Int8Weight, bias: Tensor | None, expert: int, dtype: torch.dtype | None = None
) -> Tensor:
    """x [n, in] times the transpose of one of the matrices, [n, out] in x's dtype or another one."""
    (rows, inputs), outputs = x.shape, weight.shape[-2]
    out = x.new_empty(rows, outputs, dtype=dtype or x.dtype)
    if not rows:
        return out
    matrix, channel_scales = weight.matrices[expert], weight.scales[expert]
    panels = weight.layout == "panels"
    group = rows_of_group(rows) if panels else 1
    height, width = (rows, -(-inputs // 4) * 4) if panels else (height_of(rows), inputs)
    numbers = torch.empty(height, width, dtype=torch.uint8)
    scales = torch.empty(rows)
    _quantize_rows[x.dtype](
        -(-rows // group),
        x.numel() // 4,
        x.data_ptr(),
        x.stride(0),
        numbers.data_ptr(),
        scales.data_ptr(),
        rows,
        group,
        inputs,
        width,
    )
    added = (0 if bias is None else bias.data_ptr()), bias is not None
    if panels:
        _multiply_int8[x.dtype, out.dtype](
            *items_of(rows, matrix),
            numbers.data_ptr(),
            matrix.data_ptr(),
            scales.data_ptr(),
            channel_scales.data_ptr(),
            weight.zeros[expert].data_ptr(),
            *added,
            out.data_ptr(),
            rows,
            group,
            matrix.shape[1],
            outputs,
        )
    else:
        sums = scaled_int8_sums(numbers, matrix, channel_scales)
        _scale_rows[x.dtype, out.dtype](
            rows, out.numel() // 4, sums.data_ptr(), scales.data_ptr(), *added, out.data_ptr(), outputs
        )
    return out


@kernel({dtype: (x, INT, _U8, F32, INT, INT, INT, INT) for dtype, x in ELEMENTS.items()})
def _quantize_rows(
    begin: int, end: int, x: Any, row: int, out: Any, scales: Any, rows: int, group: int, inputs: int, width: int
) -> None:
    """In groups, as `panels` has them, four numbers of a row to a word and `width` of them with those that are filled
    up; groups of one are plain rows. A row's scale is NaN where one of its numbers is, and so is all that comes of the
    row."""
    buffer = np.zeros(width, np.uint8)
    for item in range(begin, end):
        first = item * group
        count = min(group, rows - first)
        target = words_at(advance(out, first * width))
        for i in range(count):
            source = advance(x, (first + i) * row)
            most = np.uint32(0)
            for j in range(inputs):
                # Without its sign, the larger number has the larger bits, and NaN the largest.
                bits = bits_of(load(source, j)) & np.uint32(0x7FFFFFFF)
                most = bits if bits > most else most
            scale = float_of(most) / np.float32(LARGEST)
            scale = _TINY if scale < _TINY else scale
            scales[first + i] = scale
            factor = np.float32(1) / scale
            if group == 1:
                plain = advance(out, first * width)
                for j in range(inputs):
                    plain[j] = _whole_number(load(source, j) * factor)
                for j in range(inputs, width):
                    plain[j] = np.uint8(0)
            else:
                numbers = pointer_to(buffer)
                for j in range(inputs):
                    numbers[j] = _whole_number(load(source, j) * factor)
                words = words_at(numbers)
                for word in range(width // 4):
                    target[word * count + i] = words[word]
    buffer[0] = 0


@jit
def _whole_number(x: Any) -> Any:
    """The nearest one, `ZERO_POINT` for 0, of a float32 in -127..127."""
    bits = bits_of(x + _ROUNDING) - _ROUNDING_BITS
    return np.uint8((bits + np.uint32(ZERO_POINT)) & np.uint32(255))


@kernel(
    {
        (dtype, out_dtype): (I32, I32, F32, F32, I32, x, INT, out, INT, INT, INT, INT)
        for dtype, x in ELEMENTS.items()
        for out_dtype, out in ELEMENTS.items()
        if out_dtype in (dtype, torch.float32)
    }
)
def _multiply_int8(
    begin: int,
    end: int,
    x: Any,
    panels: Any,
    scales: Any,
    channel_scales: Any,
    zeros: Any,
    bias: Any,
    has_bias: int,
    out: Any,
    rows: int,
    group: int,
    words: int,
    outputs: int,
) -> None:
    buffer = np.empty(SUMS_OF_ITEM + LANES, np.int32)
    sums = aligned(buffer)
    for item in range(begin, end):
        first, count, panel, columns = place_of_item(item, rows, group, outputs)
        add_item(advance(x, first * words), advance(panels, panel * words), sums, count, group, words)
        factors, zero, added = advance(channel_scales, panel), advance(zeros, panel), advance(bias, panel)
        for i in range(count):
            source, target = advance(sums, i * PANEL), advance(out, (first + i) * outputs + panel)
            scale = scales[first + i]
            if has_bias:
                for j in range(columns):
                    store(target, j, np.float32(source[j] - zero[j]) * factors[j] * scale + load(added, j))
            else:
                for j in range(columns):
                    store(target, j, np.float32(source[j] - zero[j]) * factors[j] * scale)
    buffer[0] = 0


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
