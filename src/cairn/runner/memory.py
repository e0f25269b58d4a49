"""The memory that a model runs on: one pool of pages, and the live arrays of the running sequences.

pool   uint8 [num_pages, page_bytes]; a page of keys and values is [kv head][layer][k|v][token][dim]
live   per slot: hidden [hidden], conv [layer, columns, channels], state [layer, heads, ...]; the last slot is scratch
"""

import ctypes
import logging
import mmap
import os
import threading
from contextlib import suppress

import torch
from torch import Tensor

from cairn.cache.layout import CacheLayout
from cairn.errors import ConfigError, EngineDead
from cairn.layers.memory import MemorySpec, PagedLayer, RecurrentLayer
from cairn.machine import Machine
from cairn.step import StepPlan

ALIGNMENT = 64
"""Bytes; what torch's allocator gives, and as wide as any vector register."""

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), since Linux 5.14: memory comes as if it were written to, and stays as it is."""

_POPULATE_BYTES = 256 << 10
"""Populated by one call, some 100 microseconds: other threads that map memory wait for it, whatever its priority."""

_AHEAD_BYTES = 256 << 20
"""Of the pool, populated before it is used: a long prompt's pages and checkpoints."""

_LEAST_PRIORITY = 19

logger = logging.getLogger(__name__)


