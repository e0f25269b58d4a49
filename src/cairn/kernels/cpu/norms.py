"""Norms of rows and of heads: two passes over numbers that are in the cache, computed in float32, rounded once."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.cpu.compiled import BF16, ELEMENTS, F32, FLOAT, INT, jit, kernel, row_args
from cairn.kernels.cpu.scalars import ONE, advance, load, product, silu, store
from cairn.kernels.cpu.vectors import LINE, prefetch_near

_DTYPES: Mapping[tuple[torch.dtype, torch.dtype], tuple[Any, Any]] = {
    (torch.float32, torch.float32): (F32, F32),
    (torch.bfloat16, torch.bfloat16): (BF16, BF16),
    (torch.bfloat16, torch.float32): (BF16, F32),
}
"""Of what is normed, or of its gate, and of the weight."""


_NARROW_OF_LINE, _WIDE_OF_LINE = LINE // 2, LINE // 4
"""Numbers of a cache line."""

_HEADS_AHEAD = 8
"""Heads between the one that is normed and the one that is asked for: short runs, and far apart."""


@jit
def _ask_for_head(x: Any, row: int, head: int, heads: int, item: int, numbers_of_line: int, count: int) -> None:
    """The numbers of head `_HEADS_AHEAD` after `item`, into the first cache; beyond the last head it costs nothing."""
    source = advance(x, (item + _HEADS_AHEAD) // heads * row + (item + _HEADS_AHEAD) % heads * head)
    for j in range(0, count, numbers_of_line):
        prefetch_near(advance(source, j))


@jit
def _inverse_rms(x: Any, width: int, eps: Any) -> Any:
    total = np.float32(0)
    for j in range(width):
        value = load(x, j)
        total += value * value
    return ONE / np.sqrt(total / np.float32(width) + eps)


@kernel({dtypes: (x, INT, INT, INT, weight, x, INT, FLOAT) for dtypes, (x, weight) in _DTYPES.items()})
def _rms_norm(
    begin: int, end: int, x: Any, row: int, head: int, heads: int, weight: Any, out: Any, width: int, eps: Any
) -> None:
    for i in range(begin, end):
        source, target = advance(x, i // heads * row + i % heads * head), advance(out, i * width)
        if heads > 1:
            _ask_for_head(x, row, head, heads, i, _NARROW_OF_LINE, width)
        scale = _inverse_rms(source, width, eps)
        for j in range(width):
            store(target, j, product(load(source, j), scale, load(weight, j)))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.rms_norm`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    *counts, width = x.shape
    heads, head = (1, 0) if x.dim() == 2 else (counts[1], x.stride(1))
    _rms_norm[x.dtype, weight.dtype](
        counts[0] * heads, x.numel() // 8, *row_args(x), head, heads, weight.data_ptr(), out.data_ptr(), width, eps,
    )  # fmt: skip
    return out


@kernel({dtypes: (x, x, INT, weight, x, INT, FLOAT) for dtypes, (x, weight) in _DTYPES.items()})
def _add_rms_norm(
    begin: int, end: int, residual: Any, x: Any, row: int, weight: Any, out: Any, width: int, eps: Any
) -> None:
    for i in range(begin, end):
        total, added, target = advance(residual, i * width), advance(x, i * row), advance(out, i * width)
        for j in range(width):
            store(total, j, load(total, j) + load(added, j))
        scale = _inverse_rms(total, width, eps)
        for j in range(width):
            store(target, j, product(load(total, j), scale, load(weight, j)))


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.add_rms_norm`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _add_rms_norm[residual.dtype, weight.dtype](
        x.shape[0], x.numel() // 4, residual.data_ptr(), *row_args(x), weight.data_ptr(), out.data_ptr(),
        x.shape[1], eps,
    )  # fmt: skip
    return out


@kernel({dtypes: (F32, INT, gate, INT, weight, gate, INT, INT, FLOAT) for dtypes, (gate, weight) in _DTYPES.items()})
def _gated_rms_norm(
    begin: int, end: int, x: Any, x_row: int, gate: Any, gate_row: int, weight: Any, out: Any, groups: int,
    part: int, eps: Any,
) -> None:  # fmt: skip
    gated = np.empty(part, np.float32)
    for i in range(begin, end):
        first = i % groups * part
        source, gates = advance(x, i // groups * x_row + first), advance(gate, i // groups * gate_row + first)
        weights, target = advance(weight, first), advance(out, i * part)
        total = np.float32(0)
        for j in range(part):
            value = source[j] * silu(load(gates, j))
            gated[j] = value
            total += value * value
        scale = ONE / np.sqrt(total / np.float32(part) + eps)
        for j in range(part):
            store(target, j, product(gated[j], scale, load(weights, j)))


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """See `Kernels.gated_rms_norm`."""
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _gated_rms_norm[gate.dtype, weight.dtype](
        x.shape[0] * groups, x.numel() // 2, *row_args(x), *row_args(gate), weight.data_ptr(), out.data_ptr(),
        groups, x.shape[1] // groups, eps,
    )  # fmt: skip
    return out


@kernel({dtype: (F32, INT, INT, gate, INT, F32, gate, INT, INT, FLOAT) for dtype, gate in ELEMENTS.items()})
def _rms_norm_then_gate(
    begin: int, end: int, x: Any, x_row: int, x_head: int, gate: Any, gate_row: int, weight: Any, out: Any,
    heads: int, dim: int, eps: Any,
) -> None:  # fmt: skip
    for i in range(begin, end):
        source = advance(x, i // heads * x_row + i % heads * x_head)
        gates, target = advance(gate, i // heads * gate_row + i % heads * dim), advance(out, i * dim)
        _ask_for_head(x, x_row, x_head, heads, i, _WIDE_OF_LINE, dim)
        _ask_for_head(gate, gate_row, dim, heads, i, _NARROW_OF_LINE, dim)
        scale = _inverse_rms(source, dim, eps)
        for j in range(dim):
            store(target, j, product(source[j], scale, weight[j]) * silu(load(gates, j)))


def rms_norm_then_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.rms_norm_then_gate`."""
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _rms_norm_then_gate[gate.dtype](
        x.shape[0] * x.shape[1], x.numel() // 2, *row_args(x), x.stride(1), *row_args(gate), weight.data_ptr(),
        out.data_ptr(), x.shape[1], x.shape[2], eps,
    )  # fmt: skip
    return out
