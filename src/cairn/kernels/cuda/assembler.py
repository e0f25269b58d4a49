"""Which ptxas makes machine code of what Triton compiles.

ptxas 12.8, which Triton 3.6 has for GPUs before Blackwell, makes wrong products on Hopper's tensor cores of some tiles:
where descriptors of shared memory are worked out in uniform registers, their two halves come from registers that hold
something else. Seen on an H200 with the gated delta rule's chunks of value heads of 1 to 32 numbers: NaN, numbers that
are wrong in the first digit, or an illegal memory access; and on an H100 with Mamba2's of heads of up to 16. Others
have found the same, also in 13.0, and 13.1 right (github.com/fla-org/flash-linear-attention/pull/1262). Some builds of
Triton have 13.1 or newer for Blackwell, which makes code for the other GPUs as well. No version is known to be right
for all kernels: a server tries out what it has at its start (`cairn.engine.kernel_check`).
"""

import ctypes
import os
import re
from typing import Any

import torch

FIRST_RIGHT = (13, 1)

_CUDA_13 = 13_000
"""A driver of CUDA 13 (580 or newer) runs what any ptxas 13 makes, an older one does not."""


def choose_ptxas(nvidia: Any, driver: int | None) -> None:
    """Has Triton, whose `knobs.nvidia` it is, call its newer ptxas where the one it would call is too old. `driver`: of
    CUDA, as 13000; None where there is no GPU, and kernels are compiled for one with a new driver. What
    TRITON_PTXAS_PATH names stays."""
    if os.environ.get("TRITON_PTXAS_PATH") or _version(nvidia.ptxas) >= FIRST_RIGHT:
        return
    if driver is None or driver >= _CUDA_13:
        try:
            newer = nvidia.ptxas_blackwell
        except RuntimeError:  # this Triton has none
            return
        if _version(newer) >= FIRST_RIGHT:
            nvidia.ptxas = newer.path


def driver_version() -> int | None:
    """Of the CUDA that the driver has, as 13000, or 0 if it does not say; None where torch knows no GPU."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    version = ctypes.c_int(0)
    try:
        # cuda.h: needs no context, and begins nothing
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def _version(tool: Any) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", tool.version)[:2]))
