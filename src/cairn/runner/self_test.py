"""Does this machine's BLAS give a row the same bits wherever it stands in a GEMM of fixed shape?

Exact mode rests on it, and it is a property of the library, the processor and the number of threads.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from cairn.errors import ConfigError
from cairn.kernels.contract import ROW_TILE, TILE
from cairn.layers.linear import Linear


def check_row_independence(linears: Iterable[Linear], seed: int = 0) -> int:
    """Runs every weight shape once per tile height; returns how many shapes there were.

    Raises ConfigError that names the shape whose rows depend on their place or on their neighbours.
    """
    by_shape = {(linear.weight.shape, linear.bias is None): linear for linear in linears}
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        for linear in by_shape.values():
            for rows in (ROW_TILE, TILE):
                x = torch.randn(rows, linear.weight.shape[1], generator=generator)
                noise = torch.randn(rows, linear.weight.shape[1], generator=generator)
                if not _independent(linear, x.to(linear.weight.dtype), noise.to(linear.weight.dtype)):
                    outputs, inputs = linear.weight.shape
                    raise ConfigError(
                        f"--exact: products with a weight of shape [{outputs}, {inputs}] in tiles of {rows} rows give "
                        f"other bits at another place in the batch on this machine with {torch.get_num_threads()} "
                        "threads; run without --exact, or with OMP_NUM_THREADS=1 if there are more"
                    )
    return len(by_shape)


def _independent(linear: Linear, x: Tensor, noise: Tensor) -> bool:
    rows = x.shape[0]
    alone = linear(x, [slice(0, rows)])
    for shift in (1, rows // 2, rows - 1):
        # The second tile of a larger batch, its rows rotated, every other one replaced.
        moved = x.roll(shift, 0)
        moved[::2] = noise[::2]
        both = linear(torch.cat([noise, moved]), [slice(0, rows), slice(rows, 2 * rows)])
        if not torch.equal(both[rows + 1 :: 2], alone.roll(shift, 0)[1::2]):
            return False
    return True
