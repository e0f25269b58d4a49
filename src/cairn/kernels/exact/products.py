"""Matrix products in GEMMs of fixed shape.

BLAS picks its code path by the number of rows, so a row's bits depend on how many rows come with it. Inside a GEMM of
fixed shape they depend neither on the row's place nor on its neighbours, which `find_dependent_height` tries out.
Operands are copied into memory of their own, because BLAS may round otherwise where they lie otherwise.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.errors import ConfigError
from cairn.kernels.batch import Batch
from cairn.kernels.contract import Weight
from cairn.kernels.exact.elementwise import widen
from cairn.kernels.exact.metadata import ROW_TILE, TILE
from cairn.kernels.int4 import Int4Weight


def pack_int8(weight: Tensor) -> Weight:
    """See `Kernels.pack_int8`. There are none."""
    raise ConfigError(
        "--quantization int8 needs the CPU's compiled kernels: install numba if it is missing, and leave out --exact; "
        "or leave --quantization out"
    )


def pack_int4(weight: Int4Weight) -> Weight:
    """See `Kernels.pack_int4`. There are none."""
    raise ConfigError(
        "--quantization int4 needs the CPU's compiled kernels: install numba if it is missing, and leave out --exact; "
        "or leave --quantization out"
    )


def linear(x: Tensor, weight: Weight, bias: Tensor | None, batch: Batch) -> Tensor:
    """See `Kernels.linear`. Rows in the one-token form are in tiles of a height of their own, and so
    are prefill rows."""
    if not has_fixed_shapes(x):
        return F.linear(*_in_pairs(x, weight), bias)
    decodes = batch.host.num_decode_tokens
    parts = [multiply_tiles(x[:decodes], weight, bias, ROW_TILE), multiply_tiles(x[decodes:], weight, bias, TILE)]
    parts = [part for part in parts if part.shape[0]]
    return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else x.new_empty(0, weight.shape[0])


def lm_head(hidden: Tensor, weight: Weight) -> Tensor:
    """See `Kernels.lm_head`."""
    if not has_fixed_shapes(hidden):
        return widen(F.linear(*_in_pairs(hidden, weight)))
    return multiply_tiles(hidden, weight, None, ROW_TILE)


def _in_pairs(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both with a column of zeros more where they have an odd number of them. AMX multiplies pairs of bfloat16 numbers,
    and torch 2.13 has it multiply what lies after an odd last one by zero, which may be NaN."""
    return (F.pad(x, (0, 1)), F.pad(weight, (0, 1))) if x.shape[1] % 2 else (x, weight)


def has_fixed_shapes(x: Tensor) -> bool:
    """Whether products of x run in tiles."""
    return x.dtype in (torch.float32, torch.float64)


def multiply_tiles(x: Tensor, weight: Tensor, bias: Tensor | None, height: int) -> Tensor:
    """x [n, in], weight [out, in] -> [n, out] in GEMMs of exactly `height` rows, the last one filled up with zeros."""
    count = x.shape[0]
    padded = -(-count // height) * height
    rows = x.new_empty(padded, x.shape[1])
    rows[:count] = x
    rows[count:] = 0
    out = x.new_empty(padded, weight.shape[0])
    columns = weight.t()
    for begin in range(0, padded, height):
        tile = slice(begin, begin + height)
        if bias is None:
            torch.mm(rows[tile], columns, out=out[tile])
        else:
            torch.addmm(bias, rows[tile], columns, out=out[tile])
    return out[:count]


def find_dependent_height(weight: Tensor, bias: Tensor | None, generator: torch.Generator) -> int | None:
    """The height of the tiles in which a row's bits depend on its place or its neighbours on this machine, for a plain
    weight [out, in]; None where there is none, as it has to be.

    A property of the library, the processor and the number of threads, so it is to be asked where the model runs.
    """
    for height in (ROW_TILE, TILE):
        x, noise = (torch.randn(height, weight.shape[1], generator=generator).to(weight.dtype) for _ in range(2))
        if not _rows_are_independent(x, noise, weight, bias):
            return height
    return None


def _rows_are_independent(x: Tensor, noise: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    height = x.shape[0]
    alone = multiply_tiles(x, weight, bias, height)
    for shift in (1, height // 2, height - 1):
        # The second tile of more rows, its rows rotated, every other one replaced.
        moved = x.roll(shift, 0)
        moved[::2] = noise[::2]
        both = multiply_tiles(torch.cat([noise, moved]), weight, bias, height)
        if not torch.equal(both[height + 1 :: 2], alone.roll(shift, 0)[1::2]):
            return False
    return True
