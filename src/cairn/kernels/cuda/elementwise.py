"""Activations, gates and rotations (RoPE, arXiv 2104.09864): tiles of some rows and columns, computed in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.cuda.device import kernel, power_of_2
from cairn.kernels.cuda.scalars import tanh

_TILE = 1024
"""Numbers of a program: 8 for each thread of 4 warps, 16 bytes of bfloat16."""


@kernel
def _activation_kernel(
    x, y, out, num_rows, width, x_stride, y_stride, FUNCTION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """out [num_rows, width] of x and y, after `FUNCTION`; `sigmoid_of_one`: y has one number a row."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    value = tl.load(x + (rows * x_stride)[:, None] + columns[None, :], mask=inside, other=0).to(tl.float32)
    if FUNCTION == "squared_relu":
        # The comparison, and not a maximum, lets a NaN through.
        result = tl.where(value < 0, 0.0, value * value)
    elif FUNCTION == "sigmoid_of_one":
        gate = tl.load(y + rows * y_stride, mask=rows < num_rows, other=0).to(tl.float32)
        result = value * tl.sigmoid(gate)[:, None]
    else:
        other = tl.load(y + (rows * y_stride)[:, None] + columns[None, :], mask=inside, other=0).to(tl.float32)
        if FUNCTION == "silu":
            result = value * tl.sigmoid(value) * other
        elif FUNCTION == "gelu":
            # (1 + tanh(v)) / 2 is sigmoid(2 v), here with 2 sqrt(2 / pi); of -80 it is nothing.
            inner = 1.5957691216 * (value + 0.044715 * value * value * value)
            result = value * tl.sigmoid(tl.maximum(inner, -80.0)) * other
        else:
            result = value * tl.sigmoid(other)
    tl.store(out + (rows * width)[:, None] + columns[None, :], result.to(out.dtype.element_ty), mask=inside)


@kernel
def _softcap_kernel(x, out, num_rows, width, x_stride, cap, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out [num_rows, width]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    value = tl.load(x + (rows * x_stride)[:, None] + columns[None, :], mask=inside, other=0)
    tl.store(out + (rows * width)[:, None] + columns[None, :], tanh(value / cap) * cap, mask=inside)


@kernel
def _rope_kernel(
    x, cos, sin, out, num_rows, heads, pairs, width,
    x_stride, x_head_stride, cos_stride, sin_stride,
    HAS_REST: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """out [num_rows, width]; row r is head r % heads of token r // heads. REST: columns after the pairs, padded."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tokens = rows // heads
    source = x + (tokens * x_stride + (rows % heads) * x_head_stride)[:, None]
    target = out + (rows * width)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = (rows < num_rows)[:, None] & (pair < pairs)
    first = tl.load(source + pair, mask=inside, other=0).to(tl.float32)
    second = tl.load(source + pairs + pair, mask=inside, other=0).to(tl.float32)
    c = tl.load(cos + (tokens * cos_stride)[:, None] + pair, mask=inside, other=0)
    s = tl.load(sin + (tokens * sin_stride)[:, None] + pair, mask=inside, other=0)
    tl.store(target + pair, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + pairs + pair, (second * c + first * s).to(out.dtype.element_ty), mask=inside)
    if HAS_REST:
        column = 2 * pairs + tl.arange(0, REST)[None, :]
        inside = (rows < num_rows)[:, None] & (column < width)
        tl.store(target + column, tl.load(source + column, mask=inside, other=0), mask=inside)


def _tile(width: int) -> dict[str, int]:
    columns = min(power_of_2(width), _TILE)
    return {"ROWS": _TILE // columns, "COLUMNS": columns}


def _rope_tile(pairs: int, width: int) -> dict[str, int | bool]:
    rest = power_of_2(max(1, width - 2 * pairs))
    padded = power_of_2(pairs)
    return {
        "HAS_REST": width > 2 * pairs,
        "ROWS": max(1, 2 * _TILE // power_of_2(width)),
        "PAIRS": padded,
        "REST": rest,
    }


def silu_mul(gate: Tensor, x: Tensor) -> Tensor:
    """See `Kernels.silu_mul`."""
    return _activation("silu", gate, x)


def gelu_mul(gate: Tensor, x: Tensor) -> Tensor:
    """See `Kernels.gelu_mul`."""
    return _activation("gelu", gate, x)


def softcap(x: Tensor, cap: float) -> Tensor:
    """See `Kernels.softcap`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        tile = _tile(x.shape[1])
        grid = (triton.cdiv(x.shape[0], tile["ROWS"]), triton.cdiv(x.shape[1], tile["COLUMNS"]))
        _softcap_kernel[grid](x, out, *x.shape, x.stride(0), cap, **tile, num_warps=4)
    return out


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """See `Kernels.sigmoid_mul`."""
    return _activation("sigmoid_of_one" if gate.shape[1] == 1 else "sigmoid", x, gate)


def squared_relu(x: Tensor) -> Tensor:
    """See `Kernels.squared_relu`."""
    return _activation("squared_relu", x, x)


def _activation(function: str, x: Tensor, y: Tensor) -> Tensor:
    """[T, width] in x's dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    rows, width = x.shape
    tile = _tile(width)
    grid = (triton.cdiv(rows, tile["ROWS"]), triton.cdiv(width, tile["COLUMNS"]))
    _activation_kernel[grid](x, y, out, rows, width, x.stride(0), y.stride(0), FUNCTION=function, **tile, num_warps=4)
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `Kernels.rope`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    tokens, heads, width = x.shape
    pairs = cos.shape[1]
    tile = _rope_tile(pairs, width)
    strides = (x.stride(0), x.stride(1), cos.stride(0), sin.stride(0))
    _rope_kernel[(triton.cdiv(tokens * heads, tile["ROWS"]),)](
        x, cos, sin, out, tokens * heads, heads, pairs, width, *strides, **tile, num_warps=4
    )
    return out
