"""Weights that are multiplied with as they come, without a form of the backend's own."""

from collections.abc import Sequence, Set

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.contract import Weight
from cairn.kernels.weight_rows import WeightRows, dequantize_rows


def pack(weight: Weight) -> Weight:
    """See `Kernels.pack`, and `Kernels.pack_int4`."""
    return weight


def pack_stored(rows: Sequence[WeightRows]) -> Weight:
    """See `Kernels.pack_stored`."""
    return dequantize_rows(rows)


def packed_dtype(dtype: torch.dtype) -> torch.dtype:
    """See `Kernels.packed_dtype`. It stays."""
    return dtype


def lays_out(dtype: torch.dtype) -> bool:
    """See `Kernels.lays_out`. They stay where they are."""
    return False


def warm_up(
    dtype: torch.dtype | None = None, operations: Set[str] | None = None, state_dtype: torch.dtype = torch.float32
) -> int:
    """See `Kernels.warm_up`. Nothing is compiled."""
    return 0


def begin_step(num_rows: int) -> None:
    """See `Kernels.begin_step`. Nothing depends on it."""


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """See `Kernels.embed`."""
    return F.embedding(tokens, weight)
