"""The memory of one GPU: what is free, and what has been taken."""

import gc
import logging
from typing import Protocol

import torch

logger = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """The memory of one GPU, in bytes."""

    def free_and_total(self) -> tuple[int, int]:
        """What nobody has taken, and all there is."""

    def start_peak(self) -> None:
        """Forget the peak so far."""

    def peak_growth(self) -> int:
        """The most that this process had taken since `start_peak`, beyond what it had then."""


class CudaMemory:
    """As CUDA's driver and torch's allocator tell it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated = self._reserved = 0

    def free_and_total(self) -> tuple[int, int]:
        self._give_back()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(free), int(total)

    def start_peak(self) -> None:
        self._give_back()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._allocated = int(torch.cuda.memory_allocated(self._device))
        self._reserved = int(torch.cuda.memory_reserved(self._device))

    def peak_growth(self) -> int:
        allocated = int(torch.cuda.max_memory_allocated(self._device)) - self._allocated
        # The allocator takes more of the driver than it gives out, in pieces of up to 20 MiB.
        return max(allocated, int(torch.cuda.max_memory_reserved(self._device)) - self._reserved)

    @staticmethod
    def _give_back() -> None:
        """What nobody refers to any more, also from a cycle, goes back to the driver."""
        gc.collect()
        torch.cuda.empty_cache()


def taken_bytes(memory: DeviceMemory) -> int:
    """What this process and others have taken."""
    free, total = memory.free_and_total()
    return total - free


def report_free(memory: DeviceMemory, step_bytes: int) -> None:
    """Log what is left when everything has been allocated, with a warning where it is less than a step takes."""
    free, total = memory.free_and_total()
    message = f"{free} of the GPU's {total} bytes are free beside all that is kept; the largest step takes {step_bytes}"
    if free < step_bytes:
        logger.warning("%s: lower --gpu-memory-utilization, or requests may end with the GPU out of memory", message)
    else:
        logger.info("%s", message)
