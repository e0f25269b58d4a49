"""Memory for weights in huge pages, where the operating system gives them: Linux, of the process's own asking.

A weight is read from its first byte to its last in every step. With pages of 4 KiB the processor looks one up every 64
lines, in a virtual machine in two tables, and does not read beyond it ahead: docs/benchmarks.md has what that costs.
"""

import math
import mmap
import sys
from functools import cache

import torch
from torch import Tensor

from cairn.machine import map_memory

_HUGE_PAGE = 2 << 20
_REGION = 256 << 20
"""Bytes that are mapped at once, for many weights: what is never written takes no memory. To map some waits for threads
that write to new memory meanwhile, and all Python waits with it."""

_ALIGNMENT = 64

_LARGEST_LENT = 64 << 20
"""Bytes of a passing matrix beyond which its memory is not kept for the next one."""

_ALONE = (object(),)
_IDLE = sys.getrefcount(_ALONE[0])
"""References to a region that no tensor is in, which one list has: counted, for Python versions differ."""


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
            self._region, self._used = _aligned(_map_region(max(num_bytes, _REGION))), 0
        tensor = self._region[self._used : self._used + num_bytes].view(dtype).view(shape)
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return tensor


class PassingMemory:
    """Memory for matrices that are read and soon packed: a region that no tensor is in any more is lent again, so that
    the system need not clear its pages once more, and what is written there is still in a cache. The heap would keep
    holes as large as matrices."""

    def __init__(self) -> None:
        self._regions: list[mmap.mmap] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialized."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _HUGE_PAGE // 2:
            return torch.empty(shape, dtype=dtype)
        return self._lend(-(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE)[:num_bytes].view(dtype).view(shape)

    def clear(self) -> None:
        """Gives idle regions back to the system, and others with their tensors."""
        self._regions.clear()

    def _lend(self, num_bytes: int) -> Tensor:
        idle = [number for number in range(len(self._regions)) if sys.getrefcount(self._regions[number]) == _IDLE]
        for number in idle:
            if len(self._regions[number]) >= num_bytes + _HUGE_PAGE:
                return _aligned(self._regions[number])
        if idle:
            del self._regions[idle[0]]
        region = _map_region(num_bytes)
        if num_bytes <= _LARGEST_LENT:
            self._regions.append(region)
        return _aligned(region)


@cache
def weight_memory() -> WeightMemory:
    """One for the process."""
    return WeightMemory()


@cache
def passing_memory() -> PassingMemory:
    """One for the process."""
    return PassingMemory()


def _map_region(num_bytes: int) -> mmap.mmap:
    """So many bytes from a huge page's beginning on."""
    return map_memory(num_bytes + _HUGE_PAGE)


def _aligned(region: mmap.mmap) -> Tensor:
    """uint8, from a huge page's beginning on."""
    whole = torch.frombuffer(region, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE_PAGE :]
