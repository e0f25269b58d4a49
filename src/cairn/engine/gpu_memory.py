"""The memory of one GPU: what is free, and what has been taken."""

from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """The memory of one GPU, in bytes."""

    def free_and_total(self) -> tuple[int, int]:
        """What nobody has taken, and all there is."""
        ...

    def start_peak(self) -> None:
        """Forget the peak so far."""
        ...

    def peak_growth(self) -> int:
        """The most that this process had allocated since `start_peak`, beyond what it had then."""
        ...


class CudaMemory:
    """As CUDA's driver and torch's allocator tell it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = 0

    def free_and_total(self) -> tuple[int, int]:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(free), int(total)

    def start_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._start = int(torch.cuda.memory_allocated(self._device))

    def peak_growth(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device)) - self._start


def taken_bytes(memory: DeviceMemory) -> int:
    """What this process and others have taken."""
    free, total = memory.free_and_total()
    return total - free
