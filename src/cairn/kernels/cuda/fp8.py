"""Products with weights that stay in FP8 or in codes: x as it is, the weight widened tile by tile, sums in float32.

A tile of weights is widened to x's dtype, which holds every FP8 number, and multiplied; scales are factors of the sums,
so that nothing is rounded before. Codes become numbers of x's dtype, scales included (see `codes`). One or two rows are
bound by the reading of the weights, and are products of a matrix and a vector. Hundreds of rows are bound by the
products: where a row of the weight has one scale, GPUs with FP8 tensor cores take `torch._scaled_mm`, for which each
row of x is brought to FP8 with a scale of its own; codes become a plain weight, which lives as long as the product.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.cuda.codes import NUM_OPERANDS, code_form, code_operands, load_codes, widen_e4m3
from cairn.kernels.cuda.device import kernel, limits, power_of_2, takes_tensor_cores
from cairn.kernels.fp8 import BLOCK, Fp8Weight
from cairn.kernels.gpu_codes import warn_dequantized, why_no_codes
from cairn.kernels.quantized import QuantizedWeight
from cairn.kernels.weight_rows import StoredRows, WeightRows, join_rows

_FEW_ROWS = 2
"""Up to so many a row is a product of a matrix and a vector, and the second one finds the matrix in the cache."""

_SCALED_ROWS = 256
"""From so many on the products are the bound by far, and half the time for them pays for bringing x to FP8."""

_EXPANDED_ROWS = 1024
"""From so many on codes are brought to the dtype once, for cuBLAS, and not once for each block of rows."""

_LARGEST = 448.0
"""Of the numbers in FP8."""

_BLOCK = tl.constexpr(BLOCK)


# -- what experts share ----------------------------------------------------------------------------------------------


def form_of(weight: WeightRows) -> dict[str, Any]:
    """The constants of a kernel by which it reads a weight, and how it is compiled for that."""
    if isinstance(weight, Fp8Weight):
        return {"FP8": "native" if limits().has_fp8 else "bytes", "BLOCKED": weight.is_blocked, "CODES": None}
    plain = {"FP8": "none", "BLOCKED": False}
    if isinstance(weight, Tensor):
        return {**plain, "CODES": None}
    # A product and a sum that were made at once would be rounded once.
    apart = {} if weight.minimums is None else {"enable_fp_fusion": False}
    return {**plain, "CODES": code_form(weight), **apart}


def operands_of(weight: WeightRows, no_scales: Tensor) -> tuple[Tensor, ...]:
    """What a kernel gets of a weight: numbers or codes, scales, and what else codes have; `no_scales` where there are
    none."""
    if isinstance(weight, QuantizedWeight):
        return code_operands(weight)
    numbers, scales = (weight, no_scales) if isinstance(weight, Tensor) else (weight.numbers, weight.scales)
    return numbers, *(scales for _ in range(NUM_OPERANDS - 1))


@triton.jit
def load_weights(pointers, mask, dtype: tl.constexpr, FP8: tl.constexpr):
    """A tile of weights, zeros where it is masked, in `dtype` if they are in FP8."""
    values = tl.load(pointers, mask=mask, other=0)
    if FP8 == "native":
        values = values.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif FP8 == "bytes":
        values = widen_e4m3(values).to(dtype)
    return values


@triton.jit
def scales_of(scales, row, inputs, BLOCKED: tl.constexpr):
    """Where the scales of the weight's rows begin; `row` is int64 and counted over all experts."""
    return scales + row * (tl.cdiv(inputs, _BLOCK) if BLOCKED else 1)


