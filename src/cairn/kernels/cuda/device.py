"""Where the kernels run, and what they may assume of it."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from cairn.kernels.cuda.assembler import choose_ptxas, driver_version
from cairn.kernels.cuda_support import power_of_2 as power_of_2

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether TRITON_INTERPRET=1 was set before triton was imported: kernels run on the CPU then, one program at a time."""

if not INTERPRETED:
    choose_ptxas(triton.knobs.nvidia, driver_version())


@dataclass(frozen=True, slots=True)
class Limits:
    """What a GPU has: `multiprocessors`, the bytes of shared memory that a program may take, and whether it multiplies
    numbers in FP8, of which Triton knows nothing before capability 8.9."""

    multiprocessors: int
    shared_memory: int
    has_fp8: bool = True


H100 = Limits(132, 232_448)


@cache
def limits() -> Limits:
    """The current GPU's; an H100's where kernels are interpreted or only compiled."""
    if INTERPRETED or not torch.cuda.is_available():
        return H100
    properties = torch.cuda.get_device_properties(device())
    has_fp8 = (properties.major, properties.minor) >= (8, 9)
    return Limits(int(properties.multi_processor_count), int(properties.shared_memory_per_block_optin), has_fp8)  # type: ignore[attr-defined]


def device() -> torch.device:
    """The current GPU; the CPU where kernels are interpreted."""
    return torch.device("cpu") if INTERPRETED else torch.device("cuda", torch.cuda.current_device())


VARYING = (
    "num_rows", "num_pairs", "num_splits", "first_snapshot", "first_row", "end_row", "first_seq",
    "num_edits", "num_listed", "num_top", "table_row", "num_in_place",
)  # fmt: skip
"""Numbers that are others at every step, or were others in the steps before the pool was there: a kernel compiled for
multiples of 16 of them would be compiled anew while requests wait. The tables of a step's copy to the device begin at
multiples of 64 bytes."""

kernel = triton.jit(do_not_specialize=list(VARYING))
"""Decorator of what is launched."""


def takes_tensor_cores(x: Tensor) -> bool:
    """Whether products of a model with x's dtype are made of bfloat16 operands, and not of float32 ones."""
    return x.dtype == torch.bfloat16
