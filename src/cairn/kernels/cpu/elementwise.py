"""Gates, activations and the rotation of queries and keys, number by number."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.cpu.compiled import BF16, ELEMENTS, F32, FLOAT, INT, kernel, row_args
from cairn.kernels.cpu.scalars import advance, gelu, load, sigmoid, silu, store, tanh


@kernel(
    {
        (torch.float32, torch.float32): (F32, INT, F32, INT, F32, INT),
        (torch.bfloat16, torch.bfloat16): (BF16, INT, BF16, INT, BF16, INT),
        (torch.bfloat16, torch.float32): (BF16, INT, F32, INT, BF16, INT),
    }
)
def _silu_mul(begin: int, end: int, gate: Any, gate_row: int, x: Any, x_row: int, out: Any, width: int) -> None:
    for i in range(begin, end):
        gates, source, target = advance(gate, i * gate_row), advance(x, i * x_row), advance(out, i * width)
        for j in range(width):
            store(target, j, silu(load(gates, j)) * load(source, j))


def silu_mul(gate: Tensor, x: Tensor) -> Tensor:
    """See `Kernels.silu_mul`."""
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _silu_mul[gate.dtype, x.dtype](
        x.shape[0], x.numel() // 2, *row_args(gate), *row_args(x), out.data_ptr(), x.shape[1]
    )
    return out


@kernel({dtype: (x, INT, x, INT, x, INT) for dtype, x in ELEMENTS.items()})
def _gelu_mul(begin: int, end: int, gate: Any, gate_row: int, x: Any, x_row: int, out: Any, width: int) -> None:
    for i in range(begin, end):
        gates, source, target = advance(gate, i * gate_row), advance(x, i * x_row), advance(out, i * width)
        for j in range(width):
            store(target, j, gelu(load(gates, j)) * load(source, j))


def gelu_mul(gate: Tensor, x: Tensor) -> Tensor:
    """See `Kernels.gelu_mul`."""
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _gelu_mul[gate.dtype](x.shape[0], x.numel() // 2, *row_args(gate), *row_args(x), out.data_ptr(), x.shape[1])
    return out


@kernel({torch.float32: (F32, INT, F32, INT, FLOAT)})
def _softcap(begin: int, end: int, x: Any, row: int, out: Any, width: int, cap: Any) -> None:
    for i in range(begin, end):
        source, target = advance(x, i * row), advance(out, i * width)
        for j in range(width):
            target[j] = tanh(source[j] / cap) * cap


def softcap(x: Tensor, cap: float) -> Tensor:
    """See `Kernels.softcap`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _softcap[x.dtype](x.shape[0], x.numel() // 2, *row_args(x), out.data_ptr(), x.shape[1], cap)
    return out


@kernel({(dtype, dtype): (x, INT, x, INT, INT, x, INT) for dtype, x in ELEMENTS.items()})
def _sigmoid_mul(
    begin: int, end: int, x: Any, x_row: int, gate: Any, gate_row: int, gate_width: int, out: Any, width: int
) -> None:
    for i in range(begin, end):
        gates, source, target = advance(gate, i * gate_row), advance(x, i * x_row), advance(out, i * width)
        if gate_width == width:
            for j in range(width):
                store(target, j, load(source, j) * sigmoid(load(gates, j)))
        else:
            share = sigmoid(load(gates, 0))
            for j in range(width):
                store(target, j, load(source, j) * share)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """See `Kernels.sigmoid_mul`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _sigmoid_mul[x.dtype, gate.dtype](
        x.shape[0], x.numel() // 2, *row_args(x), *row_args(gate), gate.shape[1], out.data_ptr(), x.shape[1],
    )  # fmt: skip
    return out


@kernel({dtype: (x, INT, x, INT) for dtype, x in ELEMENTS.items()})
def _squared_relu(begin: int, end: int, x: Any, row: int, out: Any, width: int) -> None:
    for i in range(begin, end):
        source, target = advance(x, i * row), advance(out, i * width)
        for j in range(width):
            value = load(source, j)
            value = np.float32(0) if value < np.float32(0) else value
            store(target, j, value * value)


def squared_relu(x: Tensor) -> Tensor:
    """See `Kernels.squared_relu`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _squared_relu[x.dtype](x.shape[0], x.numel() // 8, *row_args(x), out.data_ptr(), x.shape[1])
    return out


@kernel({dtype: (x, INT, INT, F32, F32, INT, x, INT, INT, INT) for dtype, x in ELEMENTS.items()})
def _rope(
    begin: int, end: int, x: Any, x_row: int, x_head: int, cos: Any, sin: Any, pairs_row: int, out: Any, heads: int,
    dim: int, pairs: int,
) -> None:  # fmt: skip
    for i in range(begin, end):
        cosines, sines = advance(cos, i * pairs_row), advance(sin, i * pairs_row)
        for head in range(heads):
            source, target = advance(x, i * x_row + head * x_head), advance(out, (i * heads + head) * dim)
            for j in range(pairs):
                first, second = load(source, j), load(source, j + pairs)
                store(target, j, first * cosines[j] - second * sines[j])
                store(target, j + pairs, second * cosines[j] + first * sines[j])
            for j in range(2 * pairs, dim):
                target[j] = source[j]


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `Kernels.rope`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, heads, dim = x.shape
    _rope[x.dtype](
        rows, x.numel() // 4, *row_args(x), x.stride(1), cos.data_ptr(), sin.data_ptr(), cos.stride(0),
        out.data_ptr(), heads, dim, cos.shape[1],
    )  # fmt: skip
    return out
