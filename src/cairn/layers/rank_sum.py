"""Partial sums of all ranks, added in rank order."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """((parts[0] + parts[1]) + parts[2]) + ..., in float32 or wider, rounded to their dtype once."""
    dtype = parts[0].dtype
    total = parts[0].to(torch.promote_types(dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total.to(dtype)
