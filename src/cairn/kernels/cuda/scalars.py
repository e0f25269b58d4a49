"""What several kernels share: formulas in float32, the rows of a chunk and the snapshots of a sequence."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch
import triton
import triton.language as tl

Precision = Literal["bf16", "tf32x3", "ieee"]
"""What products inside a chunk are made of: bfloat16 operands; float32 ones as three TF32 products each; float32 ones
without tensor cores, where each sum is a chain of fused multiply-adds in the order of its terms."""

NUM_WARPS: Mapping[Precision, int] = MappingProxyType({"bf16": 4, "tf32x3": 4, "ieee": 16})
"""Of kernels with several products of a chunk: without tensor cores a thread has a number's whole sum in a row."""

LEAST_PART = 64
"""Numbers of a head in a program that multiplies scores by values or inputs, where products are made of bfloat16: of
narrower parts, which no published model has, ptxas 12.8 makes wrong ones (see `assembler`)."""

LEAST_DECAY = tl.constexpr(-30.0)
"""Of a token's logarithm of decay in a chunked scan: what e^-30 leaves is far below float32's last digit, and sums over
a chunk stay so small that differences of two have four digits and more."""


@triton.jit
def softplus(x):
    """log(1 + exp(x)), by its series where adding 1 would lose the small one's digits."""
    small = tl.exp(tl.minimum(x, 20.0))
    series = small * (1.0 - small * (0.5 - small * 0.33333333))
    return tl.where(x > 20.0, x, tl.where(small < 0.01, series, tl.log(1.0 + small)))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Near 0 by Cephes' polynomial, as 1 - 2 / (e^2x + 1) has lost digits there; of 20 it is 1."""
    square = x * x
    value = -5.70498872745e-3 * square + 2.06390887954e-2
    value = value * square - 5.37397155531e-2
    value = value * square + 1.33314422036e-1
    value = value * square - 3.33332819422e-1
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(x, 20.0)) + 1.0)
    return tl.where(square < 0.390625, value * square * x + x, far)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """total + a b in a `Precision`."""
    # Triton reads on after a return.
    if PRECISION == "bf16":
        total = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    else:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision=PRECISION)
    return total


@triton.jit
def wide_product(a, b, PRECISION: tl.constexpr):
    """a b of float32 operands: of their first 11 bits (TF32) where others are made of bfloat16 ones."""
    if PRECISION == "bf16":
        total = tl.dot(a, b, input_precision="tf32")
    else:
        total = tl.dot(a, b, input_precision=PRECISION)
    return total


@triton.jit
def chunk_rows_of(chunk, chunk_seqs, chunk_rows, cu_seqlens):
    """The row of a chunk's first token, and which of its 64 rows are its sequence's."""
    sequence = tl.load(chunk_seqs + chunk)
    first = tl.load(chunk_rows + chunk)
    rows = first + tl.arange(0, 64)
    return first, (rows >= tl.load(cu_seqlens + sequence)) & (rows < tl.load(cu_seqlens + sequence + 1))


@triton.jit
def chunks_before_snapshot(index, first_snapshot, end_of_snapshots, snapshot_offsets, start, num_chunks):
    """The chunks that a sequence's state goes through between the snapshot before `index` and the chunk that snapshot
    `index` is in: the first one, and the end. Behind the last snapshot the end is `num_chunks`. `start`: the position
    of the sequence's first row.

    Where the snapshot before has ended is read again: Triton 3.6 takes a bound that the outer loop carries for 0.
    """
    before = tl.load(snapshot_offsets + index - 1, mask=index > first_snapshot, other=-(start % 64))
    here = tl.load(snapshot_offsets + index, mask=index < end_of_snapshots, other=0)
    stop = tl.where(index < end_of_snapshots, (start % 64 + here) // 64, num_chunks)
    return (start % 64 + before) // 64, stop


def precision_of(dtype: torch.dtype, exact: bool) -> Precision:
    """Of the scans in a model of this dtype; `exact`: see `CudaMetadata`."""
    if dtype == torch.bfloat16:
        return "bf16"
    return "ieee" if exact else "tf32x3"


def stages_that_fit(most: int, stage_bytes: int, other_bytes: int, room: int) -> int:
    """For how many iterations of a loop loads may be under way at once, 1 to `most`, in `room` bytes of shared memory:
    an iteration loads `stage_bytes`, and all else takes `other_bytes`."""
    return min(most, max(1, (room - other_bytes) // stage_bytes))
