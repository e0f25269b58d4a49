"""Products in int8: a weight has a scale for each output channel, an activation one for its row.

    x = row scale * a,    weight = channel scale * w,    a and w whole numbers in -127..127
    x weight^T = row scale * channel scale * (a w^T)

Each row is brought to -127..127 before the product, also for oneDNN, which has one scale for all rows. The sums a w^T
are whole numbers and exact: a row has the same bits whatever rows it is multiplied with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from cairn.errors import ConfigError
from cairn.kernels.cpu.amx import SPARE_ROWS, begin_tiles, end_tiles
from cairn.kernels.cpu.compiled import ELEMENTS, F32, I16, I32, I64, INT, U8, jit, kernel, optional_arg, row_args
from cairn.kernels.cpu.onednn import ZERO_POINT, check_int8, height_of, reorder_int8, scaled_int8_sums
from cairn.kernels.cpu.panels import (
    NUMBERS_OF_SEGMENT,
    RowPartition,
    add_segment,
    as_words,
    has_panels,
    locate,
    pack_panels,
    partition_rows,
    place_of,
    product_type,
    widens,
)
from cairn.kernels.cpu.scalars import advance, bits_of, float_of, load, product, store
from cairn.kernels.cpu.threads import step_work
from cairn.kernels.cpu.tiles import PANEL
from cairn.kernels.cpu.vectors import LANES, aligned, pointer_to

LARGEST = 127
"""Of the whole numbers; -128 is left out, so that both signs reach equally far."""

MAX_INPUTS = (2**31 - 1) // (255 * LARGEST)
"""Of a weight: the sums are int32, and are taken of activations that begin at 0."""

_WIDENS = widens(torch.int8)
_ROWS = I16 if _WIDENS else I32
_TINY = np.float32(torch.finfo(torch.float32).tiny)
_ROUNDING = np.float32(1.5 * 2**23)
"""Added to a small float32, it leaves the nearest whole number in the lowest bits, the even one of two."""
_LOW_BYTES = np.int32(0x00FF00FF)
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
    layout: Literal["panels", "onednn"] = "panels" if has_panels(torch.int8) else "onednn"
    if layout == "onednn":
        check_int8()
    if weight.shape[-1] > MAX_INPUTS:
        raise ConfigError(
            f"--quantization int8: a weight has {weight.shape[-1]} inputs, and sums in int32 take at most "
            f"{MAX_INPUTS}; leave --quantization out"
        )
    step_work().add_weight(weight.numel(), f"int8 {layout}")
    stack = weight if weight.dim() == 3 else weight[None]
    scales = torch.empty(stack.shape[:2])
    zeros = torch.empty(stack.shape[:2], dtype=torch.int32)
    numbers = []
    for matrix, scale, zero in zip(stack, scales, zeros, strict=True):
        wide = matrix.float()
        scale.copy_(wide.abs().amax(dim=1).div_(LARGEST).clamp_(min=float(_TINY)))
        numbers.append(wide.div(scale[:, None]).round_().to(torch.int8))
        zero.copy_(numbers[-1].sum(dim=1, dtype=torch.int32)).mul_(ZERO_POINT)
    matrices = pack_panels([[each] for each in numbers]) if layout == "panels" else tuple(map(reorder_int8, numbers))
    return Int8Weight(weight.shape, weight.dtype, matrices, scales.unbind(), zeros.unbind(), layout)


def multiply_int8(
    x: Tensor, weight: Int8Weight, bias: Tensor | None, expert: int, dtype: torch.dtype | None = None
) -> Tensor:
    """x [n, in] times the transpose of one of the matrices, [n, out] in x's dtype or another one."""
    rows, outputs = x.shape[0], weight.shape[-2]
    out = x.new_empty(rows, outputs, dtype=dtype or x.dtype)
    if not rows:
        return out
    if weight.layout == "panels":
        multiply_int8_panels(
            x, weight, bias, out, partition_rows(rows, weight.matrices[expert].shape[1]), expert=expert
        )
        return out
    numbers, scales = torch.empty(height_of(rows), x.shape[1], dtype=torch.uint8), torch.empty(rows)
    _quantize_rows[x.dtype](
        rows, x.numel() // 4, 0, 0, 0, 0, *row_args(x), numbers.data_ptr(), scales.data_ptr(), x.shape[1],
        x.shape[1],
    )  # fmt: skip
    sums = scaled_int8_sums(numbers, weight.matrices[expert], weight.scales[expert])
    _scale_rows[x.dtype, out.dtype](
        rows, out.numel() // 4, sums.data_ptr(), scales.data_ptr(), *optional_arg(bias), out.data_ptr(), outputs
    )
    return out


def multiply_int8_panels(
    x: Tensor,
    weight: Int8Weight,
    bias: Tensor | None,
    out: Tensor,
    parts: RowPartition,
    order: Tensor | None = None,
    expert: int = 0,
) -> None:
    """As `multiply_panels`, with the weight's matrices from `expert` on, x and the bias in bfloat16 or float32."""
    panels, inputs = weight.matrices[expert], x.shape[1]
    width = 4 * panels.shape[1]
    numbers = torch.empty(out.shape[0] + SPARE_ROWS, width, dtype=torch.int16 if _WIDENS else torch.uint8)
    scales = torch.empty(out.shape[0])
    _quantize_rows[x.dtype](
        parts.groups.shape[0], numbers.numel() // 4, parts.groups.data_ptr(), True, *optional_arg(order),
        *row_args(x), numbers.data_ptr(), scales.data_ptr(), inputs, width,
    )  # fmt: skip
    items, cost = parts.segments.shape[0] * panels.shape[0], parts.cost(panels)
    operands = parts.segments.data_ptr(), panels.shape[0], numbers.data_ptr(), panels.data_ptr(), panels.shape[1], 1
    results = *optional_arg(bias), out.data_ptr(), out.shape[1]
    factors = scales.data_ptr(), weight.scales[expert].data_ptr(), weight.zeros[expert].data_ptr()
    _multiply_int8[x.dtype, out.dtype](items, cost, *operands, *results, *factors)


