"""Triton's CUDA driver without CUDA: kernels go all the way through Triton's launch path, on tensors of the host, and
what would be launched is checked and written down. Nothing is computed.

Arguments are bound and specialized (an integer that is 1 becomes a constant, multiples of 16 and aligned pointers are
told to the compiler), and each variant is compiled to machine code for an H100 when it is first asked for, as on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from cairn.kernels.cuda.device import H100
from cairn.kernels.staging import Staging

__all__ = ["Launch", "RefusedLaunch", "launches_recorded"]

_MOST_THREADS = 1024
"""Of a program."""

_MOST_PROGRAMS = (2**31 - 1, 65_535, 65_535)
"""Along each axis of a grid."""


class RefusedLaunch(AssertionError):
    """CUDA, or Triton's launcher in C, would not take these arguments, or would take them for others."""


@dataclass(frozen=True)
class Launch:
    """`kernel`: its name, behind its module's. `variant`: names what was compiled, and `told` says of which arguments:
    types, and values of constants."""

    kernel: str
    variant: str
    grid: tuple[int, int, int]
    told: str


class _Driver:
    """As much of `triton.backends.nvidia.driver.CudaDriver` as a launch asks for."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.utils = SimpleNamespace(
            load_binary=lambda name, kernel, shared, device: (None, None, 0, 0, _MOST_THREADS),
            get_device_properties=lambda device: {"max_shared_mem": H100.shared_memory},
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Made once a variant, after Triton has compared shared memory and threads with the GPU's."""
        name = f"{source.fn.__module__.rpartition('.')[2]}.{source.fn.__name__}"
        types = list(source.signature.items())
        constants = {source.fn.arg_names[place[0]]: value for place, value in source.constants.items()}
        aligned = [source.fn.arg_names[place[0]] for place, found in source.attrs.items() if found]
        told = f"{name}({dict(types)}, {constants}, multiples of 16: {aligned})"

        def launch(x: Any, y: Any, z: Any, stream: Any, function: Any, *more: Any) -> None:
            arguments = more[4:]  # behind what is packed for the launcher in C
            _check_grid(name, (x, y, z))
            if metadata.global_scratch_size or metadata.profile_scratch_size:
                raise RefusedLaunch(f"{name}: nobody has told Triton where memory for its programs comes from")
            for (argument, kind), value in zip(types, arguments, strict=True):
                if kind != "constexpr":
                    _check_argument(f"{name}: {argument}", kind, value)
            self.launches.append(Launch(name, metadata.hash, (x, y, z), told))

        return launch


def _check_grid(name: str, grid: tuple[Any, ...]) -> None:
    programs = 1
    for axis, most in zip(grid, _MOST_PROGRAMS, strict=True):
        if type(axis) is not int or not 0 <= axis <= most:
            raise RefusedLaunch(f"{name}: a grid of {grid} programs")
        programs *= axis
    if programs >= 2**31:
        # A C int: what is negative, or nothing, is not launched.
        raise RefusedLaunch(f"{name}: {programs} programs are more than Triton's launcher can count")


def _check_argument(name: str, kind: str, value: Any) -> None:
    if kind.startswith("*"):
        _check_pointer(name, value)
    elif kind[0] in "iu":
        bits = int(kind[1:])
        low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if kind[0] == "i" else (0, 1 << bits)
        if not isinstance(value, int) or not low <= value < high:
            raise RefusedLaunch(f"{name}: {value!r} as {kind}")
    elif not isinstance(value, float):
        raise RefusedLaunch(f"{name}: {value!r} as {kind}")


def _check_pointer(name: str, value: Any) -> None:
    """Within memory that is there; of nothing, a pointer may be null."""
    if not isinstance(value, Tensor):
        raise RefusedLaunch(f"{name}: {type(value).__name__} as a pointer")
    storage, address = value.untyped_storage(), value.data_ptr()
    end = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    if value.numel() and not 0 < storage.data_ptr() <= address <= address + end * value.itemsize <= (
        storage.data_ptr() + storage.nbytes()
    ):
        raise RefusedLaunch(f"{name}: {list(value.shape)} numbers reach beyond their memory")
    if address % value.itemsize:
        raise RefusedLaunch(f"{name}: numbers of {value.itemsize} bytes at {address}")


_DRIVER = _Driver()
"""What was compiled once keeps its launcher for as long as the process lives."""


@contextmanager
def launches_recorded() -> Iterator[list[Launch]]:
    """Triton's driver is this one meanwhile; what it is asked to launch. Arrays of the host are copied before they are
    read, to where a device would have them. What torch allocates without saying what is in it are zeros: results that
    were not computed are then no place out of range, as a token or a page may not be."""
    before, _DRIVER.launches = driver._active, []
    driver.set_active(_DRIVER)
    try:
        with patch.object(Staging, "send", _send), _Zeros():
            yield _DRIVER.launches
    finally:
        driver._active = before


def _send(staging: Staging, device: torch.device) -> None:
    """As to a device that is not the host."""
    staged_arrays, staging._staged = staging._staged, []
    if staged_arrays:
        staging._copy(staged_arrays, device)
    staging._end = 0


class _Zeros(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            func = torch.zeros
        return func(*args, **(kwargs or {}))
