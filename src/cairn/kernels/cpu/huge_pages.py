"""Memory for weights in huge pages, where the operating system gives them: Linux, of the process's own asking.

A weight is read from its first byte to its last in every step. With pages of 4 KiB the processor looks one up every 64
lines, in a virtual machine in two tables, and does not read beyond it ahead: docs/benchmarks.md has what that costs.
"""

import math
import mmap
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_REGION = 64 << 20
"""Bytes that are mapped at once, for many weights: what is never written takes no memory."""

_ALIGNMENT = 64


class WeightMemory:
    """Tensors one after the other in regions of huge pages. A region stays for as long as one of its tensors."""

    def __init__(self) -> None:
        self._region: Tensor | None = None
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialized; at the beginning of a cache line."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        if self._region is None or self._used + num_bytes > self._region.numel():
            self._region, self._used = _map_region(max(num_bytes, _REGION)), 0
        tensor = self._region[self._used : self._used + num_bytes].view(dtype).view(shape)
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return tensor


def passing_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialized, for what is read and soon packed: it goes back to the system with the tensor, where the heap would
    keep holes as large as matrices."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_PAGE // 2:
        return torch.empty(shape, dtype=dtype)
    return _map_region(-(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE)[:num_bytes].view(dtype).view(shape)


@cache
def weight_memory() -> WeightMemory:
    """One for the process."""
    return WeightMemory()


def _map_region(num_bytes: int) -> Tensor:
    """uint8, from a huge page's beginning on."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return torch.empty(num_bytes, dtype=torch.uint8)
    region = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them: small pages do as well
        region.madvise(advice)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE_PAGE :]
