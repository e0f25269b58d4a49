"""What the compiled loops over sequences share: operands as addresses, snapshots, gates, moving blocks of numbers."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.batch import HostBatch
from cairn.kernels.cpu.compiled import jit

ZERO: Any = np.float32(0)
ONE: Any = np.float32(1)


def empty(*shape: int) -> Tensor:
    """A float32 tensor. numpy asks for huge pages: each small page of a large tensor costs its first use a fault, which
    takes longer than what is computed on it."""
    return torch.from_numpy(np.empty(shape, np.float32))


def by_row(x: Tensor) -> Tensor:
    """x itself if each of its rows x[i] is one piece of memory, a copy if not."""
    if x.is_contiguous():
        return x
    step = 1
    for size, stride in zip(x.shape[:0:-1], x.stride()[:0:-1], strict=True):
        if stride != step and size != 1:
            return x.contiguous()
        step *= size
    return x


def check_states(states: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises ValueError unless each slot's state is one piece of memory of this shape and dtype."""
    if states.shape[1:] != shape or states.dtype != dtype or by_row(states) is not states:
        raise ValueError(
            f"states are {states.dtype} {list(states.shape)} with strides {list(states.stride())}, "
            f"wanted are {dtype} [slots, {', '.join(map(str, shape))}], each slot's contiguous"
        )


def snapshot_addresses(host: HostBatch) -> tuple[int, int, int]:
    """Addresses of the snapshots' rows and offsets, and how many there are."""
    count = host.num_snapshots
    return (host.snapshot_rows.ctypes.data, host.snapshot_offsets.ctypes.data, count) if count else (0, 0, 0)


@jit
def first_snapshot(rows: Any, count: int, sequence: int) -> int:
    """Index of the first of `count` snapshots, in the order of the rows, that is of this sequence or a later one."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if rows[middle] < sequence:
            low = middle + 1
        else:
            high = middle
    return low


@jit
def snapshots_until(rows: Any, offsets: Any, first: int, count: int, sequence: int, offset: int) -> int:
    """Index behind those from `first` on that are of this sequence and wanted after at most `offset` of its tokens."""
    while first < count and rows[first] == sequence and offsets[first] <= offset:
        first += 1
    return first


@jit
def softplus(x: float) -> float:
    """log(1 + e^x)."""
    return x if x > np.float32(20) else math.log1p(math.exp(x))


@jit
def copy_block(
    source: Any, source_row: int, rows: int, columns: int, target: Any, target_row: int, all_rows: int, all_columns: int
) -> None:
    """target [all_rows, all_columns] = source [rows, columns], and zeros behind and below it."""
    for i in range(rows):
        for j in range(columns):
            target[i * target_row + j] = source[i * source_row + j]
        for j in range(columns, all_columns):
            target[i * target_row + j] = ZERO
    for i in range(rows, all_rows):
        for j in range(all_columns):
            target[i * target_row + j] = ZERO


@jit
def transpose(source: Any, source_row: int, rows: int, columns: int, target: Any, target_row: int) -> None:
    """target[j, i] = source[i, j] of the source's `rows` and `columns`."""
    for j in range(columns):
        for i in range(rows):
            target[j * target_row + i] = source[i * source_row + j]