@triton.jit
def add_product(a, b, total, scales, mask, k, TENSOR_CORES: tl.constexpr, BLOCKED: tl.constexpr):
    """total + a b, where b [DEPTH, COLUMNS] has inputs from k on, all of one block, whose scale is taken here. Where a
    row of the weight has but one, `scaled` takes it at the end. `scales` [COLUMNS]: see `scales_of`."""
    if BLOCKED:
        part = _product(a, b, tl.zeros_like(total), TENSOR_CORES)
        return total + part * tl.load(scales + k // _BLOCK, mask=mask, other=0)[None, :]
    return _product(a, b, total, TENSOR_CORES)


@triton.jit
def _product(a, b, total, TENSOR_CORES: tl.constexpr):
    if TENSOR_CORES:
        return tl.dot(a, b, total)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def block_scales(scales, mask, k, inputs, BLOCKS: tl.constexpr):
    """[..., BLOCKS]: of the blocks from input k on; `scales` and `mask` [..., 1]."""
    block = k // _BLOCK + tl.arange(0, BLOCKS)
    return tl.load(scales + block, mask=mask & (block < tl.cdiv(inputs, _BLOCK)), other=0)


@triton.jit
def partial_sums(products, scales, mask, k, inputs, BLOCKED: tl.constexpr):
    """Products [COLUMNS, DEPTH] from input k on, or their sums over blocks times the blocks' scales [COLUMNS, BLOCKS];
    `scales` and `mask` [COLUMNS]."""
    if BLOCKED:
        COLUMNS: tl.constexpr = products.shape[0]
        BLOCKS: tl.constexpr = products.shape[1] // _BLOCK
        products = tl.sum(tl.reshape(products, (COLUMNS, BLOCKS, _BLOCK)), axis=2)
        products = products * block_scales(scales[:, None], mask[:, None], k, inputs, BLOCKS)
    return products


@triton.jit
def scaled(sums, scales, mask, FP8: tl.constexpr, BLOCKED: tl.constexpr):
    """Sums over all inputs times the one scale of each row, if they have one; `scales` and `mask` as wide as sums'
    last dimension."""
    if FP8 != "none" and not BLOCKED:
        return sums * tl.load(scales, mask=mask, other=0)
    return sums


# -- dense products --------------------------------------------------------------------------------------------------


@kernel
def _many_rows_kernel(
    x, weight, scales, zeros, minimums, factors, minimum_factors, fifths, bias, out,
    num_rows, outputs, num_biases, width, x_stride, out_stride,
    FP8: tl.constexpr, BLOCKED: tl.constexpr, CODES: tl.constexpr, TENSOR_CORES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Programs of the same columns are neighbours, so that the weight comes from memory once. `num_biases`: 0 or, with
    a bias, `outputs`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    is_row, is_column = row < num_rows, column < outputs
    a_pointers = x + (row.to(tl.int64) * x_stride)[:, None] + depth[None, :]
    b_pointers = weight + (column.to(tl.int64) * width)[None, :] + depth[:, None]
    weight_row, more = column.to(tl.int64), (zeros, minimums, factors, minimum_factors, fifths)
    column_scales = scales_of(scales, weight_row, width, BLOCKED)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(0, width, DEPTH):
        inside = depth < width - k
        a = tl.load(a_pointers, mask=is_row[:, None] & inside[None, :], other=0)
        if CODES is None:
            b = load_weights(b_pointers, inside[:, None] & is_column[None, :], a.dtype, FP8)
        else:
            b = tl.trans(
                load_codes(weight, scales, more, column.to(tl.int64), is_column, k, width, DEPTH, a.dtype, CODES)
            )
        total = add_product(a, b, total, column_scales, is_column, k, TENSOR_CORES, BLOCKED)
        a_pointers += DEPTH
        b_pointers += DEPTH
    total = scaled(total, column_scales[None, :], is_column[None, :], FP8, BLOCKED)
    total += tl.load(bias + column, mask=column < num_biases, other=0).to(tl.float32)[None, :]
    places = out + (row.to(tl.int64) * out_stride)[:, None] + column[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@kernel
def _few_rows_kernel(
    x, weight, scales, zeros, minimums, factors, minimum_factors, fifths, bias, out,
    outputs, num_biases, width, x_stride, out_stride,
    FP8: tl.constexpr, BLOCKED: tl.constexpr, CODES: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One row; programs of other rows with the same columns are neighbours."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    is_column = column < outputs
    rows = weight + (column.to(tl.int64) * width)[:, None] + depth[None, :]
    weight_row, more = column.to(tl.int64), (zeros, minimums, factors, minimum_factors, fifths)
    column_scales = scales_of(scales, weight_row, width, BLOCKED)
    PARTS: tl.constexpr = DEPTH // _BLOCK if BLOCKED else DEPTH
    sums = tl.zeros((COLUMNS, PARTS), dtype=tl.float32)
    for k in range(0, width, DEPTH):
        inside = depth < width - k
        values = tl.load(x + row * x_stride + k + depth, mask=inside, other=0)
        if CODES is None:
            weights = load_weights(rows + k, is_column[:, None] & inside[None, :], tl.float32, FP8)
        else:
            weights = load_codes(weight, scales, more, weight_row, is_column, k, width, DEPTH, values.dtype, CODES)
        products = weights.to(tl.float32) * values.to(tl.float32)[None, :]
        sums += partial_sums(products, column_scales, is_column, k, width, BLOCKED)
    total = scaled(tl.sum(sums, axis=1), column_scales, is_column, FP8, BLOCKED)
    total += tl.load(bias + column, mask=column < num_biases, other=0).to(tl.float32)
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), mask=is_column)


@kernel
def _expand_kernel(
    weight, scales, zeros, minimums, factors, minimum_factors, fifths, out, outputs, width,
    CODES: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out [outputs, width]: what codes stand for."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    weight_row, more = column.to(tl.int64), (zeros, minimums, factors, minimum_factors, fifths)
    k = tl.program_id(1) * DEPTH
    depth, is_column = k + tl.arange(0, DEPTH), column < outputs
    values = load_codes(weight, scales, more, weight_row, is_column, k, width, DEPTH, out.dtype.element_ty, CODES)
    places = out + (weight_row * width)[:, None] + depth[None, :]
    tl.store(places, values, mask=is_column[:, None] & (depth < width)[None, :])


def pack_stored(rows: Sequence[WeightRows]) -> tuple[WeightRows, ...] | WeightRows:
    """See `Kernels.pack_stored`. Codes that there are no products with are dequantized, with a warning."""
    packed = tuple(_packed(part) for part in join_rows(rows))
    return packed[0] if len(packed) == 1 else packed


def _packed(part: WeightRows) -> WeightRows:
    if isinstance(part, Tensor):
        return part
    if isinstance(part, Fp8Weight):
        return part.changed(Tensor.contiguous)
    reason = why_no_codes(part)
    if reason is None:
        return part.changed(Tensor.contiguous)
    warn_dequantized(reason)
    return part.dequantize()


def multiply(
    x: Tensor, weight: tuple[WeightRows, ...] | WeightRows, bias: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """x [T, in] times the transpose of a weight from `pack_stored`, [T, out] in x's dtype or, with codes, another."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    if isinstance(weight, Fp8Weight) and takes_scaled_product(x, weight):
        return _scaled_product(x, weight, bias)
    parts = weight if isinstance(weight, tuple) else (weight,)
    out = x.new_empty(x.shape[0], sum(part.shape[0] for part in parts), dtype=dtype or x.dtype)
    end = 0
    for part in parts:
        begin, end = end, end + part.shape[0]
        part_bias = None if bias is None else bias[begin:end]
        if isinstance(part, Tensor) or (isinstance(part, Fp8Weight) and takes_scaled_product(x, part)):
            out[:, begin:end] = multiply(x, part, part_bias)
        else:
            _multiply_into(x, part, part_bias, out[:, begin:end])
    return out


def _multiply_into(x: Tensor, weight: StoredRows, bias: Tensor | None, out: Tensor) -> None:
    if isinstance(weight, QuantizedWeight) and weight.order is not None:
        x = x.index_select(1, weight.order)
    (rows, width), outputs = x.shape, weight.shape[0]
    if not rows:
        return
    if isinstance(weight, QuantizedWeight) and rows >= _EXPANDED_ROWS and out.dtype == x.dtype:
        out.copy_(F.linear(x, _expand(weight, x.dtype), bias))
        return
    operands = x, *operands_of(weight, x), x if bias is None else bias, out
    sizes = outputs, 0 if bias is None else outputs, width, x.stride(0), out.stride(0)
    variant = form_of(weight)
    if rows <= _FEW_ROWS:
        tile, options = _few_rows_tile(width)
        grid = rows, triton.cdiv(outputs, tile["COLUMNS"])
        _few_rows_kernel[grid](*operands, *sizes, **variant, **tile, **options)
        return
    tile, options = _many_rows_tile(rows, outputs, width, x.dtype)
    grid = triton.cdiv(rows, tile["ROWS"]), triton.cdiv(outputs, tile["COLUMNS"])
    variant["TENSOR_CORES"] = takes_tensor_cores(x)
    _many_rows_kernel[grid](*operands, rows, *sizes, **variant, **tile, **options)


def _expand(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """What codes stand for [out, in], columns as they are stored."""
    outputs, width = weight.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.codes.device)
    tile, variant = _expansion_tile(width), form_of(weight)
    apart = {name: value for name, value in variant.items() if name == "enable_fp_fusion"}
    grid = triton.cdiv(outputs, tile["COLUMNS"]), triton.cdiv(width, tile["DEPTH"])
    operands = *code_operands(weight), out, outputs, width
    _expand_kernel[grid](*operands, CODES=variant["CODES"], **tile, num_warps=4, **apart)
    return out


def _expansion_tile(width: int) -> dict[str, int]:
    """4 warps have 4096 numbers."""
    depth = min(512, power_of_2(width, 16))
    return {"COLUMNS": 4096 // depth, "DEPTH": depth}


def _few_rows_tile(width: int) -> tuple[dict[str, int], dict[str, int]]:
    """4 warps have 4 KB of weights at a time."""
    return {"COLUMNS": 4, "DEPTH": min(1024, power_of_2(width, BLOCK))}, {"num_warps": 4}


def _many_rows_tile(rows: int, outputs: int, width: int, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
    """With few rows the bound is the reading of the weights, for which tiles are narrow, so that there are enough of
    them, and deep, so that much is under way. No tile is deeper than a block."""
    rows = power_of_2(rows, 16)
    if dtype != torch.bfloat16:
        tile, warps, stages = (min(rows, 32), 32, 32), 4, 2
    elif rows <= 16:
        tile, warps, stages = (16, 32 if outputs <= 4096 else 64, 128), 4, 4
    elif rows <= 64:
        tile, warps, stages = (64, 64, 128), 4, 3
    else:
        tile, warps, stages = (128, 128, 64), 8, 3
    return dict(zip(("ROWS", "COLUMNS", "DEPTH"), tile, strict=True)), {"num_warps": warps, "num_stages": stages}


# -- products of two in FP8 --------------------------------------------------------------------------------------------


def takes_scaled_product(x: Tensor, weight: Fp8Weight) -> bool:
    """Whether x is brought to FP8, too: where it is bfloat16 and of many rows, a row of the weight has one scale, and
    the GPU has such products and takes these sizes."""
    sizes = x.dtype == torch.bfloat16 and x.shape[0] >= _SCALED_ROWS and all(n % 16 == 0 for n in weight.shape)
    return sizes and not weight.is_blocked and limits().has_fp8


def _scaled_product(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """Each row of x is divided by its largest number over 448 and rounded to FP8, so that it does not depend on others
    and nothing is cut off; both scales are factors of the sums."""
    tiny = torch.finfo(torch.float32).tiny
    scales = x.abs().amax(dim=1, keepdim=True).float().div_(_LARGEST).clamp_(min=tiny)
    product: Tensor = torch._scaled_mm(
        (x / scales).to(torch.float8_e4m3fn),
        weight.numbers.view(torch.float8_e4m3fn).t(),
        scale_a=scales,
        scale_b=weight.scales.t(),
        bias=bias,
        out_dtype=x.dtype,
    )
    return product