def allocate_pool(num_pages: int, page_bytes: int, device: torch.device, machine: Machine | None = None) -> Tensor:
    """Allocate a pool of zeros, uint8 [num_pages, page_bytes]. On the host it takes no memory before it is written to
    or populated.

    Raises ConfigError where the machine does not give so much memory.
    """
    if device.type != "cpu":
        return torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=device)
    num_bytes = num_pages * page_bytes
    described = f"--kv-cache-memory-bytes: a pool of {num_pages} pages of {page_bytes} bytes, {num_bytes} in all"
    # What the weights have really taken is known only now, and a process that writes too much is killed.
    available = (machine or Machine()).available_memory()
    if available is not None and num_bytes > available:
        raise ConfigError(f"{described}, does not fit into memory: lower it to at most {available}")
    try:
        memory = mmap.mmap(-1, _whole_pages(num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{described}, does not fit into memory: lower it") from error
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes).view(num_pages, page_bytes)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class PoolPopulation:
    """Has the operating system provide a pool's memory a little before it is used, so that few steps wait for page
    faults, and none of what nobody uses. A thread of low priority does it, and ends when it is ahead.

    `ahead`: bytes past the last page in use. Pages that have never been used are taken in ascending order, see
    `PagePool`. What comes sooner than expected comes by page faults, as it would without.
    """

    def __init__(self, pool: Tensor, ahead: int = _AHEAD_BYTES) -> None:
        self._begin, self._num_bytes, self._page_bytes = pool.data_ptr(), pool.nbytes, pool.stride(0)
        self._ahead = ahead
        self._wanted = self.populated = 0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def reach(self, page: int) -> None:
        """`page`: the last one in use, -1 for none."""
        wanted = min(self._num_bytes, _whole_pages((page + 1) * self._page_bytes + self._ahead))
        growth = wanted - self._wanted
        # Not for every page: a thread is worth some megabytes.
        if growth <= 0 or (growth < self._ahead // 4 and wanted < self._num_bytes):
            return
        with self._lock:
            self._wanted = wanted
            if self._thread is None:
                self._thread = threading.Thread(target=self._populate, name="populate", daemon=True)
                self._thread.start()

    def _populate(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
        advise = ctypes.CDLL(None, use_errno=True).madvise  # unlike Python's own it lets other threads go on
        while True:
            with self._lock:
                length = min(_POPULATE_BYTES, self._wanted - self.populated)
                if length <= 0:
                    self._thread = None
                    return
            address = ctypes.c_void_p(self._begin + self.populated)
            if advise(address, ctypes.c_size_t(length), _POPULATE_WRITE):
                reason = os.strerror(ctypes.get_errno())
                logger.info("the pool's memory comes as it is first written to: it cannot be had before: %s", reason)
                return
            self.populated += length


def explain_step_memory(error: torch.OutOfMemoryError, plan: StepPlan) -> EngineDead:
    """A GPU has no memory left for a step, of which some is carried out now."""
    reason = str(error).partition(". ")[0]
    return EngineDead(
        f"step {plan.step} of {plan.num_seqs} sequences finds no memory on the GPU ({reason}): some is left by "
        "--gpu-memory-utilization: lower it, --max-num-batched-tokens or --max-num-seqs, or see what else runs"
    )


def paged_layers(pool: Tensor, spec: MemorySpec, layout: CacheLayout) -> tuple[PagedLayer, ...]:
    """Views of the pool, one pair a layer. Raises ValueError where the layout is not that of the model."""
    if len(layout.groups) != len(spec.attention):
        expected = len(spec.attention)
        raise ValueError(f"{expected} groups of attention layers expected, the layout has {len(layout.groups)}")
    layers: list[PagedLayer] = []
    for group, attention in zip(layout.groups, spec.attention, strict=True):
        tokens, itemsize = group.tokens_per_page, spec.dtype.itemsize
        shape = (attention.num_layers, 2, tokens, attention.head_dim)
        expected = itemsize * attention.num_kv_heads * torch.Size(shape).numel()
        # A group with fewer layers leaves less than a token's bytes to nobody.
        if not 0 <= layout.page_bytes - expected < itemsize * attention.token_numbers:
            raise ValueError(
                f"layout.page_bytes {layout.page_bytes}, but the model's pages of {attention.num_kv_heads} heads of "
                f"{shape} take {expected}"
            )
        heads = pool.view(spec.dtype).view(pool.shape[0], attention.num_kv_heads, -1)
        pages = heads[:, :, : torch.Size(shape).numel()].view(*heads.shape[:2], *shape)
        layers += [PagedLayer(pages[:, :, layer, 0], pages[:, :, layer, 1]) for layer in range(attention.num_layers)]
    return tuple(layers)


def _aligned(shape: tuple[int, ...], lead: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of `shape`, whose entries along the first `lead` dimensions all begin at a multiple of ALIGNMENT bytes.

    BLAS may round otherwise where its operands lie otherwise, and a sequence must not notice its slot.
    """
    entry = torch.Size(shape[lead:]).numel()
    unit = ALIGNMENT // dtype.itemsize
    padded = torch.zeros(*shape[:lead], -(-entry // unit) * unit, dtype=dtype, device=device)
    return padded[..., :entry].view(shape)


def torch_dtype(state_dtype: str) -> torch.dtype:
    """Of a name of `STATE_DTYPES`."""
    dtype: torch.dtype = getattr(torch, state_dtype)
    return dtype


class LiveStates:
    """The running state of every slot, and one more for rows that belong to nobody. `recurrent` has a view a layer,
    [slots + 1, ...]. `tensors`: hidden states, convolution inputs and states of all layers, [slots + 1, ...] each, less
    those that the model does not have."""

    def __init__(self, spec: MemorySpec, num_slots: int) -> None:
        self.hidden = _aligned((num_slots + 1, spec.hidden_size), 1, spec.dtype, spec.device)
        self.recurrent: tuple[RecurrentLayer, ...] = ()
        self.tensors: tuple[Tensor, ...] = (self.hidden,)
        if spec.recurrent is not None:
            layers = spec.recurrent.num_layers
            conv_shape = (num_slots + 1, layers, spec.recurrent.columns, spec.recurrent.channels)
            conv = _aligned(conv_shape, 2, spec.dtype, spec.device)
            state_shape = (num_slots + 1, layers, *spec.recurrent.state)
            state = _aligned(state_shape, 2, torch_dtype(spec.recurrent.state_dtype), spec.device)
            self.recurrent = tuple(RecurrentLayer(conv[:, layer], state[:, layer]) for layer in range(layers))
            self.tensors += tuple(part for part in (conv, state) if part.numel())
