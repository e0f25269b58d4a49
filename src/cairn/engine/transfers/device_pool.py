"""The pool in a GPU's memory, as transfers see it. Imports torch: for the engine's worker alone.

    link       peers' bytes -> staging or pages      network adapter, CUDA IPC or UCX's own copies
    stream     staging -> pages, then an event       one kernel, beside the steps
    steps      read the pages                        launched when the host has seen the event

Steps are not made to wait on the device: no step names a page that is fetched before the host has seen the event. What
the link has reported before is ordered by it, too: bytes that a network adapter has written into a GPU's memory are
ordered by CUDA's calls that submit work or synchronize, and by nothing else (NVIDIA's "GPUDirect RDMA", 2.7).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from cairn.kernels import exact
from cairn.kernels.contract import Kernels
from cairn.kernels.staging import Staging
from cairn.transfer.geometry import GroupPairing
from cairn.transfer.links.contract import Region
from cairn.transfer.memory import Fence, HostPool, PoolMemory
from cairn.transfer.token_copies import TokenCopies


class NoStream:
    """Where copies are made beside the steps: on the host, where Triton is interpreted, they are done when they
    return."""

    def enter_thread(self) -> None:
        """Make the device this thread's own."""

    def use(self) -> AbstractContextManager[object]:
        """What is launched inside goes into the stream."""
        return nullcontext()

    def record(self) -> Fence:
        """An event after all of it."""
        return lambda: True


class CudaStream(NoStream):
    """A GPU's own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        """UCX copies with the context that it finds. Setting alone makes none where the number is the default one."""
        torch.cuda.set_device(self._device)
        self.record()

    def use(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def record(self) -> Fence:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.query


def open_pool(pool: Tensor, kernels: Kernels, *, on_host: bool) -> PoolMemory:
    """One rank's pool. `kernels`: those of the rank's device. `on_host`: whether that is where the rank computes. To be
    called by the thread that launches steps, before the first one."""
    return HostPool(pool.numpy()) if on_host else DevicePool.of(pool, kernels)


class DevicePool:
    """A `PoolMemory` of any device. `pool`: uint8 [rows, page_bytes], contiguous. `kernels`: those of the device.
    Everything but `region` is for the thread that drives the link."""

    def __init__(self, pool: Tensor, stream: NoStream, kernels: Kernels) -> None:
        self._pool = pool
        self._stream = stream
        self._kernels = kernels

    @classmethod
    def of(cls, pool: Tensor, kernels: Kernels) -> "DevicePool":
        """To be called by the thread that launches steps, before the first one."""
        if pool.device.type != "cuda":
            # Triton's interpreter is for one thread at a time, and steps have it.
            return cls(pool, NoStream(), exact)
        torch.cuda.synchronize(pool.device)  # it is being filled with zeros, and peers may write to it from now on
        return cls(pool, CudaStream(pool.device), kernels)

    @property
    def region(self) -> Region:
        pool = self._pool
        device = None if pool.device.type == "cpu" else pool.device.index
        return Region(pool.data_ptr(), pool.shape[0], pool.shape[1], pool, device)

    def enter_thread(self) -> None:
        self._stream.enter_thread()

    def lay_out(self, pairing: GroupPairing, copies: TokenCopies, first_page: int) -> None:
        """Token by token, in one launch without memory on the way, or one for each unit where units leave something at
        their ends; no number goes back to the host."""
        if not len(copies):
            return
        with self._stream.use():
            staging = Staging()
            numbers = (copies.pages, copies.page_tokens, copies.slots, copies.slot_tokens)
            arrays = [staging.add(each) for each in numbers]
            staging.send(self._pool.device)
            pages, page_tokens, slots, slot_tokens = (each.tensor for each in arrays)
            staged = self._pool[first_page:].view(-1)[: copies.num_slots * pairing.slot_bytes]
            bytes_of_slots = staged.view(copies.num_slots, pairing.slot_bytes)
            for target, source in _runs_of_units(self._pool, bytes_of_slots, pairing):
                self._kernels.copy_tokens(target, pages, page_tokens, source, slots, slot_tokens)

    def fence(self) -> Fence:
        return self._stream.record()


def _runs_of_units(pool: Tensor, slots: Tensor, pairing: GroupPairing) -> Iterator[tuple[Tensor, Tensor]]:
    """Pages and slots, uint8 [n, bytes], as [n, run, token, row]: of all units together where nothing lies between
    them, else unit by unit."""
    row, remote, local = pairing.row_bytes, pairing.remote_tokens, pairing.local_tokens
    used = pairing.runs * local * row
    num_parts = 1 if used == pairing.unit_bytes else pairing.units
    runs = pairing.units // num_parts * pairing.runs
    for unit in range(num_parts):
        first = unit * runs * remote * row
        target = pool[:, unit * pairing.unit_bytes :][:, : runs * local * row]
        source = slots[:, first : first + runs * remote * row]
        yield target.view(len(pool), runs, local, row), source.view(len(slots), runs, remote, row)
