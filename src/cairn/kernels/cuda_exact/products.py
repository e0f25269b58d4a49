"""Products with weights [out, in] in float32, by one kernel of one tile: see the package.

An output is a chain of fused multiply-adds over `in`, in its order, whichever row of whichever tile it is in; then the
bias is added. cuBLAS chooses its algorithm, and with it the order, by the number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.batch import Batch
from cairn.kernels.cuda.device import kernel, power_of_2
from cairn.kernels.cuda_exact.operands import lay_out_rows

_ROWS, _COLUMNS, _DEPTH = 16, 64, 64
"""Of the tile. With more rows a decode of one token would wait for multiplications instead of for its weights."""


@kernel
def _linear_kernel(
    x, weight, bias, out, num_rows, out_width, width, weight_stride,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out [num_rows, out_width] of x [num_rows, width], both contiguous."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, DEPTH)
    is_row, inside = row < num_rows, column < out_width
    x_places = x + (row.to(tl.int64) * width)[:, None] + inner[None, :]
    weight_places = weight + (column.to(tl.int64) * weight_stride)[None, :] + inner[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, width, DEPTH):
        known = inner < width - first
        a = tl.load(x_places, mask=is_row[:, None] & known[None, :], other=0.0)
        b = tl.load(weight_places, mask=known[:, None] & inside[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        x_places += DEPTH
        weight_places += DEPTH
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0)[None, :]
    tl.store(
        out + (row.to(tl.int64) * out_width)[:, None] + column[None, :], total, mask=is_row[:, None] & inside[None, :]
    )


def _tile(out_width: int, width: int) -> tuple[dict[str, int], dict[str, int]]:
    """By the weight's shape alone."""
    extents = {"COLUMNS": min(_COLUMNS, power_of_2(out_width, 16)), "DEPTH": min(_DEPTH, power_of_2(width, 16))}
    return {"ROWS": _ROWS, **extents}, {"num_warps": 4, "num_stages": 3}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, batch: Batch) -> Tensor:
    """See `Kernels.linear`."""
    return _multiply(x, weight, bias)


def lm_head(hidden: Tensor, weight: Tensor) -> Tensor:
    """See `Kernels.lm_head`."""
    return _multiply(hidden, weight, None)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x = lay_out_rows(x)
    (rows, width), out_width = x.shape, weight.shape[0]
    out = torch.empty((rows, out_width), dtype=torch.float32, device=x.device)
    if rows:
        tile, options = _tile(out_width, width)
        _linear_kernel[(triton.cdiv(out_width, tile["COLUMNS"]), triton.cdiv(rows, tile["ROWS"]))](
            *(x, weight, weight if bias is None else bias, out, rows, out_width, width, weight.stride(0)),
            HAS_BIAS=bias is not None,
            **tile,
            **options,
        )
    return out


_HEIGHTS = (1, _ROWS, 2 * _ROWS + 1)


def find_dependent_height(weight: Tensor, bias: Tensor | None, generator: torch.Generator) -> int | None:
    """See `ExactKernels.find_dependent_height`. A few heights are tried; the host waits for the GPU."""
    most = _HEIGHTS[-1]
    x = torch.randn(most, weight.shape[1], generator=generator).to(weight)
    wanted = _multiply(x, weight, bias)
    for height in _HEIGHTS:
        # Rows from the other end, each at another place than before.
        if not torch.equal(_multiply(x.flip(0)[:height], weight, bias), wanted.flip(0)[:height]):
            return height
    return None
