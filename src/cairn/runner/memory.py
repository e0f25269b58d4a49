"""The memory that a model runs on: one pool of pages, and the live arrays of the running sequences.

pool   uint8 [num_pages, page_bytes]; a page of keys and values is [kv head][layer][k|v][token][dim]
live   per slot: hidden [hidden], conv [layer, columns, channels], state [layer, heads, ...]; the last slot is scratch
"""

import ctypes
import logging
import os
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap

import torch
from torch import Tensor

from cairn.cache.layout import CacheLayout
from cairn.errors import ConfigError
from cairn.layers.memory import MemorySpec, PagedLayer, RecurrentLayer
from cairn.machine import Machine
from cairn.types import Clock, SystemClock

ALIGNMENT = 64
"""Bytes; what torch's allocator gives, and as wide as any vector register."""

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), since Linux 5.14: memory comes as if it were written to, and stays as it is."""

_POPULATE_BYTES = 64 << 20
"""Populated by one call."""

logger = logging.getLogger(__name__)


def allocate_pool(num_pages: int, page_bytes: int, device: torch.device, machine: Machine | None = None) -> Tensor:
    """Allocate a pool of zeros, uint8 [num_pages, page_bytes]. On the host it takes no memory before it is written to
    or passed to `populate`.

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
        memory = mmap(-1, -(-num_bytes // PAGESIZE) * PAGESIZE, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{described}, does not fit into memory: lower it") from error
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes).view(num_pages, page_bytes)


def populate(pool: Tensor, clock: Clock | None = None) -> None:
    """Make the operating system provide all of the pool's memory now, so that no step waits for page faults. May run
    while the pool is used. Logs where the system cannot do that."""
    clock = clock or SystemClock()
    started, begin, num_bytes = clock.now(), pool.data_ptr(), pool.nbytes
    advise = ctypes.CDLL(None, use_errno=True).madvise  # unlike Python's own it lets other threads go on
    for offset in range(0, num_bytes, _POPULATE_BYTES):
        length = min(_POPULATE_BYTES, num_bytes - offset)
        if advise(ctypes.c_void_p(begin + offset), ctypes.c_size_t(length), _POPULATE_WRITE):
            reason = os.strerror(ctypes.get_errno())
            logger.info("the pool's memory comes as it is first written to: it cannot be had before: %s", reason)
            return
    logger.info("a pool of %d bytes was set aside in %.1f s", num_bytes, clock.now() - started)


def paged_layers(pool: Tensor, spec: MemorySpec, layout: CacheLayout) -> tuple[PagedLayer, ...]:
    """Views of the pool, one pair a layer. Raises ValueError where the layout is not that of the model."""
    attention = spec.attention
    if attention is None:
        return ()
    if len(layout.groups) != 1:
        raise ValueError(f"one group of attention layers expected, the layout has {len(layout.groups)}")
    tokens = layout.groups[0].tokens_per_page
    shape = (attention.num_kv_heads, attention.num_layers, 2, tokens, attention.head_dim)
    expected = spec.dtype.itemsize * torch.Size(shape).numel()
    if layout.page_bytes != expected:
        raise ValueError(f"layout.page_bytes {layout.page_bytes}, but the model's pages of {shape} take {expected}")
    pages = pool.view(spec.dtype).view(pool.shape[0], *shape)
    return tuple(PagedLayer(pages[:, :, layer, 0], pages[:, :, layer, 1]) for layer in range(attention.num_layers))


def _aligned(shape: tuple[int, ...], lead: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of `shape`, whose entries along the first `lead` dimensions all begin at a multiple of ALIGNMENT bytes.

    BLAS may round otherwise where its operands lie otherwise, and a sequence must not notice its slot.
    """
    entry = torch.Size(shape[lead:]).numel()
    unit = ALIGNMENT // dtype.itemsize
    padded = torch.zeros(*shape[:lead], -(-entry // unit) * unit, dtype=dtype, device=device)
    return padded[..., :entry].view(shape)


class LiveStates:
    """The running state of every slot, and one more for rows that belong to nobody. `recurrent` has a view a layer,
    [slots + 1, ...]."""

    def __init__(self, spec: MemorySpec, num_slots: int) -> None:
        self.hidden = _aligned((num_slots + 1, spec.hidden_size), 1, spec.dtype, spec.device)
        self.recurrent: tuple[RecurrentLayer, ...] = ()
        if spec.recurrent is not None:
            layers = spec.recurrent.num_layers
            conv_shape = (num_slots + 1, layers, spec.recurrent.columns, spec.recurrent.channels)
            conv = _aligned(conv_shape, 2, spec.dtype, spec.device)
            state = _aligned((num_slots + 1, layers, *spec.recurrent.state), 2, torch.float32, spec.device)
            self.recurrent = tuple(RecurrentLayer(conv[:, layer], state[:, layer]) for layer in range(layers))

    @property
    def tensors(self) -> list[Tensor]:
        """What holds the views: one a kind of state."""
        return [self.hidden, *(kind for layer in self.recurrent[:1] for kind in (layer.conv, layer.state))]
