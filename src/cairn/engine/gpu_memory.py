"""The memory of one GPU: what is free, what has been taken, and what is counted before it is."""

import gc
import logging
from typing import Protocol

import torch

from cairn.cache.layout import CacheLayout
from cairn.kernels.cuda_support import sampling_bytes
from cairn.layers.memory import MemorySpec
from cairn.layers.model import logits_room
from cairn.runner.input_batch import TABLE_ENTRY_BYTES
from cairn.runner.runner import pages_of_table, slot_bytes

logger = logging.getLogger(__name__)

STEPS_IN_FLIGHT = 2


class DeviceMemory(Protocol):
    """The memory of one GPU, in bytes."""

    def free_and_total(self) -> tuple[int, int]:
        """What nobody has taken, and all there is."""
        ...

    def start_peak(self) -> None:
        """Forget the peak so far."""
        ...

    def peak_growth(self) -> int:
        """The most that this process had taken since `start_peak`, beyond what it had then."""
        ...


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


def count_slot(
    spec: MemorySpec, layout: CacheLayout, most_pages: int, max_model_len: int, *, on_gpu: bool = False
) -> int:
    """Bytes that a running request takes besides pages, and the slot of rows that are nobody's likewise: states, block
    tables and tokens. On a GPU also room for its block tables in the copies of all steps in flight, whose buffers are
    as large as the next power of two. `most_pages`: of the pool."""
    own = slot_bytes(spec, layout, most_pages, max_model_len)
    if not on_gpu:
        return own
    entries = len(layout.groups) * pages_of_table(layout, most_pages, max_model_len)
    return own + STEPS_IN_FLIGHT * 2 * TABLE_ENTRY_BYTES * entries


def count_logits(num_seqs: int, vocab_size: int, num_ranks: int) -> int:
    """Bytes that drawing a token for each of so many sequences takes with the CUDA backend; see `logits_room`."""
    return logits_room(num_seqs, vocab_size, num_ranks, sampling_bytes(num_seqs, vocab_size, num_seqs))


def guess_process_bytes(num_ranks: int) -> int:
    """What CUDA's context, the libraries and their workspaces take of each GPU before anything is loaded, and among
    several ranks NCCL's buffers. A server finds them taken; these are guesses, not measured."""
    return (768 << 20) + (512 << 20 if num_ranks > 1 else 0)


def guess_graph_bytes(num_layers: int, num_sizes: int) -> int:
    """What CUDA graphs of so many sizes take, each of all layers, where there is no GPU to capture any on. A guess, not
    measured."""
    return num_sizes * num_layers * (128 << 10)


def report_free(memory: DeviceMemory, step_bytes: int) -> None:
    """Log what is left when everything has been allocated, with a warning where it is less than a step takes."""
    free, total = memory.free_and_total()
    message = f"{free} of the GPU's {total} bytes are free beside all that is kept; the largest step takes {step_bytes}"
    if free < step_bytes:
        logger.warning("%s: lower --gpu-memory-utilization, or requests may end with the GPU out of memory", message)
    else:
        logger.info("%s", message)
