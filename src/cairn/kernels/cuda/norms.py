"""Root mean square norms (arXiv 1910.07467): a program has some rows as a whole in its registers and rounds once.

A "row" here is what one mean is taken over: a token's numbers, or those of one head or group of it, a `part`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.cuda.device import kernel, power_of_2

_TILE = 2048
"""Numbers that a program takes at least, as far as there are rows: 16 for each thread of 4 warps."""


@kernel
def _rms_norm_kernel(
    x, weight, out, num_rows, parts, width, x_stride, x_part_stride, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """out [num_rows, width]; row r is part r % parts of token r // parts."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    places = (rows // parts) * x_stride + (rows % parts) * x_part_stride
    values = tl.load(x + places[:, None] + columns[None, :], mask=inside, other=0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(values * values, axis=1) / width + eps)
    weights = tl.load(weight + columns, mask=columns < width, other=0).to(tl.float32)
    normed = values * scale[:, None] * weights[None, :]
    tl.store(out + (rows * width)[:, None] + columns[None, :], normed.to(out.dtype.element_ty), mask=inside)


@kernel
def _add_rms_norm_kernel(
    residual, x, weight, out, num_rows, width, x_stride, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """residual and out [num_rows, width] contiguous."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    places = (rows * width)[:, None] + columns[None, :]
    values = tl.load(residual + places, mask=inside, other=0).to(tl.float32)
    values += tl.load(x + (rows * x_stride)[:, None] + columns[None, :], mask=inside, other=0).to(tl.float32)
    # What the next layers see is the rounded sum, so that is what the norm is taken of.
    rounded = values.to(residual.dtype.element_ty)
    tl.store(residual + places, rounded, mask=inside)
    values = rounded.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(values * values, axis=1) / width + eps)
    weights = tl.load(weight + columns, mask=columns < width, other=0).to(tl.float32)
    normed = values * scale[:, None] * weights[None, :]
    tl.store(out + places, normed.to(out.dtype.element_ty), mask=inside)


@kernel
def _gated_norm_kernel(
    x, gate, weight, out, num_rows, parts, width,
    x_stride, x_part_stride, gate_stride, weight_stride,
    eps,
    GATE_FIRST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """As `_rms_norm_kernel`, times silu(gate) before the norm or after it; each part has its own weight, or all have
    the same (`weight_stride` 0)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    tokens, part = rows // parts, rows % parts
    places = (tokens * x_stride + part * x_part_stride)[:, None] + columns[None, :]
    gate_places = (tokens * gate_stride + part * width)[:, None] + columns[None, :]
    values = tl.load(x + places, mask=inside, other=0).to(tl.float32)
    gates = tl.load(gate + gate_places, mask=inside, other=0).to(tl.float32)
    gates *= tl.sigmoid(gates)
    if GATE_FIRST:
        values *= gates
    scale = 1 / tl.sqrt(tl.sum(values * values, axis=1) / width + eps)
    weight_places = (part * weight_stride)[:, None] + columns[None, :]
    weights = tl.load(weight + weight_places, mask=inside, other=0).to(tl.float32)
    normed = values * scale[:, None] * weights
    if not GATE_FIRST:
        normed *= gates
    tl.store(out + (rows * width)[:, None] + columns[None, :], normed.to(out.dtype.element_ty), mask=inside)


def _tile(width: int) -> tuple[dict[str, int], dict[str, int]]:
    """The block's extents, and how it is launched."""
    padded = power_of_2(width)
    rows = max(1, _TILE // padded)
    return {"ROWS": rows, "WIDTH": padded}, {"num_warps": min(16, max(4, rows * padded // 1024))}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    heads = x if x.dim() == 3 else x.unsqueeze(1)
    parts, width = heads.shape[1:]
    rows = heads.shape[0] * parts
    tile, options = _tile(width)
    _rms_norm_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
        x, weight, out, rows, parts, width, heads.stride(0), heads.stride(1), eps, **tile, **options
    )
    return out


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.add_rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    rows, width = x.shape
    tile, options = _tile(width)
    _add_rms_norm_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
        residual, x, weight, out, rows, width, x.stride(0), eps, **tile, **options
    )
    return out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """See `Kernels.gated_rms_norm`."""
    width = x.shape[1] // groups
    return _gated_norm(x.view(x.shape[0], groups, width), gate, weight, width, eps, gate_first=True)


def rms_norm_then_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.rms_norm_then_gate`."""
    return _gated_norm(x, gate, weight, 0, eps, gate_first=False)


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, weight_stride: int, eps: float, *, gate_first: bool) -> Tensor:
    """x [T, parts, width] -> [T, parts * width]."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not out.numel():
        return out
    parts, width = x.shape[1:]
    rows = x.shape[0] * parts
    tile, options = _tile(width)
    strides = (x.stride(0), x.stride(1), gate.stride(0), weight_stride)
    _gated_norm_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
        x, gate, weight, out, rows, parts, width, *strides, eps, GATE_FIRST=gate_first, **tile, **options
    )
    return out
