"""The memory that a model runs on: one pool of pages, and the live arrays of the running sequences.

pool   uint8 [num_pages, page_bytes]; a page of keys and values is [kv head][layer][k|v][token][dim]
live   per slot: hidden [hidden], conv [layer, columns, channels], state [layer, heads, ...]; the last slot is scratch
"""

import torch
from torch import Tensor

from cairn.cache.layout import CacheLayout
from cairn.errors import ConfigError
from cairn.layers.memory import MemorySpec, PagedLayer, RecurrentLayer

ALIGNMENT = 64
"""Bytes; what torch's allocator gives, and as wide as any vector register."""


def new_pool(num_pages: int, page_bytes: int) -> Tensor:
    """Empty pages, uint8 [num_pages, page_bytes]. Raises ConfigError where the machine does not give so much memory."""
    try:
        return torch.zeros(num_pages, page_bytes, dtype=torch.uint8)
    except RuntimeError as error:  # torch's allocator has no kind of its own
        raise ConfigError(
            f"--kv-cache-memory-bytes: a pool of {num_pages} pages of {page_bytes} bytes, {num_pages * page_bytes} in "
            "all, does not fit into memory: lower it"
        ) from error


def paged_layers(pool: Tensor, spec: MemorySpec, layout: CacheLayout) -> tuple[PagedLayer, ...]:
    """Views of the pool, one pair a layer. Raises ValueError where the layout is not that of the model."""
    attention = spec.attention
    if attention is None:
        return ()
    if len(layout.groups) != 1:
        raise ValueError(f"one group of attention layers expected, the layout has {len(layout.groups)}")
    tokens = layout.groups[0].tokens_per_page
    shape = (attention.num_kv_heads, attention.num_layers, 2, tokens, attention.head_dim)
    wanted = spec.dtype.itemsize * torch.Size(shape).numel()
    if layout.page_bytes != wanted:
        raise ValueError(f"layout.page_bytes {layout.page_bytes}, but the model's pages of {shape} take {wanted}")
    pages = pool.view(spec.dtype).view(pool.shape[0], *shape)
    return tuple(PagedLayer(pages[:, :, layer, 0], pages[:, :, layer, 1]) for layer in range(attention.num_layers))


def _aligned(shape: tuple[int, ...], lead: int, dtype: torch.dtype) -> Tensor:
    """Zeros of `shape`, whose entries along the first `lead` dimensions all begin at a multiple of ALIGNMENT bytes.

    BLAS may round otherwise where its operands lie otherwise, and a sequence must not notice its slot.
    """
    entry = torch.Size(shape[lead:]).numel()
    unit = ALIGNMENT // dtype.itemsize
    padded = torch.zeros(*shape[:lead], -(-entry // unit) * unit, dtype=dtype)
    return padded[..., :entry].view(shape)


class LiveStates:
    """The running state of every slot, and one more for rows that belong to nobody. `recurrent` has a view a layer,
    [slots + 1, ...]."""

    def __init__(self, spec: MemorySpec, num_slots: int) -> None:
        self.hidden = _aligned((num_slots + 1, spec.hidden_size), 1, spec.dtype)
        self.recurrent: tuple[RecurrentLayer, ...] = ()
        if spec.recurrent is not None:
            layers = spec.recurrent.num_layers
            conv_shape = (num_slots + 1, layers, spec.recurrent.columns, spec.recurrent.channels)
            conv = _aligned(conv_shape, 2, spec.dtype)
            state = _aligned((num_slots + 1, layers, *spec.recurrent.state), 2, torch.float32)
            self.recurrent = tuple(RecurrentLayer(conv[:, layer], state[:, layer]) for layer in range(layers))