@kernel({dtype: (I32, INT, I64, INT, x, INT, U8, F32, INT, INT) for dtype, x in ELEMENTS.items()})
def _quantize_rows(
    begin: int, end: int, groups: Any, in_groups: int, order: Any, has_order: int, x: Any, row: int, out: Any,
    scales: Any, inputs: int, width: int,
) -> None:  # fmt: skip
    """In groups, as `panels` has them, four numbers of a row to a word and `width` of them with those that are filled
    up, or, where they are widened, of a word the first and third numbers of all rows, and then the second and fourth
    ones; or, an item a row, as plain rows. A row's scale is NaN where one of its numbers is, and so is all that comes
    of the row."""
    buffer = np.zeros(width, np.uint8)
    for item in range(begin, end):
        first, count = np.int64(item), np.int64(1)
        if in_groups:
            first, count = np.int64(groups[2 * item]), np.int64(groups[2 * item + 1])
        target = as_words(advance(out, first * width * (2 if _WIDENS else 1)))
        for i in range(count):
            source = advance(x, (order[first + i] if has_order else first + i) * row)
            scale = scale_of(source, inputs)
            scales[first + i] = scale
            factor = np.float32(1) / scale
            numbers = pointer_to(buffer) if in_groups else advance(out, item * width)
            for j in range(inputs):
                numbers[j] = whole_number(load(source, j) * factor)
            if in_groups:
                words = as_words(numbers)
                for word in range(width // 4):
                    if _WIDENS:
                        target[2 * word * count + i] = words[word] & _LOW_BYTES
                        target[(2 * word + 1) * count + i] = (words[word] >> np.int32(8)) & _LOW_BYTES
                    else:
                        target[place_of(word, i, count)] = words[word]
    buffer[0] = 0


@jit
def scale_of(x: Any, count: int) -> Any:
    """By which the largest of so many numbers is divided to be 127; NaN where one of them is."""
    most = np.uint32(0)
    for j in range(count):
        # Without its sign, the larger number has the larger bits, and NaN the largest.
        # A sum or an "and" of 32 bits has 64 to numba, and vectors half the lanes.
        bits = np.uint32(bits_of(load(x, j)) & np.uint32(0x7FFFFFFF))
        most = bits if bits > most else most
    scale = float_of(most) / np.float32(LARGEST)
    return _TINY if scale < _TINY else scale


@jit
def signed_number(x: Any) -> Any:
    """The nearest whole number, int32, of a float32 in -127..127."""
    return np.int32(bits_of(x + _ROUNDING) - _ROUNDING_BITS)


@jit
def whole_number(x: Any) -> Any:
    """The same, `ZERO_POINT` for 0, as a byte."""
    return np.uint8((np.uint32(signed_number(x)) + np.uint32(ZERO_POINT)) & np.uint32(255))


OUTPUTS: Sequence[tuple[torch.dtype, torch.dtype]] = tuple(
    (dtype, out) for dtype in ELEMENTS for out in ELEMENTS if out in (dtype, torch.float32)
)
"""Dtypes of activations and of what comes of them."""


@kernel(
    {(dtype, out): (product_type(_ROWS, I32, ELEMENTS[dtype], ELEMENTS[out]), F32, F32, I32) for dtype, out in OUTPUTS},
    needs=has_panels(torch.int8),
)
def _multiply_int8(begin: int, end: int, p: Any, scales: Any, channel_scales: Any, zeros: Any) -> None:
    buffer = np.empty(NUMBERS_OF_SEGMENT + LANES, np.int32)
    sums = aligned(buffer)
    begin_tiles(p.x, sums)
    for item in range(begin, end):
        segment, panel, column, columns = locate(p, item)
        add_segment(p, sums, segment, panel)
        matrix, first = np.int64(segment[0]), np.int64(segment[1])
        factors = advance(channel_scales, matrix * p.outputs + column)
        zero = advance(zeros, matrix * p.outputs + column)
        bias = advance(p.bias, matrix * p.outputs + column)
        for i in range(np.int64(segment[2])):
            source, target = advance(sums, i * PANEL), advance(p.out, (first + i) * p.outputs + column)
            scale = scales[first + i]
            if p.has_bias:
                for j in range(columns):
                    store(target, j, product(np.float32(source[j] - zero[j]), factors[j], scale) + load(bias, j))
            else:
                for j in range(columns):
                    store(target, j, product(np.float32(source[j] - zero[j]), factors[j], scale))
    end_tiles(p.x, sums)
    buffer[0] = 0


@kernel({(dtype, out): (F32, F32, ELEMENTS[dtype], INT, ELEMENTS[out], INT) for dtype, out in OUTPUTS})
def _scale_rows(begin: int, end: int, sums: Any, scales: Any, bias: Any, has_bias: int, out: Any, width: int) -> None:
    for i in range(begin, end):
        source, target, scale = advance(sums, i * width), advance(out, i * width), scales[i]
        if has_bias:
            for j in range(width):
                store(target, j, source[j] * scale + load(bias, j))
        else:
            for j in range(width):
                store(target, j, source[j] * scale)
