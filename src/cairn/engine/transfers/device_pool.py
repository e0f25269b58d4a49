"""The pool in a GPU's memory, as transfers see it. Imports torch: for the engine's worker alone.

    link       peers' bytes -> pages     network adapter, CUDA IPC or UCX's own copies
    stream     an event behind them      beside the steps
    steps      read the pages            launched when the host has seen the event

Steps are not made to wait on the device: no step names a page that is fetched before the host has seen the event. What
the link has reported before is ordered by it: bytes that a network adapter has written into a GPU's memory are ordered
by CUDA's calls that submit work or synchronize, and by nothing else (NVIDIA's "GPUDirect RDMA", 2.7).
"""

import torch
from torch import Tensor

from cairn.transfer.links.contract import Region
from cairn.transfer.memory import Fence, PoolMemory


def open_pool(pool: Tensor) -> PoolMemory:
    """One rank's pool: uint8 [num_pages, page_bytes], contiguous. To be called by the thread that launches steps,
    before the first one."""
    return PoolMemory(pool.numpy()) if pool.device.type == "cpu" else CudaPool(pool)


class CudaPool(PoolMemory):
    """A `PoolMemory` in a GPU's memory. Its methods are for the thread that drives the link."""

    def __init__(self, pool: Tensor) -> None:
        device = pool.device
        torch.cuda.synchronize(device)  # it is being filled with zeros, and peers may write to it from now on
        self.region = Region(pool.data_ptr(), pool.shape[0], pool.shape[1], pool, device.index)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        """UCX copies with the context that it finds. Setting alone makes none where the number is the default one."""
        torch.cuda.set_device(self._device)
        self.fence()

    def fence(self) -> Fence:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.query
