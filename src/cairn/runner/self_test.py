"""Does this machine's BLAS give a row the same bits wherever it stands in a product of fixed shape?

Exact mode rests on it, and it is a property of the library, the processor and the number of threads.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from cairn.errors import ConfigError
from cairn.kernels.batch import Batch, HostBatch
from cairn.kernels.contract import Kernels
from cairn.layers.linear import Linear

_SHIFTS = (1, 7, 8, 15, 31, 63, 64, 65)
"""Rows by which a row is moved in the batch: within a tile, and into the next one."""


def check_row_independence(kernels: Kernels, linears: Iterable[Linear], seed: int = 0) -> int:
    """Runs every weight shape once as decode and once as prefill rows; returns how many shapes there were.

    Raises ConfigError that names the shape whose rows depend on their place or on their neighbours.
    """
    by_shape = {(linear.shape, linear.bias is None): linear for linear in linears}
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        for linear in by_shape.values():
            outputs, inputs = linear.shape
            dtype = torch.float32
            x = torch.randn(64, inputs, generator=generator, dtype=dtype)
            noise = torch.randn(192, inputs, generator=generator, dtype=dtype)
            for kind in ("decode", "prefill"):
                if not _independent(kernels, linear, x, noise, kind == "decode"):
                    raise ConfigError(
                        f"--exact: products of {kind} rows with a weight of shape [{outputs}, {inputs}] give other "
                        f"bits at another place in the batch on this machine with {torch.get_num_threads()} threads; "
                        "run without --exact, or with OMP_NUM_THREADS=1 if there are more"
                    )
    return len(by_shape)


def _independent(kernels: Kernels, linear: Linear, x: Tensor, noise: Tensor, decode: bool) -> bool:
    alone = linear(x, _batch(kernels, len(x), decode))
    for shift in _SHIFTS:
        # Later in a larger batch, among other rows, every other one replaced.
        moved = torch.cat([noise[:shift], x, noise[shift:]])
        moved[shift : shift + len(x) : 2] = noise[: len(x) : 2]
        both = linear(moved, _batch(kernels, len(moved), decode))
        if not torch.equal(both[shift + 1 : shift + len(x) : 2], alone[1::2]):
            return False
    return True


def _batch(kernels: Kernels, num_rows: int, decode: bool) -> Batch:
    """Rows of as many sequences in decode, or of one in prefill."""
    ends = np.arange(num_rows + 1, dtype=np.int32) if decode else np.array([0, num_rows], np.int32)
    none, zeros = np.zeros(0, np.int32), np.zeros(len(ends) - 1, np.int32)
    host = HostBatch(num_rows if decode else 0, ends, zeros, zeros, np.diff(ends), zeros, none, none)
    empty = torch.zeros(0, dtype=torch.int32)
    return Batch(empty, empty, empty, empty, empty, empty, empty, (), host, kernels.prepare(host))
