"""Loops that weights are brought into another order with while they are read, and memory for what they make."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from cairn.kernels.quantized import QuantizedWeight
from cairn.kernels.weight_rows import WhenThere


@cache
def compiled_loops(name: str) -> Any:
    """The module of the CPU's backend that has them; None where numba, which compiles them, is not installed."""
    return None if find_spec("numba") is None else import_module(f"cairn.kernels.cpu.{name}")


def passing_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized, for a matrix that is soon packed: see `PassingMemory`."""
    memory = compiled_loops("huge_pages") if device.type == "cpu" else None
    if memory is None:
        return torch.empty(shape, dtype=dtype, device=device)
    passing: Tensor = memory.passing_memory().empty(shape, dtype)
    return passing


def kept_copy(numbers: Tensor) -> Tensor:
    """In memory of its own, on the host, where the numbers are at the end of `background_packing`."""
    if (loops := compiled_loops("packing")) is None or not numbers.is_contiguous() or numbers.device.type != "cpu":
        return numbers.clone()
    copy: Tensor = loops.packing().copy(numbers)
    return copy


def read_codes(read: Callable[[], QuantizedWeight]) -> QuantizedWeight:
    """Loops that get its rows ready may be put off, see `Packing.put_off`."""
    if (loops := compiled_loops("packing")) is None:
        return read()
    weight: list[QuantizedWeight] = []
    put_off = loops.packing().put_off(lambda: weight.append(read()))
    return replace(weight[0], put_off=put_off) if put_off else weight[0]


@contextmanager
def background_packing(when_there: WhenThere) -> Iterator[None]:
    """Inside, the CPU's backend lays weights out on threads of its own, see `Packing.in_background`; at the end what is
    kept for the next `passing_tensor` goes back to the system."""
    if (loops := compiled_loops("packing")) is None:
        yield
        return
    try:
        with loops.packing().in_background(when_there):
            yield
    finally:
        compiled_loops("huge_pages").passing_memory().clear()
